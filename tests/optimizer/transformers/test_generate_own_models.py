"""A model class of the user, whose attention does to its keys what no library model does: still the right answer.

What single functions of torch do to shared keys: test_segmented_kv.py.
"""

import functools
import itertools

import pytest
import torch
from own_models import ODD, by_einsum, by_products, odd_model, repeated
from parity import (
    BEAMS,
    BOTH,
    PROMPT,
    SAMPLES,
    assert_equal_outputs,
    assert_same,
    is_materialized,
    is_shared,
    padded,
    run_both,
)

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
    assert is_shared(assert_same(odd_model(by_products), padded(9, 5), **arguments), PROMPT)


@BOTH
def test_a_long_prompt_after_one_too_short_to_share(arguments):
    """The class is trusted after the first call, and its attention meets shared keys first in the second."""
    model = odd_model(by_einsum)
    with configured(share="auto"), costs(prefill_cost=0, prefill_cost_per_module=0):
        first = assert_same(model, padded(3, 2), **arguments)
    assert is_shared(first) and PROMPT not in str(first)
    second = assert_same(model, padded(9, 5), **arguments)
    assert is_shared(second) and PROMPT in str(second)


def test_a_class_whose_state_has_no_end_is_compared_in_each_call():
    model = odd_model(by_einsum)
    model.states = []
    model.states.append(model.states)
    for _ in range(2):
        assert is_shared(assert_same(model, padded(9, 5), **BEAMS))


# Keys and values that the attention keeps or writes.


def assert_same_records(attend, at_the_end=list):
    """Equal outputs, and equal records of `attend(record, query, keys, values, mask)`, for prompts long and short."""
    record: list = []
    model = odd_model(lambda *states: attend(record, *states))

    def call(arguments):
        record.clear()
        output = model.generate(**padded(9, 5), **arguments, return_dict_in_generate=True, output_scores=True)
        return output, at_the_end(record)

    for share, arguments in itertools.product(("always", "auto"), (BEAMS, SAMPLES)):
        # The class is trusted immediately: else one that fails is left alone after the comparison before its first use.
        with as_tested(), configured(share=share), costs(prefill_cost=0, prefill_cost_per_module=0):
            both = run_both(functools.partial(call, arguments))
            assert is_shared(both.report) and (PROMPT in str(both.report)) is (share == "always")
            assert_equal_outputs(both.stock, both.fast)


def through_out(states):
    torch.mul(states, 0.5, out=states)


def through_data(states):
    states.data[0] = 0.25


WRITE = {
    "mul_": lambda states: states.mul_(0.5),
    "copy_": lambda states: states.copy_(states.flip(0)),
    "index": lambda states: states.__setitem__((slice(None), slice(None), 0), 0.125),
    "out": through_out,
    "transposed": lambda states: states.transpose(2, 3).mul_(0.5),
    "unsqueezed": lambda states: states[:, :, None].mul_(0.5),
    "mT": lambda states: states.mT.__setitem__((0, 0), 0.5),
    "detached": lambda states: states.detach().mul_(0.5),
    "data": through_data,
    "view": lambda states: states.view(-1).mul_(0.5),
    "as_strided": lambda states: torch.as_strided(states, (4,), (1,)).zero_(),
    "reshaped to itself": lambda states: states.reshape(states.shape).mul_(0.5),
    "repeated, a copy": lambda states: states.repeat_interleave(2, dim=1).mul_(0.5),
    "storage": lambda states: states.untyped_storage().fill_(0),
    "masked": lambda states: states.masked_fill_(states > 0.5, 0.0),
    "dlpack": lambda states: torch.from_dlpack(states).mul_(0.5),
    "numpy": lambda states: states.numpy().__imul__(0.5),
}


@pytest.mark.parametrize("way", WRITE)
@pytest.mark.parametrize("when", ("before", "after", "a step later"))
def test_keys_can_be_written_in_any_way(way, when):
    kept: list = []

    def writing(record, query, keys, values, mask):
        if query.shape[2] > 1:
            kept.clear()
            return by_products(query, keys, values, mask)
        if when == "before":
            WRITE[way](keys)
        attended = by_products(query, keys, values, mask)
        if when == "after":
            WRITE[way](values)
        if when == "a step later" and len(kept) > 1:
            WRITE[way](kept[-2])  # of the same layer
            record.append(kept[-2] + 0)
        kept.append(keys)
        record.append((keys + 0, values + 0))
        return attended

    assert_same_records(writing)


def test_keys_of_all_steps_can_be_kept_and_read_at_the_end():
    def keeping(record, query, keys, values, mask):
        if query.shape[2] == 1:
            record.append((keys, values, keys.transpose(2, 3), repeated(values)))
        return by_products(query, keys, values, mask)

    def read(record):
        return [[states + 0 for states in step] for step in record]

    assert_same_records(keeping, at_the_end=read)


def test_copies_of_keys_are_not_changed_by_a_later_write():
    def copying(record, query, keys, values, mask):
        copies = repeated(keys), keys.clone(), keys.transpose(2, 3).contiguous(), keys.to(torch.float64)
        attended = by_products(query, keys, values, mask)
        if query.shape[2] == 1:
            keys.mul_(0.5)
            copies[0][0] = 0.0
            record.append([copy + 0 for copy in copies])
        return attended

    assert_same_records(copying)
