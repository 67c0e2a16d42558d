"""--generation_config and --gen: settings of generate by the library's own names, checked against what it knows.

A file takes the place that the library gives to `model.generate(generation_config=…)`: its values come before the
model's own, and what it leaves out stays the model's. So the special tokens of a model stay, unless the file has
others, and so does the model's own max_new_tokens where the file has only a max_length.
"""

import copy
import inspect
import sys
from difflib import get_close_matches
from typing import Any

import transformers
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation.configuration_utils import GenerationMode

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.model.speaking import settings_of_parts

# Arguments of a model's own generate that take plain values and that no GenerationConfig needs to have: Whisper's.
OWN_ARGUMENTS = (
    "language",
    "task",
    "return_timestamps",
    "is_multilingual",
    "condition_on_prev_tokens",
    "prompt_condition_type",
    "compression_ratio_threshold",
    "logprob_threshold",
    "no_speech_threshold",
    "tgt_lang",
)
# What is written into a generation_config.json beside settings.
METADATA = ("transformers_version", "_from_model_config", "_commit_hash")
MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)


def apply_file(args: RunConfig, model: transformers.PreTrainedModel) -> None:
    """Puts the values of --generation_config in place of the model's own; raises InputError for bad ones."""
    if args.generation_config is None:
        return
    known = known_settings(model)
    for key in args.generation_config:
        if key not in known and key not in METADATA:
            print(f"note: --generation_config: {key} changes nothing{_did_you_mean(key, known)}", file=sys.stderr)
    try:
        given = GenerationConfig.from_dict(dict(args.generation_config))
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"--generation_config: {error}") from error
    merged = copy.deepcopy(model.generation_config)
    for key, value in vars(given).items():
        if value is not None and key not in METADATA:
            setattr(merged, key, value)
    model.generation_config = merged


def gen_settings(args: RunConfig, model: transformers.PreTrainedModel) -> dict[str, Any]:
    """What --gen asks for; raises InputError for a key that neither the library nor the model knows."""
    known = known_settings(model)
    if args.speaks:
        known |= settings_of_parts(model, known)
    for key, value in args.gen:
        if key not in known:
            raise InputError(f"--gen {key}={value}: there is no such setting{_did_you_mean(key, known)}")
    settings = dict(args.gen)
    watermark = settings.get("watermarking_config")
    if isinstance(watermark, dict):
        try:
            settings["watermarking_config"] = WatermarkingConfig.from_dict(watermark)
        except (ValueError, TypeError) as error:
            raise InputError(f"--gen watermarking_config={watermark} cannot be used: {error}") from error
    return settings


def check_values(args: RunConfig, model: transformers.PreTrainedModel, settings: dict[str, Any]) -> None:
    """Raises InputError for settings that generate would refuse at the first batch."""
    config = copy.deepcopy(model.generation_config)
    given = ", ".join(args.setting_flags()) or "the settings of MODEL"
    try:
        config.update(**settings)
        mode = config.get_generation_mode()
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{given} cannot be used: {error}") from error
    if mode not in MODES:
        raise InputError(
            f"{given} ask for {mode.value.replace('_', ' ')}, whose code is on the hub and not in transformers "
            "(accepted: greedy search, sampling, beam search)"
        )
    if config.cache_implementation == "paged":
        raise InputError("cache_implementation=paged does not go with batches (accepted: dynamic, static, …)")


def known_settings(model: transformers.PreTrainedModel) -> set[str]:
    """Names that the library's GenerationConfig has, and those of the model's own and of its own generate."""
    own_arguments = inspect.signature(type(model).generate).parameters
    names = {*vars(GenerationConfig()), *vars(model.generation_config)}
    names |= {name for name in OWN_ARGUMENTS if name in own_arguments}
    return {name for name in names if not name.startswith("_")} - set(METADATA)


def _did_you_mean(key: str, known: set[str]) -> str:
    nearest = get_close_matches(key, sorted(known), n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else " (accepted: fields of transformers' GenerationConfig)"
