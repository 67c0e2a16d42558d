"""Probes: small cases that show what a kernel, or this version of torch, does where no documentation says so.

    @probe("this torch orders equal numbers in another way")
    def orders_as_torch() -> bool:
        return torch.equal(…)

    if orders_as_torch(): …          # computed once in a process, for each device, dtype, … that is passed
    orders_as_torch.reasons()        # [] if it holds, otherwise why it does not

A probe sees neither autograd, inference mode, the program's modes nor its default device, and the random numbers of the
CPU stay as they were. An error is a reason, too.

Tests: tests/ops/test_probes.py
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

logger = logging.getLogger("fastgen")


class Probe:
    """A question with one answer for each key in a process. ask: computes it; otherwise: what is so if it is False."""

    def __init__(self, ask: Callable[..., bool], otherwise: str) -> None:
        functools.update_wrapper(self, ask)
        self.ask, self.otherwise = ask, otherwise
        self._answers: dict[tuple[Hashable, ...], list[str]] = {}

    def __call__(self, *key: Any) -> bool:
        """Whether it holds; must not be called for the first time while a graph is captured."""
        reasons = self._answers.get(key)
        return not (self.reasons(*key) if reasons is None else reasons)

    def reasons(self, *key: Any) -> list[str]:
        """Returns why it does not hold, empty if it does."""
        if key not in self._answers:
            self._answers[key] = self._computed(key)
        return self._answers[key]

    def cache_clear(self) -> None:
        """Forgets all answers."""
        self._answers.clear()

    def _computed(self, key: tuple[Any, ...]) -> list[str]:
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                _disable_current_modes(),
                torch.random.fork_rng(devices=[]),
                torch.device("cpu"),
            ):
                reasons = [] if self.ask(*key) else [self.otherwise]
        except Exception as error:  # what a missing compiler, a driver or another version of torch raises
            first_line = str(error).partition("\n")[0]  # torch lists its backends in the rest
            reasons = [f"{type(error).__name__}: {first_line}"]
        if reasons:
            logger.info("%s%s: %s", self.ask.__qualname__, key, reasons[0])
        return reasons


def probe(otherwise: str) -> Callable[[Callable[..., bool]], Probe]:
    """Makes a function a `Probe`; otherwise: the reason if it returns False."""
    return lambda ask: Probe(ask, otherwise)
