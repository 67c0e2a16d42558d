"""Models whose outputs are sounds: how they are called, and what they differ in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.flags.run_config import RunConfig

BARK_TOKENS = 256


def _generate(model: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """Seamless M4T's."""
    waveforms, lengths = model.generate(**given)[:2]
    return waveforms, lengths


def _generate_of_prompts(model: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """Bark's, whose prompts have one length."""
    for name in ("input_ids", "attention_mask"):
        given[name] = functional.pad(given[name], (0, BARK_TOKENS - given[name].shape[1]))
    waveforms, lengths = model.generate(**given, return_output_lengths=True)
    return waveforms, torch.as_tensor(lengths)


def _forward(model: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """VITS', which draws noise."""
    with torch.no_grad():
        output = model(**given)
    return output.waveform, output.sequence_lengths


class Speaking(NamedTuple):
    """What is particular to a kind of model.

    call: gives waveforms [B, S] and their lengths [B]. parts: the models inside of it, which stand before settings that
    are for one of them. speaker: the argument that chooses one. speakers: the field of the config that counts them.
    most_tokens: of a text. tokenizer: options of the tokenizer's call.
    """

    call: Callable[..., tuple[Tensor, Tensor]]
    parts: tuple[str, ...] = ()
    speaker: str = "speaker_id"
    speakers: str | None = None
    most_tokens: int | None = None
    tokenizer: Mapping[str, Any] = MappingProxyType({})


KINDS = {
    "seamless_m4t": Speaking(_generate, ("text", "speech"), "spkr_id", "vocoder_num_spkrs"),
    "seamless_m4t_v2": Speaking(_generate, ("text", "speech"), "speaker_id", "vocoder_num_spkrs"),
    "vits": Speaking(_forward, speakers="num_speakers"),
    "bark": Speaking(
        _generate_of_prompts,
        ("semantic", "coarse", "fine"),
        most_tokens=BARK_TOKENS,
        tokenizer={"add_special_tokens": False},
    ),
}


def speaking(model: transformers.PreTrainedModel) -> Speaking:
    """How `model` speaks."""
    return KINDS[model.config.model_type]


def check_settings_have_a_use(args: RunConfig, model: transformers.PreTrainedModel) -> None:
    """Raises InputError for settings of generate where MODEL has no generate."""
    given = args.setting_flags()
    if args.generation_config is not None:
        given.append("--generation_config")
    for key, value in args.gen:
        if args.speaks and key.endswith("num_return_sequences") and value != 1:
            raise InputError(f"--gen {key}={value} does not go with --task {args.task}: an input becomes one sound")
    if given and not model.can_generate():
        raise InputError(f"{given[0]} does not go with MODEL {args.model}, which has no settings of generation")


def settings_of_parts(model: transformers.PreTrainedModel, names: set[str]) -> set[str]:
    """The names of settings that are for one of the models inside of `model`, such as text_num_beams."""
    return {f"{part}_{name}" for part in speaking(model).parts for name in names}


def speaker_settings(args: RunConfig, model: transformers.PreTrainedModel) -> dict[str, int]:
    """The argument that --speaker_id gives; raises InputError for a speaker that MODEL has not."""
    if args.speaker_id is None:
        return {}
    kind = speaking(model)
    number = 1 if kind.speakers is None else getattr(model.config, kind.speakers)
    if number < 2:
        raise InputError(f"--speaker_id {args.speaker_id}: MODEL {args.model} has no speakers to choose from")
    if args.speaker_id >= number:
        raise InputError(f"--speaker_id {args.speaker_id} is not known to MODEL (accepted: 0 to {number - 1})")
    return {kind.speaker: args.speaker_id}


def sampling_rate(model: transformers.PreTrainedModel) -> int:
    """Samples in a second of what it speaks."""
    config = model.config
    return config.codec_config.sampling_rate if config.model_type == "bark" else config.sampling_rate
