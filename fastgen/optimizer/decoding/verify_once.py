"""Comparison of fastgen with the library on first use, under one key; behind it `fastgen.verify`.
Tests: tests/optimizer/test_verify.py, tests/optimizer/transformers/test_verification.py
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch

T = TypeVar("T")

# The keys of what was compared and did not differ.
_verified: set[object] = set()


class NotComparable(Exception):
    """A comparison shows nothing: the key stays unverified, and nothing is refused."""


@dataclass(frozen=True)
class Difference:
    """Where two runs differ first.

    step: of decoding, from 0 on; row: of the batch. ours, theirs: the scores there, of fastgen and of the library, as
    far as they are known.
    """

    text: str
    step: int | None = None
    row: int | None = None
    ours: float | None = None
    theirs: float | None = None

    @property
    def gap(self) -> float | None:
        """How far the two scores are apart."""
        return None if self.ours is None or self.theirs is None else abs(self.ours - self.theirs)

    def __str__(self) -> str:
        if self.gap is None:
            return self.text
        return f"{self.text}: score {self.ours:.6g} instead of {self.theirs:.6g}, gap {self.gap:.2g}"

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {**vars(self), "gap": self.gap}


def is_verified(key: object) -> bool:
    return key in _verified


def verify_once(
    key: object,
    ours: Callable[[], T],
    theirs: Callable[[], T],
    difference: Callable[[T, T], Difference | None],
    refuse: Callable[[Difference], None],
) -> T:
    """What `ours` returns; the first time what `theirs` returns, after a comparison of both.

    key: hashable; what the comparison holds for. refuse: called where they differ; it has to see to it that the call
    does not come here again. Raises `NotComparable`, and anything else, as `ours`, `theirs` and `difference` do.
    """
    if key in _verified:
        return ours()
    expected = theirs()
    found = difference(ours(), expected)
    if found is None:
        _verified.add(key)
    else:
        refuse(found)
    return expected


@dataclass(frozen=True)
class RandomStates:
    """The states of the random numbers of torch, numpy and Python."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    of_numpy: Any
    of_python: Any

    @classmethod
    def current(cls) -> RandomStates:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda, numpy.random.get_state(), random.getstate())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        numpy.random.set_state(self.of_numpy)
        random.setstate(self.of_python)
