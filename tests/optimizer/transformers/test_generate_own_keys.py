"""What a program does with the keys and values that its attention gets: read, kept and written as without fastgen."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
from own_models import odd_model, repeated, weigh
from parity import BEAMS, PROMPT, SAMPLES, assert_equal_outputs, is_shared, padded, run_both
from sharing import sharing

from fastgen.testing import as_tested, costs

BOTH_DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))


def attention(query, keys, values, mask):
    return weigh(query @ repeated(keys).transpose(2, 3), mask) @ repeated(values)


def saved(keys):
    buffer = io.BytesIO()
    torch.save(keys, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


READ = {
    "numpy": lambda keys: torch.from_numpy(keys.float().numpy().copy()),
    "asarray": lambda keys: torch.from_numpy(np.asarray(keys.float()) * 2),
    "array interface": lambda keys: np.add(keys.float(), 1),
    "data_ptr": lambda keys: keys.data_ptr() != 0 and keys.data_ptr() == keys.data_ptr(),
    "stride": lambda keys: (keys.stride(), keys.stride(1), keys.transpose(2, 3).stride(), keys[:, :, None].stride()),
    "is_contiguous": lambda keys: (keys.is_contiguous(), keys.transpose(2, 3).is_contiguous(), keys.mT.is_contiguous()),
    "view": lambda keys: keys.view(-1).clone(),
    "view of halves": lambda keys: keys.view(keys.shape[0], -1)[:, ::2].clone(),
    "untyped_storage": lambda keys: (keys.untyped_storage().nbytes(), keys.storage_offset()),
    "as_strided": lambda keys: torch.as_strided(keys, (3, 5), (7, 1)).clone(),
    "data": lambda keys: keys.data.clone(),
    "repr": lambda keys: (repr(keys), str(keys), f"{keys}"),
    "metadata": lambda keys: (keys.layout, keys.element_size(), keys.nbytes, keys.itemsize, len(keys), keys.is_leaf),
    "pickle": lambda keys: pickle.loads(pickle.dumps(keys)),
    "save": saved,
    "deepcopy": copy.deepcopy,
    "copy": lambda keys: copy.copy(keys).clone(),
    "dlpack": lambda keys: torch.from_dlpack(keys).clone(),
    "tolist": lambda keys: keys.tolist(),
    "list of rows": lambda keys: [row.clone() for row in keys],
    "unfold": lambda keys: keys.unfold(2, 2, 1).clone(),
    "permuted": lambda keys: keys.permute(2, 0, 1, 3).reshape(keys.shape[2], -1).clone(),
    "reinterpreted": lambda keys: keys.view(torch.uint8).clone(),
    "scripted": lambda keys: torch.jit.trace(lambda states: states * 2, torch.zeros(1, 1, 1, 1).to(keys.dtype))(keys),
}


@pytest.fixture(autouse=True)
def trust_the_class_at_once():
    """Else a class that fails is found out by the comparison before its first use, and left alone."""
    with as_tested():
        yield


def assert_same_records(attend, dtype, monkeypatch, at_the_end=list):
    """Equal outputs, and equal records of `attend(record, query, keys, values, mask)`, for prompts long and short.

    In segments, bf16 is rounded elsewhere, which makes other tokens; what the first layer gets at first is the same.
    """
    record: list = []
    model = odd_model(lambda *states: attend(record, *states)).to(dtype)

    def call(arguments):
        record.clear()
        output = model.generate(**padded(9, 5), **arguments, return_dict_in_generate=True, output_scores=True)
        return output, at_the_end(record)

    for share, arguments in itertools.product(("always", "auto"), (BEAMS, SAMPLES)):
        with sharing(share), costs(prefill_cost=0, prefill_cost_per_module=0):
            both = run_both(functools.partial(call, arguments))
            assert is_shared(both.report) and (PROMPT in str(both.report)) is (share == "always")
            if dtype == torch.bfloat16 and share == "always":
                assert_equal_outputs(both.stock[1][:1], both.fast[1][:1])
            else:
                assert_equal_outputs(both.stock, both.fast)


@pytest.mark.parametrize("way", READ)
@BOTH_DTYPES
def test_keys_can_be_read_in_any_way(way, dtype, monkeypatch):
    def reading(record, query, keys, values, mask):
        if query.shape[2] == 1:
            record.append((READ[way](keys), READ[way](values)))
        return attention(query, keys, values, mask)

    assert_same_records(reading, dtype, monkeypatch)


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
}


@pytest.mark.parametrize("way", WRITE)
@pytest.mark.parametrize("when", ("before", "after", "a step later"))
def test_keys_can_be_written_in_any_way(way, when, monkeypatch):
    kept: list = []

    def writing(record, query, keys, values, mask):
        if query.shape[2] > 1:
            kept.clear()
            return attention(query, keys, values, mask)
        if when == "before":
            WRITE[way](keys)
        attended = attention(query, keys, values, mask)
        if when == "after":
            WRITE[way](values)
        if when == "a step later" and len(kept) > 1:
            WRITE[way](kept[-2])  # of the same layer
            record.append(kept[-2] + 0)
        kept.append(keys)
        record.append((keys + 0, values + 0))
        return attended

    assert_same_records(writing, torch.float32, monkeypatch)


def test_keys_can_be_written_through_numpy(monkeypatch):
    def writing(record, query, keys, values, mask):
        if query.shape[2] == 1:
            keys.numpy()[:, :, -1] *= 0.5
        return attention(query, keys, values, mask)

    assert_same_records(writing, torch.float32, monkeypatch)


@BOTH_DTYPES
def test_keys_of_all_steps_can_be_kept_and_read_at_the_end(dtype, monkeypatch):
    def keeping(record, query, keys, values, mask):
        if query.shape[2] == 1:
            record.append((keys, values, keys.transpose(2, 3), repeated(values)))
        return attention(query, keys, values, mask)

    def read(record):
        return [[states + 0 for states in step] for step in record]

    assert_same_records(keeping, dtype, monkeypatch, at_the_end=read)


def test_copies_of_keys_are_not_changed_by_a_later_write(monkeypatch):
    def copying(record, query, keys, values, mask):
        copies = repeated(keys), keys.clone(), keys.transpose(2, 3).contiguous(), keys.to(torch.float64)
        attended = attention(query, keys, values, mask)
        if query.shape[2] == 1:
            keys.mul_(0.5)
            copies[0][0] = 0.0
            record.append([copy + 0 for copy in copies])
        return attended

    assert_same_records(copying, torch.float32, monkeypatch)
