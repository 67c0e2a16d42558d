"""GELU, `csrc/gelu.cpp`: as near to the exact function as torch's own, with the same bits on any number of threads."""

import pytest
import torch
from hooks import limits, without
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_kernels import needs_library, torch_threads
from torch.nn import functional

from fastgen.ops.activations import GELU, GELU_KERNELS, GELU_TANH, gelu, gelu_into
from fastgen.ops.cpu_graph import capture
from fastgen.ops.kernel import first_supported

pytestmark = needs_library

APPROXIMATE = {GELU: "none", GELU_TANH: "tanh"}
BOTH = pytest.mark.parametrize("activation", APPROXIMATE)


@BOTH
def test_gelu_is_exact_to_some_units_of_the_last_place(activation):
    numbers = torch.cat([torch.linspace(-12, 12, 1_000_001), torch.logspace(-30, 4, 999)])
    numbers = torch.cat([numbers, -numbers])
    exact = functional.gelu(numbers.double(), approximate=APPROXIMATE[activation])
    output = gelu(numbers, activation)
    assert ((output - exact).abs() <= 3e-7 * numbers.abs() + 1e-38).all()
    assert (output[numbers > 9] == numbers[numbers > 9]).all() and not output[numbers < -9].any()


@BOTH
def test_gelu_of_special_numbers_is_that_of_torch(activation):
    """In double precision: on some CPUs torch takes oneDNN's GELU of float32, which is NaN for infinity."""
    numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1e30, -1e30])
    expected = functional.gelu(numbers.double(), approximate=APPROXIMATE[activation]).float()
    assert torch.equal(gelu(numbers, activation).nan_to_num(7), expected.nan_to_num(7))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10_000), st.integers(1, 4), st.sampled_from([*APPROXIMATE]))
def test_gelu_has_the_same_bits_on_any_number_of_threads(count, threads, activation):
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count))
    with limits(min_elements_of_gelu=1), torch_threads(threads):
        output = gelu(numbers, activation)
        gelu_into(numbers, numbers, activation)()  # in place
    assert torch.equal(output, numbers)
    assert torch.equal(torch.cat([gelu(numbers[:1], activation)]), gelu(numbers, activation)[:1])


@BOTH
def test_a_replay_computes_gelu_of_the_present_numbers(activation):
    numbers = torch.zeros(3, 41)
    with torch.no_grad():
        replay, *_ = capture(lambda: gelu(numbers, activation) + 1)
        numbers.copy_(torch.randn(3, 41))
        assert torch.equal(replay(), gelu(numbers, activation) + 1)


def test_other_tensors_are_left_to_torch():
    for numbers in (torch.zeros(4).bfloat16(), torch.zeros(4, 4).t()[:, :2], torch.zeros(4, device="meta")):
        assert first_supported(GELU_KERNELS, "cpu", numbers) is GELU_KERNELS[-1]
    with without("C++"):
        kernel = first_supported(GELU_KERNELS, "cpu", torch.zeros(4))
        numbers = torch.randn(9)
        assert torch.equal(kernel.run(numbers, GELU_TANH), functional.gelu(numbers, approximate="tanh"))
