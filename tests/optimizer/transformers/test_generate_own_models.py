"""A model class of the user, whose attention does to its keys what no library model does: still the right answer."""

from __future__ import annotations

import pytest
from cost_models import costs
from own_models import FORMS, ODD, odd_model, repeated, weigh
from parity import BEAMS, PROMPT, SAMPLES, assert_same, is_shared, padded
from sharing import sharing
from torch import Tensor

from fastgen.optimizer.transformers import verification

pytestmark = pytest.mark.usefixtures("share_always")


@pytest.fixture
def trusted(monkeypatch):
    """Takes the model for one of the library's, which are not compared with the original before their first use."""
    monkeypatch.setattr(verification, "is_tested", lambda model: True)


@pytest.mark.parametrize("attend", ODD)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_odd_use_of_keys_gets_them_whole(attend, arguments):
    report = assert_same(odd_model(attend), padded(9, 5), **arguments)
    assert is_shared(report) and PROMPT in str(report)
    assert any(name.startswith("materialized: ") for name in report.kernels), report


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
