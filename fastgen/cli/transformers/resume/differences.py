"""What changed between two runs, in words."""

from __future__ import annotations

import json
from typing import Any

DIGEST = "sha256:"  # of values that say nothing to a reader


def differences(before: Any, now: dict[str, Any]) -> list[str]:
    """What changed from one signature to another, in words; those that are equal as JSON do not differ."""
    before = before if isinstance(before, dict) else {}
    now = json.loads(json.dumps(now))
    found = []
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [f"{name}: {change}" for change in differences(old, new)]
        elif _in_words(old) != _in_words(new):
            says_nothing = any(isinstance(value, str) and value.startswith(DIGEST) for value in (old, new))
            found.append(f"{name} changed" if says_nothing else f"{name} was {_in_words(old)}, is {_in_words(new)}")
    return found


def _in_words(value: Any) -> str:
    if value is None or value is False or value == []:
        return "not given"
    return "given" if value is True else json.dumps(value, ensure_ascii=False, sort_keys=True)
