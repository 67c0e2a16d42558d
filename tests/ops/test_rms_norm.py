"""RMS norm, `csrc/rms_norm.cpp`: found among the calls of a step, with the numbers of what it stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from x86_kernels import needs_library, torch_threads

from fastgen.ops import rms_norm, x86
from fastgen.ops.cpu_graph import capture
from fastgen.ops.kernel import tolerance
from fastgen.testing import limits

pytestmark = needs_library

ROWS, WIDTH, EPSILON = 3, 40, 1e-6


class Norm(nn.Module):
    """As T5 and Llama write it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH).to(dtype))

    def scale(self, rows: Tensor) -> Tensor:
        return torch.rsqrt(rows.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPSILON)

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * (rows * self.scale(rows)).to(rows.dtype)


class Widened(Norm):
    """Llama's."""

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.to(torch.float32)
        return self.weight * (wide * self.scale(wide)).to(rows.dtype)


class WidenedIsUsed(Norm):
    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        wide = rows.to(torch.float32)
        return self.weight * (wide * self.scale(wide)).to(rows.dtype), wide + 1


class Narrow(Norm):
    def scale(self, rows: Tensor) -> Tensor:
        return torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPSILON)


class OtherOrder(Norm):
    def forward(self, rows: Tensor) -> Tensor:
        return (self.scale(rows) * rows) * self.weight


class OneMore(Norm):
    """Gemma's, whose weight is the difference from one."""

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        return ((wide * self.scale(wide)) * (1.0 + self.weight.float())).type_as(rows)


class ScaleIsUsed(Norm):
    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale(rows)
        return self.weight * (rows * scale), scale + 1


class ScaleIsReturned(Norm):
    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale(rows)
        return self.weight * (rows * scale), scale


class RowsAreWritten(Norm):
    def forward(self, rows: Tensor) -> Tensor:
        rows, scale = rows + 0, self.scale(rows)
        squares = rows.pow(2).mean(-1, keepdim=True) + EPSILON
        rows.add_(scale)
        return self.weight * (rows * torch.rsqrt(squares))


class OtherPower(Norm):
    def scale(self, rows: Tensor) -> Tensor:
        return torch.rsqrt(rows.pow(4).mean(-1, keepdim=True) + EPSILON)


class OtherDimension(Norm):
    def scale(self, rows: Tensor) -> Tensor:
        return torch.rsqrt(rows.pow(2).mean(0, keepdim=True) + EPSILON)


class OfOtherRows(Norm):
    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * (rows.flip(0) * self.scale(rows))


def fusions(function: Callable, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable, int]:
    """A replay, and in how many of its calls a norm is one kernel."""
    used, call_into = [], rms_norm.call_into
    monkeypatch.setattr(
        "fastgen.ops.cpu_graph._KERNELS",
        {rms_norm.OPERATION: lambda *args: used.append(args) or call_into(*args)},
    )
    replay, *_ = capture(function)
    return replay, len(used)


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        (Norm, torch.float32, 1),
        (OtherOrder, torch.float32, 1),
        (OneMore, torch.float32, 1),
        (Norm, torch.bfloat16, 1),
        (Widened, torch.float32, 1),
        (Widened, torch.bfloat16, 1),
        (OtherOrder, torch.bfloat16, 0),
        (OneMore, torch.bfloat16, 1),
        (WidenedIsUsed, torch.float32, 1),
        (WidenedIsUsed, torch.bfloat16, 0),
        (Narrow, torch.float32, 1),
        (Narrow, torch.bfloat16, 0),
        (ScaleIsUsed, torch.float32, 0),
        (ScaleIsReturned, torch.float32, 0),
        (RowsAreWritten, torch.float32, 0),
        (OtherPower, torch.float32, 0),
        (OtherDimension, torch.float32, 0),
        (OfOtherRows, torch.float32, 0),
    ],
)
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_what_is_a_norm_becomes_one_kernel(kind, dtype, expected, without_gradients, monkeypatch):
    torch.manual_seed(0)
    norm, rows = kind(dtype), torch.randn(ROWS, 1, WIDTH).to(dtype)
    with without_gradients():
        replay, found = fusions(lambda: norm(rows * 2), monkeypatch)
        assert found == expected
        for _ in range(3):
            rows.copy_(torch.randn(rows.shape))
            torch.testing.assert_close(replay(), norm(rows * 2), rtol=0, atol=10 * tolerance("product", dtype))


@torch.inference_mode()
def test_rows_that_are_used_afterwards_stay(monkeypatch):
    """Also where the memory of tensors that are not needed any more is used again."""
    norm, rows = Norm(), torch.randn(ROWS, WIDTH)

    def function() -> Tensor:
        states = rows * 2
        for _ in range(3):
            states = states + norm(states)
        return norm(states)

    replay, found = fusions(function, monkeypatch)
    assert found == 4
    rows.copy_(torch.randn(rows.shape))
    torch.testing.assert_close(replay(), function(), rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_weight_may_move(monkeypatch):
    norm, rows = Norm(), torch.randn(ROWS, WIDTH)
    replay, found = fusions(lambda: norm(rows), monkeypatch)
    assert found == 1
    norm.weight.data = torch.randn(WIDTH)
    torch.testing.assert_close(replay(), norm(rows), rtol=0, atol=1e-5)


@given(
    rows=st.sampled_from((1, 2, 3, 17, 64)),
    width=st.sampled_from((1, 7, 8, 16, 31, 33, 64, 768, 1000)),
    scale=st.sampled_from((1e-4, 1.0, 1e4)),
    dtype=st.sampled_from(x86.DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_the_numbers_of_the_kernel(rows, width, scale, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    states = (scale * torch.randn(rows, width, generator=random)).to(dtype)
    weight = torch.randn(width, generator=random).to(dtype)
    wide = states.double()
    expected = weight * wide / (wide.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
    in_torch = rms_norm.KERNELS[-1].run(states, weight, EPSILON)
    found = torch.ops.fastgen.rms_norm(states, weight, EPSILON)
    atol = tolerance("product", dtype) * (expected.abs().max() + 1)
    for result in (found, in_torch):
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=atol.item())


def test_the_bits_do_not_depend_on_rows_and_threads():
    states, weight = torch.randn(33, 100), torch.randn(100)
    found = []
    for threads in (1, 2, 5):
        with limits(min_elements_of_thread=1), torch_threads(threads):
            found.append(torch.ops.fastgen.rms_norm(states, weight, EPSILON))
    with limits(min_elements_of_thread=1), torch_threads(5):
        found.append(torch.cat([torch.ops.fastgen.rms_norm(row[None], weight, EPSILON) for row in states]))
    assert all(torch.equal(one, found[0]) for one in found)


@torch.inference_mode()
def test_what_is_no_number_stays_so():
    states = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [0.0, 0.0]])
    found = torch.ops.fastgen.rms_norm(states, torch.ones(2), EPSILON)
    expected = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPSILON)
    torch.testing.assert_close(found, expected, equal_nan=True)
