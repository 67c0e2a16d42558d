"""A model class of the user, whose attention does to its keys what no library model does: still the right answer."""

from __future__ import annotations

import pytest
from own_models import FORMS, ODD, by_einsum, odd_model, repeated, weigh
from parity import BEAMS, BOTH, PROMPT, assert_same, is_materialized, is_shared, padded
from torch import Tensor

from fastgen.testing import as_tested, configured, costs

pytestmark = pytest.mark.usefixtures("share_always")


@pytest.mark.parametrize("attend", ODD)
@BOTH
def test_odd_use_of_keys_gets_them_whole(attend, arguments):
    report = assert_same(odd_model(attend), padded(9, 5), **arguments)
    assert is_shared(report) and PROMPT in str(report)
    assert is_materialized(report), report


@BOTH
def test_plain_products_work_on_segments(arguments):
    assert is_shared(assert_same(odd_model(attention), padded(9, 5), **arguments), PROMPT)


@pytest.mark.parametrize("attend", FORMS)
@BOTH
def test_a_long_prompt_after_one_too_short_to_share(attend, arguments):
    """The class is trusted after the first call, and its attention meets shared keys first in the second."""
    model = odd_model(attend)
    with configured(share="auto"), costs(prefill_cost=0, prefill_cost_per_module=0):
        first = assert_same(model, padded(3, 2), **arguments)
    assert is_shared(first) and PROMPT not in str(first)
    second = assert_same(model, padded(9, 5), **arguments)
    assert is_shared(second) and PROMPT in str(second)


def attention(query, keys, values, mask):
    return weigh(query @ repeated(keys).transpose(2, 3), mask) @ repeated(values)


@BOTH
def test_keys_stored_by_a_model_do_not_change_afterwards(arguments):
    """The attention adds what it saw in the calls before, as a model with a memory of its own would."""
    stored: list[tuple[Tensor, Tensor]] = []

    def with_memory(query, keys, values, mask):
        attended = attention(query, keys, values, mask)
        if query.shape[2] > 1:  # the prompt
            stored.clear()
            return attended
        if len(stored) > 2:
            old_keys, old_values = stored[-2]
            attended = attended + attention(query, old_keys, old_values, mask[..., : old_keys.shape[2]])
        stored.append((keys, values))
        return attended

    with as_tested():  # which trusts the class immediately
        assert assert_same(odd_model(with_memory), padded(9, 5), **arguments).shared


def test_a_class_whose_state_has_no_end_is_compared_in_each_call():
    model = odd_model(by_einsum)
    model.states = []
    model.states.append(model.states)
    for _ in range(2):
        assert is_shared(assert_same(model, padded(9, 5), **BEAMS))
