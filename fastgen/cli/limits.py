"""Lengths and token ids that a model cannot take, found before anything is generated.

A model with learned positions fails in the middle of a run when it meets one position too many, on a GPU with an
error that says nothing of the kind; a model without them gives poor text. Both are worth a message beforehand.
"""

import argparse
from pathlib import Path
from typing import Any

import transformers

from fastgen.cli.arguments import check_number_of_outputs
from fastgen.cli.errors import InputError
from fastgen.cli.loading import LoadedModel
from fastgen.cli.settings import effective

# Tokenizers without a limit of their own say 10**30.
NO_LIMIT = 10**9


def positions(config: transformers.PretrainedConfig, part: str) -> int | None:
    """How many tokens the "encoder" or the "decoder" has positions for; None where the config sets no limit."""
    text_config = getattr(config, part, None)  # a config of its own in EncoderDecoderModel and T5Gemma
    if not isinstance(text_config, transformers.PretrainedConfig):
        text_config = config.get_text_config(**{part: True})
    for name in (f"max_{part}_position_embeddings", "max_position_embeddings"):
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def check_settings(args: argparse.Namespace, loaded: LoadedModel, settings: dict[str, Any]) -> None:
    """Raise InputError for flags that this model cannot follow, whatever the input is."""
    model = loaded.model
    check_number_of_outputs(
        effective("num_return_sequences", settings, model) or 1,
        effective("num_beams", settings, model) or 1,
        bool(effective("do_sample", settings, model)),
    )
    input_positions = positions(model.config, "decoder" if loaded.causal_lm else "encoder")
    _check_at_most("--max_tokenizer_length", args.max_tokenizer_length, input_positions)
    output_positions = positions(model.config, "decoder")
    _check_at_most("--max_gen_length", args.max_gen_length, output_positions)
    _check_at_most("--max_new_tokens", args.max_new_tokens, output_positions)
    last_token = model.config.get_text_config(decoder=True).vocab_size - 1
    _check_at_most("--decoder_start_token_id", args.decoder_start_token_id, last_token)
    _check_at_most("--eos_token_id", args.eos_token_id, last_token)


def _check_at_most(flag: str, value: int | None, limit: int | None) -> None:
    if value is not None and limit is not None and value > limit:
        raise InputError(f"{flag} {value} is more than MODEL allows (accepted: up to {limit})")


def check_lengths(
    path: Path, token_ids: list[list[int]], args: argparse.Namespace, loaded: LoadedModel, settings: dict[str, Any]
) -> None:
    """Raise InputError naming the first line that is longer than the model's limit, its length and the limit."""
    limit = _input_limit(args, loaded)
    if loaded.causal_lm:
        prompt_limit = _prompt_limit(loaded, settings)
        limit = min((each for each in (limit, prompt_limit) if each is not None), default=None)
    if limit is None:
        return
    for number, ids in enumerate(token_ids, start=1):
        if len(ids) > limit[0]:
            raise InputError(f"INPUT {path}: line {number} has {len(ids)} tokens, the limit is {limit[0]} ({limit[1]})")


def _input_limit(args: argparse.Namespace, loaded: LoadedModel) -> tuple[int, str] | None:
    """The model's limit on an input, and what sets it."""
    limits = []
    number = positions(loaded.model.config, "decoder" if loaded.causal_lm else "encoder")
    if number is not None:
        limits.append((number, "MODEL's positions; --max_tokenizer_length truncates"))
    # --max_tokenizer_length stands in for the tokenizer's own limit.
    if args.max_tokenizer_length is None and loaded.tokenizer.model_max_length < NO_LIMIT:
        limits.append((loaded.tokenizer.model_max_length, "MODEL's tokenizer; --max_tokenizer_length truncates"))
    return min(limits, default=None)


def _prompt_limit(loaded: LoadedModel, settings: dict[str, Any]) -> tuple[int, str] | None:
    """How long a prompt may be for the tokens that are to follow it, and why."""
    limits = []
    new_tokens = effective("max_new_tokens", settings, loaded.model)
    total = effective("max_length", settings, loaded.model)
    if new_tokens is None and total is not None:
        limits.append((total - 1, f"--max_gen_length {total}, which counts the prompt"))
    number = positions(loaded.model.config, "decoder")
    if number is not None:
        following = new_tokens or 1
        limits.append((number - following, f"MODEL's {number} positions less {following} for generated tokens"))
    return min(limits, default=None)
