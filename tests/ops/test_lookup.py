"""Functions of bf16 and fp16 as tables, `csrc/lookup.cpp`: the bits of the function, in captured steps too."""

import pytest
import torch
from hooks import without
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_kernels import needs_library, torch_threads
from transformers.activations import NewGELUActivation

from fastgen.ops.activations import DTYPES, LOOKUP_KERNELS, can_look_up, table_of
from fastgen.ops.cpu_graph import capture
from fastgen.ops.kernel import first_supported

pytestmark = needs_library

ACTIVATION = NewGELUActivation()
TABLES = {dtype: table_of(ACTIVATION, dtype) for dtype in DTYPES}
ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES)


def bits(tensor):
    return tensor.view(torch.int16).tolist()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300_000), st.integers(1, 3), st.sampled_from((0.01, 1.0, 30.0)), st.sampled_from(DTYPES))
def test_a_table_has_the_bits_of_the_function(count, threads, scale, dtype):
    numbers = (torch.randn(count, generator=torch.Generator().manual_seed(count)) * scale).to(dtype)
    with torch_threads(threads):
        output = torch.ops.fastgen.lookup(numbers, TABLES[dtype])
    assert bits(output) == bits(ACTIVATION(numbers))


@ALL_DTYPES
def test_a_table_has_every_number(dtype):
    numbers = torch.arange(1 << 16).to(torch.int16).view(dtype).flip(0)
    assert bits(torch.ops.fastgen.lookup(numbers, TABLES[dtype])) == bits(TABLES[dtype].flip(0))


@ALL_DTYPES
def test_a_replay_looks_up_the_present_numbers(dtype):
    numbers = torch.zeros(3, 40, dtype=dtype)
    with torch.no_grad():
        replay, *_ = capture(lambda: torch.ops.fastgen.lookup(numbers, TABLES[dtype]) + 1)
        numbers.copy_(torch.randn(3, 40))
        assert bits(replay()) == bits(ACTIVATION(numbers) + 1)


@ALL_DTYPES
def test_torch_looks_up_the_same(dtype):
    numbers = torch.arange(1 << 16).to(torch.int16).view(dtype).flip(0)
    with without("C++"):
        kernel = first_supported(LOOKUP_KERNELS, "cpu")
        output = kernel.run(numbers.view(256, 256), TABLES[dtype])
    assert bits(output.flatten()) == bits(TABLES[dtype].flip(0))


@pytest.mark.parametrize("numbers", [torch.zeros(4), torch.zeros(4, 4, dtype=torch.bfloat16).t()[:, :2]])
def test_other_numbers_are_not_looked_up(numbers):
    assert not can_look_up(numbers)


@ALL_DTYPES
def test_a_table_is_built_under_any_default_device(dtype):
    with torch.device("meta"):
        assert bits(table_of(ACTIVATION, dtype)) == bits(TABLES[dtype])
