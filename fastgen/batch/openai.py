"""OpenAI's batch format: what the body of a request asks generate for, and where its stop strings end an output.

Requests that ask for the same share batches. One that samples beams with a seed of its own has a batch to itself: what
is drawn for a beam depends on the rows beside it.

Tests: tests/batch/test_openai.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fastgen.batch import records
from fastgen.batch.files import Line
from fastgen.batch.model import Loaded, input_limit, positions
from fastgen.batch.planner import Item
from fastgen.batch.settings import draws_by_row

MOST_OUTPUTS = 128  # OpenAI's limit


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    return _is_number(value) and value == int(value) and least <= value <= most


def _are_stops(value: Any) -> bool:
    return all(isinstance(each, str) and each for each in ([value] if isinstance(value, str) else value or [0]))


# What is read of a body: the library's name of the setting, which values it may have, and how a message says that.
FIELDS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "max_tokens": ("max_new_tokens", lambda value: _is_whole(value, 1), "a whole number, 1 or more"),
    "max_completion_tokens": ("max_new_tokens", lambda value: _is_whole(value, 1), "a whole number, 1 or more"),
    "temperature": ("temperature", lambda value: _is_number(value) and value >= 0, "a number, 0 or more"),
    "top_p": ("top_p", lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "n": ("num_return_sequences", lambda value: _is_whole(value, 1, MOST_OUTPUTS), f"1 to {MOST_OUTPUTS}"),
    "seed": ("seed", lambda value: _is_whole(value, -(1 << 63), (1 << 63) - 1), "a whole number of 64 bits"),
    "stop": ("stop_strings", lambda value: isinstance(value, (str, list)) and _are_stops(value), "strings with text"),
}


class Bodies:
    """Reads bodies of requests; threads may share it. unused: names in them that change nothing."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.unused: set[str] = set()

    def settings(self, line: Line) -> tuple[list[list[Any]] | None, tuple[int, int] | None]:
        """Returns names and values of settings, as JSON, sorted, and the seed; raises RecordError for what cannot be
        done."""
        body = records.parse(records.decode(line))["body"]
        self.unused.update(name for name in body if name not in ("model", "messages", *FIELDS))
        settings: dict[str, Any] = {}
        for name, (setting, accepts, accepted) in FIELDS.items():
            value = body.get(name)
            if value is None or value == []:
                continue
            if not accepts(value):
                raise _refused(name, value, accepted)
            settings[setting] = value
        if "temperature" in settings:
            settings["do_sample"] = settings["temperature"] > 0
            settings["temperature"] = float(settings["temperature"]) or 1.0
        for setting in ("max_new_tokens", "num_return_sequences", "seed"):
            if setting in settings:
                settings[setting] = int(settings[setting])
        if isinstance(settings.get("stop_strings"), str):
            settings["stop_strings"] = [settings["stop_strings"]]
        self._check(settings)
        of_lines, seed = None, settings.pop("seed", None)
        if seed is not None and draws_by_row(self._loaded, settings):
            of_lines = seed % (1 << 64), 0
        elif seed is not None and self._samples(settings):
            settings["seed"] = [seed, line.number]
        return [list(each) for each in sorted(settings.items())] or None, of_lines

    def input_limit(self, settings: list[list[Any]] | None) -> tuple[int, str] | None:
        """The most tokens that a prompt with these settings may have, and what sets the number."""
        max_new_tokens = dict(settings or ()).get("max_new_tokens")
        return None if max_new_tokens is None else input_limit(self._loaded, max_new_tokens)

    def _samples(self, settings: dict[str, Any]) -> bool:
        return bool(settings.get("do_sample", self._loaded.value("do_sample")))

    def _check(self, settings: dict[str, Any]) -> None:
        """Raises RecordError for numbers of tokens and of outputs that this model, or this run, cannot give."""
        loaded, args = self._loaded, self._loaded.args
        number, max_new_tokens = positions(loaded.model.config, "decoder"), settings.get("max_new_tokens", 0)
        if number is not None and max_new_tokens >= number:
            raise _refused("max_tokens", max_new_tokens, f"up to {number - 1}, of MODEL's {number} positions")
        outputs, beams = settings.get("num_return_sequences", 1), loaded.value("num_beams") or 1
        if beams > 1 and outputs > beams:
            raise _refused("n", outputs, f"up to {beams}, the beams of the run")
        if beams == 1 and outputs > 1 and not self._samples(settings):
            raise _refused("n", outputs, '1, or a "temperature" above 0')
        if outputs > 1 and not (args.writes_records or args.join_outputs):
            ways = f"{args.named('output_format', 'openai')}, or {args.named('join_outputs', True)}"
            raise _refused("n", outputs, f"1 for text; others with {ways}")


def _refused(name: str, value: Any, accepted: str) -> records.RecordError:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    what = records.quoted(value) if is_number else records.kind(value)
    return records.RecordError(f'has {what} as "{name}" of its body (accepted: {accepted})')


def stop_strings(item: Item) -> list[str]:
    """Returns the stop strings of an item's request; none for other items."""
    return dict(item.group).get("stop_strings", []) if isinstance(item.group, list) else []


def before_stop(text: str, stops: list[str]) -> str | None:
    """What of a text is before the first of these strings; None where none of them is in it."""
    places = [place for place in map(text.find, stops) if place >= 0]
    return text[: min(places)] if places else None
