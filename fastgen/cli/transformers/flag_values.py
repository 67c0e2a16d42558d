"""Values of flags: from text on the command line to what the flag means, or an error that says what is accepted.

Tests: tests/cli/transformers/test_cli_flags.py, tests/cli/transformers/test_cli_bad_flags.py
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Counts, lengths, token ids and seeds all fit; what is beyond would overflow inside torch.
LARGEST_NUMBER = 2**31 - 1


def _number(kind: type, accepted: str, fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number (accepted: {accepted})") from None
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text} is out of range (accepted: {accepted})")
        return value

    return parse


UNSET = {"-1": None}  # FastSeq's number for "not given"
AUTO = {"auto": "auto"}


def whole(minimum: int, words: dict[str, Any] | None = None) -> Callable[[str], Any]:
    """A parser of whole numbers from `minimum` on, and of words that stand for values of their own."""
    known = words or {}
    accepted = ", or ".join([f"a whole number, {minimum} to {LARGEST_NUMBER}", *known])
    parse = _number(int, accepted, lambda n: minimum <= n <= LARGEST_NUMBER)
    return lambda text: known[text] if text in known else parse(text)


def real(above: float = -math.inf, up_to: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers greater than `above` and not greater than `up_to`."""
    bounds = [f"greater than {above:g}"] * (above > -math.inf) + [f"at most {up_to:g}"] * (up_to < math.inf)
    accepted = " and ".join(["a finite number", *bounds])
    return _number(float, accepted, lambda x: math.isfinite(x) and above < x <= up_to)


def one_of(values: dict[str, Any]) -> Callable[[str], Any]:
    """A parser of the names in `values`, in capitals or not."""

    def parse(text: str) -> Any:
        if text.lower() not in values:
            raise argparse.ArgumentTypeError(f"{text!r} is not known (accepted: {', '.join(values)})")
        return values[text.lower()]

    return parse


def json_file(text: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(Path(text).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or f"is not JSON ({error})"
        raise argparse.ArgumentTypeError(f"{text}: {why}") from None
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f'{text}: holds no JSON object (accepted: {{"num_beams": 4, …}})')
    return values


_BOOLEAN = one_of({"true": True, "false": False})
# Settings of generate whose values are checked here, whichever flag they are given with; GenerationConfig checks all.
SETTINGS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "max_length", "max_new_tokens"), whole(1)),
    "min_length": whole(0, UNSET),
    **dict.fromkeys(("min_new_tokens", "no_repeat_ngram_size", "top_k"), whole(0)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id"), whole(0)),
    **dict.fromkeys(("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id"), whole(0)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "temperature", "max_time"), real(above=0)),
    **dict.fromkeys(("top_p", "typical_p"), real(above=0, up_to=1)),
    **dict.fromkeys(("length_penalty", "guidance_scale"), real()),
    **dict.fromkeys(("logprob_threshold", "no_speech_threshold", "compression_ratio_threshold"), real()),
    **dict.fromkeys(("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values"), _BOOLEAN),
    **dict.fromkeys(("return_timestamps", "condition_on_prev_tokens"), _BOOLEAN),
    "early_stopping": one_of({"true": True, "false": False, "never": "never"}),  # as transformers takes it
}


def setting(text: str) -> tuple[str, Any]:
    """key=value."""
    key, equals, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if not (equals and key.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting (accepted: key=value, such as num_beams=4)")
    try:
        return parsed(key, value)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{key}={error}") from None


def parsed(key: str, text: str) -> tuple[str, Any]:
    """A setting and its value: a JSON literal, else the text itself; a single value of one that is known is checked."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    takes_list = isinstance(value, list) and (key.endswith("_token_id") or key == "temperature")
    return key, SETTINGS[key](text) if key in SETTINGS and value is not None and not takes_list else value
