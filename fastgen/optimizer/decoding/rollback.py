"""The way back to the library: `LeaveAlone` says why, `Rollback` puts back what a forward or a loop has changed.

Each part of the state gives a function that restores it: tensors on modules, random numbers and attributes of objects
have theirs here, caches in the folder of their host. A prefill opens one, and the trial whether a prefix can be
computed apart; a decoding step keeps one for its loop.

Tests: tests/optimizer/transformers/test_refused_calls.py, tests/optimizer/transformers/test_static_prefill.py
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from fastgen.optimizer.decoding.report import Reason

Restore = Callable[[], None]


class LeaveAlone(Exception):
    """Raised if the library does the work. Each patch catches it in one place, reports `reasons`, and calls it.

    A `DecodeStep` catches it if keys and values cannot lie in a static cache: then steps stay eager.
    """

    def __init__(self, reasons: Sequence[Reason]) -> None:
        super().__init__(*map(str, reasons))
        self.reasons = reasons


def leave_alone_for(reasons: Sequence[Reason]) -> None:
    """Raises LeaveAlone if there are reasons."""
    if reasons:
        raise LeaveAlone(reasons)


class Rollback(ExitStack):
    """Calls the functions that `callback` got when its context ends, whatever ended it, unless `keep` was called."""

    keep, restore = ExitStack.pop_all, ExitStack.close


def undo_of_tensors(modules: Iterable[nn.Module]) -> Restore:
    """Returns a function that gives modules the tensors again that they hold now as plain attributes.

    What a forward has written in place is not put back: for another number of rows it makes new tensors. Attributes
    that are no tensors stay, too: the library notes there where it has put hooks.
    """
    before = [(module, dict(vars(module))) for module in modules]

    def restore() -> None:
        for module, attributes in before:
            for name, value in tuple(vars(module).items()):
                if isinstance(value, Tensor) or isinstance(attributes.get(name), Tensor):
                    vars(module)[name] = attributes.get(name)

    return restore


def undo_of_random_numbers(only_torch: bool = False) -> Restore:
    """Returns a function that puts the random numbers of torch, numpy and Python back to where they are now.

    only_torch: those of torch alone, in 2 µs instead of 100.
    """
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    others: list[Restore] = []
    if not only_torch:
        others.append(partial(numpy.random.set_state, numpy.random.get_state()))
        others.append(partial(random.setstate, random.getstate()))

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for restore_other in others:
            restore_other()

    return restore


def undo_of_attributes(objects: Iterable[Any]) -> Restore:
    """Returns a function that gives objects the attributes that they have now; dictionaries and lists are copied."""
    states = []
    for changed in objects:
        attributes = getattr(changed, "__dict__", {})
        copies = {name: copy.copy(value) for name, value in attributes.items() if type(value) in (dict, list)}
        states.append((attributes, attributes | copies))

    def restore() -> None:
        for attributes, before in states:
            attributes.clear()
            attributes.update(before)

    return restore
