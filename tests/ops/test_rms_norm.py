"""RMS norm, `csrc/rms_norm.cpp`: fused from the calls of a step, with the numbers of the calls it replaces."""

from collections.abc import Callable

import pytest
import torch
from hooks import limits
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_kernels import needs_library, torch_threads
from torch import Tensor

from fastgen.ops import norms, simd
from fastgen.ops.cpu_graph import capture
from fastgen.ops.kernel import tolerance

pytestmark = needs_library

ROWS, WIDTH, EPSILON = 3, 40, 1e-6


def scale(rows: Tensor, power: int = 2, dim: int = -1) -> Tensor:
    return torch.rsqrt(rows.pow(power).mean(dim, keepdim=True) + EPSILON)


def norm(weight: Tensor, rows: Tensor) -> Tensor:
    """T5's and Llama's norm."""
    return weight * (rows * scale(rows.float())).to(rows.dtype)


def widened(weight: Tensor, rows: Tensor) -> Tensor:
    """Llama's norm, computed in fp32."""
    wide = rows.float()
    return weight * (wide * scale(wide)).to(rows.dtype)


def widened_is_used(weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    return weight * (wide * scale(wide)).to(rows.dtype), wide + 1


def one_more(weight: Tensor, rows: Tensor) -> Tensor:
    """Gemma's norm, whose weight is the difference from one."""
    wide = rows.float()
    return ((wide * scale(wide)) * (1.0 + weight.float())).type_as(rows)


def rounded_in_between(weight: Tensor, rows: Tensor) -> Tensor:
    """A norm in half precision with a weight in fp32."""
    wide = rows.float()
    return weight.float() * (wide * scale(wide)).to(rows.dtype)


def scale_is_used(weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    factor = scale(rows)
    return weight * (rows * factor), factor + 1


def scale_is_returned(weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    factor = scale(rows)
    return weight * (rows * factor), factor


def rows_are_written(weight: Tensor, rows: Tensor) -> Tensor:
    rows = rows + 0
    factor = scale(rows)
    rows.add_(1)
    return weight * (rows * factor)


IN_ONE_KERNEL = [
    (norm, torch.float32, 1),
    (norm, torch.bfloat16, 1),
    (widened, torch.float32, 1),
    (widened, torch.bfloat16, 1),
    (widened_is_used, torch.float32, 1),
    (widened_is_used, torch.bfloat16, 0),
    (one_more, torch.float32, 1),
    (one_more, torch.bfloat16, 1),
    (lambda weight, rows: (scale(rows.float()) * rows) * weight, torch.float32, 1),
    (lambda weight, rows: (scale(rows.float()) * rows) * weight, torch.bfloat16, 0),
    (lambda weight, rows: weight * (rows * scale(rows)), torch.float32, 1),
    (lambda weight, rows: weight * (rows * scale(rows)), torch.bfloat16, 0),
    (rounded_in_between, torch.bfloat16, 0),
    (scale_is_used, torch.float32, 0),
    (scale_is_returned, torch.float32, 0),
    (rows_are_written, torch.float32, 0),
    (lambda weight, rows: weight * (rows * scale(rows, power=4)), torch.float32, 0),
    (lambda weight, rows: weight * (rows * scale(rows, dim=0)), torch.float32, 0),
    (lambda weight, rows: weight * (rows.flip(0) * scale(rows)), torch.float32, 0),
]


def fusions(function: Callable, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable, int]:
    """Returns a replay, and how many of its calls are a norm in one kernel."""
    used, call_into = [], norms.rms_norm_into
    monkeypatch.setitem(simd.CALLS_INTO, "fastgen::rms_norm", lambda *args: used.append(args) or call_into(*args))
    replay, *_ = capture(function)
    return replay, len(used)


@pytest.mark.parametrize(("function", "dtype", "expected"), IN_ONE_KERNEL)
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_a_norm_becomes_one_kernel(function, dtype, expected, without_gradients, monkeypatch):
    torch.manual_seed(0)
    weight, rows = torch.randn(WIDTH).to(dtype), torch.randn(ROWS, 1, WIDTH).to(dtype)
    with without_gradients():
        replay, fused = fusions(lambda: function(weight, rows * 2), monkeypatch)
        assert fused == expected
        for _ in range(3):
            rows.copy_(torch.randn(rows.shape))
            torch.testing.assert_close(
                replay(), function(weight, rows * 2), rtol=0, atol=10 * tolerance("product", dtype)
            )


@torch.inference_mode()
def test_rows_that_are_used_later_are_not_overwritten(monkeypatch):
    """The memory of tensors that are no longer needed is used again."""
    weight, rows = torch.randn(WIDTH), torch.randn(ROWS, WIDTH)

    def function() -> Tensor:
        states = rows * 2
        for _ in range(3):
            states = states + norm(weight, states)
        return norm(weight, states)

    replay, fused = fusions(function, monkeypatch)
    assert fused == 4
    rows.copy_(torch.randn(rows.shape))
    torch.testing.assert_close(replay(), function(), rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_weight_may_move(monkeypatch):
    weight, rows = torch.randn(WIDTH), torch.randn(ROWS, WIDTH)
    replay, fused = fusions(lambda: norm(weight, rows), monkeypatch)
    assert fused == 1
    weight.data = torch.randn(WIDTH)
    torch.testing.assert_close(replay(), norm(weight, rows), rtol=0, atol=1e-5)


@given(
    rows=st.sampled_from((1, 2, 3, 17, 64)),
    width=st.sampled_from((1, 7, 8, 16, 31, 33, 64, 768, 1000)),
    scale=st.sampled_from((1e-4, 1.0, 1e4)),
    dtype=st.sampled_from(simd.DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_the_kernel_agrees_with_the_definition_in_fp64(rows, width, scale, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    states = (scale * torch.randn(rows, width, generator=random)).to(dtype)
    weight = torch.randn(width, generator=random).to(dtype)
    wide = states.double()
    expected = weight * wide / (wide.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
    in_torch = norms.RMS_KERNELS[-1].run(states, weight, EPSILON)
    output = torch.ops.fastgen.rms_norm(states, weight, EPSILON)
    atol = tolerance("product", dtype) * (expected.abs().max() + 1)
    for result in (output, in_torch):
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=atol.item())


def test_the_bits_do_not_depend_on_rows_and_threads():
    states, weight = torch.randn(33, 100), torch.randn(100)
    outputs = []
    for threads in (1, 2, 5):
        with limits(min_elements_of_thread=1), torch_threads(threads):
            outputs.append(torch.ops.fastgen.rms_norm(states, weight, EPSILON))
    with limits(min_elements_of_thread=1), torch_threads(5):
        outputs.append(torch.cat([torch.ops.fastgen.rms_norm(row[None], weight, EPSILON) for row in states]))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@torch.inference_mode()
def test_nan_and_infinity_are_normalised_as_in_torch():
    states = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [0.0, 0.0]])
    output = torch.ops.fastgen.rms_norm(states, torch.ones(2), EPSILON)
    expected = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPSILON)
    torch.testing.assert_close(output, expected, equal_nan=True)
