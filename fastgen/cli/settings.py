"""What the flags of a run mean for transformers' generate, given the model's own generation_config."""

import argparse
import sys
from typing import Any

import transformers

# The flags that transformers calls by another name; the rest of GENERATE_FLAGS have the same name in both.
RENAMED_FLAGS = {"beam": "num_beams", "max_gen_length": "max_length", "min_gen_length": "min_length"}
GENERATE_FLAGS = (
    *RENAMED_FLAGS,
    "max_new_tokens",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "decoder_start_token_id",
    "eos_token_id",
    "num_return_sequences",
    "temperature",
    "top_k",
    "top_p",
)
# A model's own value of the second would silently win over the flag that sets the first.
OVERRULED_BY = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}


def task_settings(args: argparse.Namespace, config: transformers.PretrainedConfig) -> dict[str, Any]:
    """What the model's config keeps for --task (its task_specific_params), the prefix of T5 among it."""
    known = getattr(config, "task_specific_params", None) or {}
    if args.task is not None and args.task not in known:
        has = ", ".join(known) or "none"
        print(f"note: MODEL has no settings for --task {args.task} (it has: {has})", file=sys.stderr)
    return known.get(args.task, {})


def generate_arguments(
    args: argparse.Namespace, model: transformers.PreTrainedModel, task: dict[str, Any], pad_token_id: int
) -> dict[str, Any]:
    """Keyword arguments of generate: the task's settings, and over them the flags that were given."""
    own = model.generation_config
    settings = {name: value for name, value in task.items() if hasattr(own, name)}
    for flag in GENERATE_FLAGS:
        value = getattr(args, flag)
        if value is not None:
            settings[RENAMED_FLAGS.get(flag, flag)] = value
    if args.max_new_tokens is not None:
        settings.pop("max_length", None)
    for name, stronger in OVERRULED_BY.items():
        if name in settings and stronger not in settings and getattr(own, stronger) is not None:
            settings[stronger] = None
    if args.do_sample:
        settings["do_sample"] = True
    if own.pad_token_id is None:
        settings["pad_token_id"] = pad_token_id
    if args.output_sequence_scores:
        settings |= {"output_scores": True, "return_dict_in_generate": True}
    return settings


def effective(name: str, settings: dict[str, Any], model: transformers.PreTrainedModel) -> Any:
    """The value generate will use, or None where neither the flags nor the model say."""
    return settings[name] if name in settings else getattr(model.generation_config, name)
