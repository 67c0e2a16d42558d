"""Why something was not done: a code for tests, programs and documentation, and a text for people.

The codes are listed in docs/reasons.md.

Tests: tests/optimizer/test_report.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# What the reasons are about: the parts of a call.
PREFILL = "prompt sharing"
PREFIX = "common prefix"
KV_CACHE = "KV cache"
LOOP = "decoding loop"
STEPS = "decode steps"
COMPACTION = "finished inputs"
NGRAMS = "n-gram blocking"
ALLOWED = "allowed tokens"
VOCODER = "vocoder"

# With these codes fastgen chose not to do what it could have done: there is nothing to gain, or the user said so.
DECISIONS = frozenset(
    {
        "CAPTURE_OFF",
        "ENDED_EARLY",
        "FEW_FRAMES",
        "FEW_KEYS",
        "FEW_STEPS",
        "GPU_OPT_IN",
        "NOT_WORTH_CAPTURING",
        "ONE_ROW_PER_INPUT",
        "PREFIX_SHORT",
        "SHARE_NEVER",
        "TOO_SMALL",
    }
)


@dataclass(frozen=True)
class Reason:
    """code: in capitals, one for a kind of reason. text: a clause without a full stop. detail: numbers with units."""

    code: str
    text: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text

    @property
    def is_decision(self) -> bool:
        """Whether fastgen could have done it and chose not to; otherwise it cannot, and the library's code runs."""
        return self.code in DECISIONS


CACHE_NOT_EMPTY = Reason("CACHE_NOT_EMPTY", "past_key_values is not empty")
LAYER_EMPTY = Reason("LAYER_EMPTY", "a layer of the cache is empty")
MODEL_CHANGED = Reason("MODEL_CHANGED", "the program has changed the model within the call")
USER_CACHE = Reason("USER_CACHE", "the caller passed past_key_values")
REORDERS_ITSELF = Reason("REORDERS_ITSELF", "the model reorders its cache itself")


def with_code(code: str, texts: Iterable[str | Reason]) -> list[Reason]:
    """Reasons of code that has no codes, such as a kernel's, under one; a `Reason` keeps its own."""
    return [text if isinstance(text, Reason) else Reason(code, text) for text in texts]


def that_hold(*cases: tuple[str, str, object]) -> list[Reason]:
    """The reasons of these cases, code, text and condition, whose condition is true."""
    return [Reason(code, text) for code, text, is_so in cases if is_so]
