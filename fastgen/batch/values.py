"""Values of settings: what each accepts, as a value of Python or as text of a command line.

A check returns the value that a setting means, or raises BadValue with what would be accepted.

Tests: tests/batch/test_settings.py, tests/cli/transformers/test_flags.py
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Counts, lengths, token ids and seeds all fit; what is beyond would overflow inside torch.
LARGEST_NUMBER = 2**31 - 1

Check = Callable[[Any], Any]


class BadValue(ValueError):
    """A value that a setting does not accept. The message says why; the caller knows which setting it is."""


def _number(convert: Callable[[Any], Any], accepted: str, fits: Callable[[Any], bool]) -> Check:
    def check(value: Any) -> Any:
        try:
            number = convert(value)
        except (TypeError, ValueError, OverflowError):
            raise BadValue(f"{value!r} is no number (accepted: {accepted})") from None
        if not fits(number) or isinstance(value, bool):
            raise BadValue(f"{value} is out of range (accepted: {accepted})")
        return number

    return check


UNSET = {"-1": None}  # FastSeq's number for "not given"
AUTO = {"auto": "auto"}


def whole(minimum: int, words: dict[str, Any] | None = None) -> Check:
    """Returns the check of whole numbers from `minimum` on, and of words that stand for values of their own."""
    known = words or {}
    accepted = ", or ".join([f"a whole number, {minimum} to {LARGEST_NUMBER}", *known])
    number = _number(
        lambda value: int(value) if isinstance(value, str) else operator.index(value),
        accepted,
        lambda n: minimum <= n <= LARGEST_NUMBER,
    )
    return lambda value: known[value] if isinstance(value, str) and value in known else number(value)


def real(above: float = -math.inf, up_to: float = math.inf) -> Check:
    """Returns the check of finite numbers greater than `above` and not greater than `up_to`."""
    bounds = [f"greater than {above:g}"] * (above > -math.inf) + [f"at most {up_to:g}"] * (up_to < math.inf)
    accepted = " and ".join(["a finite number", *bounds])
    return _number(float, accepted, lambda x: math.isfinite(x) and above < x <= up_to)


def one_of(*values: Any) -> Check:
    """Returns the check of these values, or of their names in capitals or not."""
    named = {str(value).lower(): value for value in values}

    def check(value: Any) -> Any:
        if str(value).lower() not in named or not isinstance(value, (str, bool)):
            raise BadValue(f"{value!r} is not known (accepted: {', '.join(named)})")
        return named[str(value).lower()]

    return check


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValue(f"{value!r} is no text (accepted: a string)")
    return value


def json_object(value: Any) -> dict[str, Any]:
    """The check of an object, or of the path of a JSON file that holds one."""
    values = value
    if isinstance(value, str):
        try:
            values = json.loads(Path(value).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or f"is not JSON ({error})"
            raise BadValue(f"{value}: {why}") from None
    if not isinstance(values, dict):
        raise BadValue(f'{value}: holds no JSON object (accepted: {{"num_beams": 4, …}})')
    return values


flag = one_of(True, False)
# Settings of generate whose values are checked here, however they are given; GenerationConfig checks all.
SETTINGS: dict[str, Check] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "max_length", "max_new_tokens"), whole(1)),
    "min_length": whole(0, UNSET),
    **dict.fromkeys(("min_new_tokens", "no_repeat_ngram_size", "top_k"), whole(0)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id"), whole(0)),
    **dict.fromkeys(("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id"), whole(0)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "temperature", "max_time"), real(above=0)),
    **dict.fromkeys(("top_p", "typical_p"), real(above=0, up_to=1)),
    **dict.fromkeys(("length_penalty", "guidance_scale"), real()),
    **dict.fromkeys(("logprob_threshold", "no_speech_threshold", "compression_ratio_threshold"), real()),
    **dict.fromkeys(("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values"), flag),
    **dict.fromkeys(("return_timestamps", "condition_on_prev_tokens"), flag),
    "early_stopping": one_of(True, False, "never"),  # as transformers takes it
}


def setting(name: str, value: Any) -> Any:
    """Returns the value of a setting of generate; a single value of one in SETTINGS is checked."""
    takes_list = isinstance(value, (list, tuple)) and (name.endswith("_token_id") or name == "temperature")
    return SETTINGS[name](value) if name in SETTINGS and value is not None and not takes_list else value
