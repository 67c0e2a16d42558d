"""Lengths and token ids that a model cannot take, found before it meets them.

A model with learned positions fails in the middle of a run when it meets one position too many, on a GPU with an
error that says nothing of the kind; a model without them gives poor text. Both are worth a message beforehand.
"""

from typing import Any

import torch
import transformers

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.flags.flag_checks import check_several_outputs
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.model.loading import LoadedModel, positions
from fastgen.cli.transformers.model.settings import effective
from fastgen.cli.transformers.model.speaking import speaking

# Tokenizers without a limit of their own say 10**30.
NO_LIMIT = 10**9
# What drafts tokens and verifies them, which the library does for a single row.
ASSISTED = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def check_settings(args: RunConfig, loaded: LoadedModel, settings: dict[str, Any]) -> None:
    """Raise InputError for flags that this model cannot follow, whatever the input is."""
    check_several_outputs(args, effective("num_return_sequences", settings, loaded) or 1)
    for name in ASSISTED:
        if (value := effective(name, settings, loaded)) and args.bs != 1:
            raise InputError(f"{name} {value} takes one input at a time (accepted: --bs 1)")
    config = loaded.model.config
    if loaded.feature_extractor is None:
        input_positions = positions(config, "decoder" if loaded.causal_lm else "encoder")
        _check_at_most("--max_tokenizer_length", args.max_tokenizer_length, input_positions)
    output_positions = positions(config, "decoder")
    for name, flag in (("max_length", "--max_gen_length"), ("max_new_tokens", "--max_new_tokens")):
        given = settings.get(name) if name in dict(args.gen) else getattr(args, flag.removeprefix("--"))
        _check_at_most(_given_as(args, name, flag), given, output_positions)
    last_token = config.get_text_config(decoder=True).vocab_size - 1
    for name, value in settings.items():
        if name.endswith("_token_id"):
            for each in value if isinstance(value, (list, tuple)) else [value]:
                _check_at_most(_given_as(args, name, f"--{name}"), each, last_token)
    threshold = effective("no_speech_threshold", settings, loaded)
    if threshold is not None and settings.get("logprob_threshold") is None:
        raise InputError(f"no_speech_threshold {threshold} needs a logprob_threshold (accepted: --gen for both)")
    limit = input_limit(args, loaded, settings)
    if limit is not None and limit[0] < 1:
        raise InputError(f"no input is short enough: the limit is {limit[0]} tokens ({limit[1]})")


def _given_as(args: RunConfig, name: str, flag: str) -> str:
    return f"--gen {name}" if name in dict(args.gen) else flag


def _check_at_most(flag: str, value: Any, limit: int | None) -> None:
    if isinstance(value, int) and limit is not None and value > limit:
        raise InputError(f"{flag} {value} is more than MODEL allows (accepted: up to {limit})")


def embedded_tokens(model: transformers.PreTrainedModel) -> int | None:
    """How many tokens the model has an embedding for; a GPU that meets another one does nothing more."""
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embedding.num_embeddings if isinstance(embedding, torch.nn.Embedding) else None


def hears_windows(loaded: LoadedModel, settings: dict[str, Any]) -> bool:
    """Whether generate takes recordings longer than MODEL hears at once.

    Whisper's does, which finds where the next window begins by the timestamps that it generates.
    """
    has_timestamps = getattr(loaded.generation_config, "no_timestamps_token_id", None) is not None
    return loaded.is_whisper and has_timestamps and settings.get("return_timestamps") is not False


def lengths_of_inputs(
    args: RunConfig, loaded: LoadedModel, settings: dict[str, Any]
) -> tuple[int | None, tuple[int, str] | None]:
    """To how many tokens inputs are truncated; and the most that they may have, with what a longer one's message says.

    None where there is no such number.
    """
    limit, asked = input_limit(args, loaded, settings), args.max_tokenizer_length
    if args.truncation:
        return min(filter(None, (asked, limit and limit[0])), default=None), limit
    if args.no_truncation and asked is not None:
        limit, asked = min(filter(None, (limit, (asked, f"--max_tokenizer_length {asked}")))), None
    if limit is not None and not args.chat:
        limit = limit[0], f"{limit[1]}; --truncation truncates"
    return asked, limit


def input_limit(args: RunConfig, loaded: LoadedModel, settings: dict[str, Any]) -> tuple[int, str] | None:
    """The most tokens that an input may have, and what sets this number; None where nothing does, and for speech."""
    if loaded.feature_extractor is not None:
        return None
    limits = []
    if loaded.speaks and (most := speaking(loaded.model).most_tokens) is not None:
        limits.append((most, "MODEL's prompt"))
    # --max_tokenizer_length stands in for the tokenizer's own limit.
    if args.max_tokenizer_length is None and loaded.tokenizer.model_max_length < NO_LIMIT:
        limits.append((loaded.tokenizer.model_max_length, "MODEL's tokenizer; --max_tokenizer_length sets another"))
    number = positions(loaded.model.config, "decoder" if loaded.causal_lm else "encoder")
    new_tokens, total = (effective(name, settings, loaded) for name in ("max_new_tokens", "max_length"))
    if number is not None and loaded.causal_lm:
        following = new_tokens or 1
        limits.append((number - following, f"MODEL's {number} positions less {following} for generated tokens"))
    elif number is not None:
        limits.append((number, "MODEL's positions"))
    if loaded.causal_lm and new_tokens is None and total is not None:
        name = "max_length" if args.max_gen_length is None else "--max_gen_length"
        limits.append((total - 1, f"{name} {total}, which counts the prompt"))
    return min(limits, default=None)
