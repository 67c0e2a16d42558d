"""A model class of the user, whose attention does to its keys what no library model does: still the right answer."""

from __future__ import annotations

import enum
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy
import pytest
import torch
from fuzz_changes import steered
from own_models import FORMS, ODD, OddModel, by_einsum, odd_model, repeated, weigh
from parity import BEAMS, PROMPT, SAMPLES, assert_same, is_materialized, is_shared, padded
from sharing import sharing
from torch import Tensor

from fastgen.testing import as_tested, costs

pytestmark = pytest.mark.usefixtures("share_always")


@pytest.fixture
def trusted():
    """Takes the model for one of the library's, which are not compared with the original before their first use."""
    with as_tested():
        yield


@pytest.mark.parametrize("attend", ODD)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_odd_use_of_keys_gets_them_whole(attend, arguments):
    report = assert_same(odd_model(attend), padded(9, 5), **arguments)
    assert is_shared(report) and PROMPT in str(report)
    assert is_materialized(report), report


@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_plain_products_work_on_segments(arguments):
    def plain(query, keys, values, mask):
        return weigh(query @ repeated(keys).transpose(2, 3), mask) @ repeated(values)

    assert is_shared(assert_same(odd_model(plain), padded(9, 5), **arguments), PROMPT)


@pytest.mark.parametrize("attend", FORMS)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_a_long_prompt_after_one_too_short_to_share(attend, arguments):
    """The class is trusted after the first call, and its attention meets shared keys first in the second."""
    model = odd_model(attend)
    with sharing("auto"), costs(prefill_cost=0, prefill_cost_per_module=0):
        first = assert_same(model, padded(3, 2), **arguments)
    assert is_shared(first) and PROMPT not in str(first)
    second = assert_same(model, padded(9, 5), **arguments)
    assert is_shared(second) and PROMPT in str(second)


@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_keys_stored_by_a_model_do_not_change_afterwards(arguments, trusted):
    """The attention adds what it saw in the calls before, as a model with a memory of its own would."""
    stored: list[tuple[Tensor, Tensor]] = []

    def with_memory(query, keys, values, mask):
        attended = weigh(query @ repeated(keys).transpose(2, 3), mask) @ repeated(values)
        if query.shape[2] > 1:  # the prompt
            stored.clear()
        elif len(stored) > 2:
            old_keys, old_values = stored[-2]
            mask = mask[..., : old_keys.shape[2]]
            attended = attended + weigh(query @ repeated(old_keys).transpose(2, 3), mask) @ repeated(old_values)
        if query.shape[2] == 1:
            stored.append((keys, values))
        return attended

    assert assert_same(odd_model(with_memory), padded(9, 5), **arguments).shared


@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_values_written_through_a_view_stay_written(arguments, trusted):
    def marking(query, keys, values, mask):
        values.transpose(1, 2)[:, -1].mul_(0.5)
        return weigh(query @ repeated(keys).transpose(2, 3), mask) @ repeated(values)

    assert assert_same(odd_model(marking), padded(9, 5), **arguments).shared


@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_keys_written_by_a_model_stay_written(arguments, trusted):
    def decaying(query, keys, values, mask):
        keys.mul_(0.9)
        values[:, :, 0] += 0.1
        return weigh(query @ repeated(keys).transpose(2, 3), mask) @ repeated(values)

    assert assert_same(odd_model(decaying), padded(9, 5), **arguments).shared


class Mode(enum.Enum):
    PLAIN, STEERED = range(2)


class Options:
    steers = False


class Slotted:
    __slots__ = ("steers",)

    def __init__(self) -> None:
        self.steers = False


GLOBAL = Options()


def reads_a_global() -> bool:
    return GLOBAL.steers


def reads_what_it_has_closed_over():
    steers = False

    def flip() -> None:
        nonlocal steers
        steers = True

    return (lambda: steers), flip


class Switched(OddModel):
    """Steers its rows where its attribute `switch` says so."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if self.steers():
            outputs.logits = steered(outputs.logits)
        return outputs

    def steers(self) -> bool:
        switch = self.switch
        if isinstance(switch, Mode):
            return switch is Mode.STEERED
        return switch() if callable(switch) else bool(getattr(switch, "steers", switch))

    def says_no(self) -> bool:
        return False

    def says_yes(self) -> bool:
        return True


class Named(NamedTuple):
    steers: bool


def switches(model):
    """By its kind, a switch of a model as it is at first, and a function that turns it on."""
    closed_over, flip = reads_what_it_has_closed_over()
    nested, slotted, options = SimpleNamespace(inner=Options()), Slotted(), Options()

    def assign(switch):
        return lambda: setattr(model, "switch", switch)

    return {
        "attribute of an object": (options, lambda: setattr(options, "steers", True)),
        "attribute of a class": (Options(), lambda: setattr(Options, "steers", True)),
        "slot": (slotted, lambda: setattr(slotted, "steers", True)),
        "global of a function": (reads_a_global, lambda: setattr(GLOBAL, "steers", True)),
        "closure": (closed_over, flip),
        "nested object": (partial(lambda it: it.inner.steers, nested), lambda: setattr(nested.inner, "steers", True)),
        "enumeration": (Mode.PLAIN, assign(Mode.STEERED)),
        "named tuple": (Named(False), assign(Named(True))),
        "bound method": (model.says_no, assign(model.says_yes)),
        "partial": (partial(bool, 0), assign(partial(bool, 1))),
        "number of numpy": (numpy.bool_(False), assign(numpy.bool_(True))),
        "tensor": (torch.tensor(False), assign(torch.tensor(True))),
    }


@pytest.mark.parametrize("kind", switches(mock.MagicMock()))
def test_a_class_compared_with_a_switch_off_is_not_trusted_with_it_on(kind):
    model = odd_model(by_einsum, Switched)
    model.switch, turn_on = switches(model)[kind]
    with mock.patch.object(Options, "steers", False), mock.patch.object(GLOBAL, "steers", False, create=True):
        assert is_shared(assert_same(model, padded(9, 5), **BEAMS))
        turn_on()
        assert_same(model, padded(9, 5), **BEAMS)


def test_a_class_whose_state_has_no_end_is_compared_in_each_call():
    model = odd_model(by_einsum)
    model.states = []
    model.states.append(model.states)
    for _ in range(2):
        assert is_shared(assert_same(model, padded(9, 5), **BEAMS))
