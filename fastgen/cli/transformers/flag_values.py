"""Values of flags: from text on the command line to what the flag means, or an error that says what is accepted.

Tests: tests/cli/transformers/test_cli_flags.py, tests/cli/transformers/test_cli_bad_flags.py
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

# Counts, lengths, token ids and seeds all fit; what is beyond would overflow inside torch.
LARGEST_NUMBER = 2**31 - 1

T = TypeVar("T", int, float)


def _number(read: Callable[[str], T], name: str, accepted: str, fits: Callable[[T], bool]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        try:
            value = read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {name} (accepted: {accepted})") from None
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text} is out of range (accepted: {accepted})")
        return value

    return parse


def whole(minimum: int, unset: int | None = None) -> Callable[[str], int | None]:
    """A parser of whole numbers from `minimum` on; `unset` is FastSeq's number for "not given" and becomes None."""
    accepted = f"{minimum} to {LARGEST_NUMBER}" + ("" if unset is None else f", or {unset} for not set")
    parse = _number(int, "a whole number", accepted, lambda n: n == unset or minimum <= n <= LARGEST_NUMBER)
    return lambda text: None if (value := parse(text)) == unset else value


def real(above: float = -math.inf, up_to: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers greater than `above` and not greater than `up_to`."""
    bounds = [f"greater than {above:g}"] * (above > -math.inf) + [f"at most {up_to:g}"] * (up_to < math.inf)
    accepted = " and ".join(["a finite number", *bounds])
    return _number(float, "a number", accepted, lambda x: math.isfinite(x) and above < x <= up_to)


def one_of(values: dict[str, Any]) -> Callable[[str], Any]:
    """A parser of the names in `values`, in capitals or not."""

    def parse(text: str) -> Any:
        if text.lower() not in values:
            raise argparse.ArgumentTypeError(f"{text!r} is not known (accepted: {', '.join(values)})")
        return values[text.lower()]

    return parse


def device(text: str) -> str:
    """Only the form is checked here; whether the device is there needs torch."""
    if not re.fullmatch(r"[a-z]+(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device (accepted: cpu, cuda, cuda:1, …)")
    return text


def json_file(text: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(Path(text).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise argparse.ArgumentTypeError(f"{text}: there is no such file") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f'{text}: holds no JSON object (accepted: {{"num_beams": 4, …}})')
    return values


_BOOLEAN = one_of({"true": True, "false": False})
# Settings of generate whose values are checked here, whichever flag they are given with; GenerationConfig checks all.
SETTINGS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "max_length", "max_new_tokens"), whole(1)),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "top_k"), whole(0)),
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
    """key=value: a JSON literal, else the text itself; a single value of a setting that is known is checked."""
    key, equals, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if not (equals and key.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting (accepted: key=value, such as num_beams=4)")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    takes_list = isinstance(parsed, list) and (key.endswith("_token_id") or key == "temperature")
    if key in SETTINGS and parsed is not None and not takes_list:
        try:
            parsed = SETTINGS[key](value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{key}={error}") from None
    return key, parsed
