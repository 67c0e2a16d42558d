"""Model classes of user code may use their keys as no library model does: outputs are still those of the library.

Single functions of torch on shared keys are tested in test_segmented_kv.py.
"""

import functools
import itertools

import pytest
import torch
from hooks import costs, fresh_trust
from own_models import ODD, OddModel, by_einsum, by_products, odd_model, repeated
from parity import assert_equal_outputs, assert_same, run_both, same_tokens
from reports import PROMPT, is_materialized, is_shared
from tiny_models import BEAMS, BOTH, SAMPLES, padded, with_prefix

import fastgen
from fastgen.optimizer.decoding.report import PREFIX
from fastgen.testing import configured

pytestmark = pytest.mark.usefixtures("share_always")


@pytest.fixture
def accepted():
    with fresh_trust(accepted=True):  # outputs of first uses are the library's
        yield


@pytest.mark.usefixtures("accepted")
@pytest.mark.parametrize("attend", ODD)
@BOTH
def test_odd_uses_of_keys_materialize_them(attend, arguments):
    report = assert_same(odd_model(attend), padded(9, 5), **arguments)
    assert is_shared(report) and PROMPT in str(report)
    assert is_materialized(report), report


@pytest.mark.usefixtures("accepted")
@BOTH
def test_plain_products_work_on_segments(arguments):
    assert is_shared(assert_same(odd_model(by_products), padded(9, 5), **arguments), PROMPT)


@BOTH
def test_a_long_prompt_is_shared_after_a_short_one(arguments):
    """The class is compared in the first call, and its attention meets shared keys first in the third."""
    model = odd_model(by_einsum)
    with fresh_trust():
        with configured(share="auto"), costs(prefill_overhead=0.0):
            first, second = (assert_same(model, padded(3, 2), **arguments) for _ in range(2))
        assert "FIRST_USE" in first.codes() and is_shared(second) and PROMPT not in str(second)
        third = assert_same(model, padded(9, 5), **arguments)
    assert is_shared(third) and PROMPT in str(third)


def test_a_class_is_compared_with_each_function_that_it_calls():
    with fresh_trust():
        for attend in (by_einsum, by_products):
            first, second = (assert_same(odd_model(attend), padded(9, 5), **BEAMS) for _ in range(2))
            assert "FIRST_USE" in first.codes() and is_shared(second)


def test_a_class_with_cyclic_state_is_compared_once():
    model = odd_model(by_einsum)
    model.states = []
    model.states.append(model.states)
    with fresh_trust():
        first, second = (assert_same(model, padded(9, 5), **BEAMS) for _ in range(2))
    assert "FIRST_USE" in first.codes() and is_shared(second)


class OddModelWithPositions(OddModel):
    """Takes positions, but counts columns."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        return super().forward(input_ids, attention_mask, use_cache, **kwargs)


@pytest.mark.usefixtures("accepted")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_prefix_before_padding_is_not_shared_if_columns_count(dtype):
    def by_columns(query, keys, values, mask):
        return by_products(query, keys, values, mask + 0.2 * torch.arange(keys.shape[2], dtype=query.dtype))

    model = odd_model(by_columns, OddModelWithPositions).to(dtype)
    for inputs, length in ((with_prefix(12, 12, 12), 7), (with_prefix(12, 10, 9), 0)):
        if dtype == torch.float32:
            same_tokens(model, inputs)
        else:  # where rounding may choose another token
            model.generate(**inputs)
        report = fastgen.explain()
        assert report.prefix_length == length and ("POSITIONS" in report.codes(PREFIX)) == (length == 0)


# Keys and values that the attention holds or writes.


SCORES = {"return_dict_in_generate": True, "output_scores": True}
ATTENTIONS = {"return_dict_in_generate": True, "output_attentions": True}  # collected by the library's loop
CALLS = [*itertools.product(("always", "auto"), (BEAMS, SAMPLES), ({}, SCORES, ATTENTIONS))]
TWO_CALLS = [("always", BEAMS, {}), ("auto", SAMPLES, SCORES)]


def assert_same_records(attend, at_the_end=list, calls=CALLS):
    """Asserts equal outputs and equal records of `attend(record, query, keys, values, mask)`, for all prompts."""
    record: list = []
    model = odd_model(lambda *states: attend(record, *states))

    def call(arguments):
        record.clear()
        output = model.generate(**padded(9, 5), **arguments)
        return output, at_the_end(record)

    for share, decoding, outputs in calls:
        arguments = decoding | outputs
        # The class is trusted immediately: otherwise one that fails is left alone after its first comparison.
        with fresh_trust(accepted=True), configured(share=share), costs(prefill_overhead=0.0):
            both = run_both(functools.partial(call, arguments))
            assert is_shared(both.report) and (PROMPT in str(both.report)) is (share == "always")
            assert_equal_outputs(both.stock, both.fast)


WRITE = {
    "mul_": lambda states: states.mul_(0.5),
    "copy_": lambda states: states.copy_(states.flip(0)),
    "index": lambda states: states.__setitem__((slice(None), slice(None), 0), 0.125),
    "out": lambda states: torch.mul(states, 0.5, out=states),
    "transposed": lambda states: states.transpose(2, 3).mul_(0.5),
    "unsqueezed": lambda states: states[:, :, None].mul_(0.5),
    "mT": lambda states: states.mT.__setitem__((0, 0), 0.5),
    "detached": lambda states: states.detach().mul_(0.5),
    "data": lambda states: states.data.__setitem__(0, 0.25),
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
    held: list = []

    def writing(record, query, keys, values, mask):
        if query.shape[2] > 1:
            held.clear()
            return by_products(query, keys, values, mask)
        if when == "before":
            WRITE[way](keys)
        attended = by_products(query, keys, values, mask)
        if when == "after":
            WRITE[way](values)
        if when == "a step later" and len(held) > 1:
            WRITE[way](held[-2])  # the keys of the same layer
            record.append(held[-2] + 0)
        held.append(keys)
        record.append((keys + 0, values + 0))
        return attended

    assert_same_records(writing, calls=CALLS if way in ("mul_", "as_strided", "storage") else TWO_CALLS)


def test_keys_of_all_steps_can_be_held_and_read_at_the_end():
    def holding(record, query, keys, values, mask):
        if query.shape[2] == 1:
            record.append((keys, values, keys.transpose(2, 3), repeated(values)))
        return by_products(query, keys, values, mask)

    def read(record):
        return [[states + 0 for states in step] for step in record]

    assert_same_records(holding, at_the_end=read)


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
