"""Layer norm, `csrc/layer_norm.cpp`: the numbers of torch, alone and with the sum before it in a captured step."""

import pytest
import torch
from hooks import limits
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_kernels import needs_library, torch_threads
from torch import Tensor
from torch.nn import functional

from fastgen.ops import cpu_linear, norms, simd
from fastgen.ops.cpu_graph import capture
from fastgen.ops.kernel import tolerance

pytestmark = needs_library

ROWS, WIDTH, EPSILON = 3, 40, 1e-5


def parameters(width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(width).to(dtype), torch.randn(width).to(dtype)


@given(
    rows=st.sampled_from((1, 2, 3, 17, 64)),
    width=st.sampled_from((2, 7, 8, 16, 31, 33, 64, 768, 1000)),  # of one number, torch rounds a product of 1e5
    scale=st.sampled_from((1e-3, 1.0, 1e3)),
    mean=st.sampled_from((0.0, 10.0)),
    dtype=st.sampled_from(simd.DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_layer_norm_agrees_with_the_definition_in_fp64(rows, width, scale, mean, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    states = (scale * (torch.randn(rows, width, generator=random) + mean)).to(dtype)
    weight, bias = (torch.randn(width, generator=random).to(dtype) for _ in range(2))
    exact = functional.layer_norm(states.double(), (width,), weight.double(), bias.double(), EPSILON)
    atol = tolerance("product", dtype) * (exact.abs().max().item() + 1)
    deviation = (states.double().var(1, correction=0) + EPSILON).sqrt()  # a mean is rounded relative to the states
    largest = (states.double().abs().amax(1) / deviation).max().item() * weight.abs().max().item()
    atol += 4 * torch.finfo(torch.float32).eps * largest
    for kernel in norms.LAYER_KERNELS:
        output = kernel.run(states, weight, bias, EPSILON)
        torch.testing.assert_close(output.double(), exact, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_layer_norm_in_half_precision_is_rounded_once(dtype):
    torch.manual_seed(0)
    states, (weight, bias) = torch.randn(50, 768).to(dtype), parameters(768, dtype)
    exact = functional.layer_norm(states.double(), (768,), weight.double(), bias.double(), EPSILON)
    output = torch.ops.fastgen.layer_norm(states, weight, bias, EPSILON)
    torch.testing.assert_close(output.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


def test_layer_norm_has_the_same_bits_for_any_rows_and_threads():
    states, (weight, bias) = torch.randn(33, 100), parameters(100)
    outputs = []
    for threads in (1, 2, 5):
        with limits(min_elements_of_norm=1), torch_threads(threads):
            outputs.append(torch.ops.fastgen.layer_norm(states, weight, bias, EPSILON))
    outputs.append(torch.cat([torch.ops.fastgen.layer_norm(row[None], weight, bias, EPSILON) for row in states]))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_nan_and_infinity_in_a_layer_norm_are_as_in_torch():
    states = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [0.0, 0.0], [3.0, 3.0]])
    weight, bias = torch.ones(2), torch.zeros(2)
    output = torch.ops.fastgen.layer_norm(states, weight, bias, EPSILON)
    torch.testing.assert_close(output, functional.layer_norm(states, (2,), weight, bias, EPSILON), equal_nan=True)


def test_rows_of_another_kind_are_not_normalized():
    weight, bias = parameters(WIDTH)
    rows = torch.randn(ROWS, WIDTH)
    assert norms.can_normalize(rows, weight, bias)
    for other in (rows.double(), rows.bfloat16(), rows.t().contiguous().t(), rows[:, :8], rows[:0], rows.to("meta")):
        assert not norms.can_normalize(other, weight, bias)
    assert not norms.can_normalize(rows, weight, None) and not norms.can_normalize(rows, None, None)


def normed(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(rows, (WIDTH,), weight, bias, EPSILON)


def sum_is_used(rows: Tensor, others: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    total = rows + others
    return normed(total, *parameters), total * 2


def sum_ends_a_product(rows: Tensor, others: Tensor, *parameters: Tensor) -> Tensor:
    """The product takes the sum: its call comes first."""
    square = torch.ones(WIDTH, WIDTH, dtype=rows.dtype)
    return normed(others + cpu_linear.skinny_linear(rows, square), *parameters)


IN_ONE_KERNEL = [
    (lambda rows, others, *parameters: normed(rows + others, *parameters), ["layer_norm"]),
    (lambda rows, others, *parameters: normed(rows + others[:1], *parameters), ["add", "layer_norm"]),
    (lambda rows, others, *parameters: normed(rows + 1, *parameters), ["add", "layer_norm"]),
    (lambda rows, others, *parameters: normed(torch.add(rows, others, alpha=2), *parameters), ["add", "layer_norm"]),
    (sum_is_used, ["add", "layer_norm", "mul"]),
    (sum_ends_a_product, ["skinny_linear", "layer_norm"]),
]


@pytest.mark.parametrize(("function", "expected"), IN_ONE_KERNEL)
@pytest.mark.parametrize("dtype", simd.DTYPES)
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_a_layer_norm_takes_the_sum_before_it(function, expected, dtype, without_gradients, monkeypatch):
    torch.manual_seed(0)
    rows, others = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(ROWS, WIDTH).to(dtype)
    arguments = rows, others, *parameters(WIDTH, dtype)
    kernels = []
    from fastgen.ops import cpu_graph

    repetition_of = cpu_graph.repetition_of
    monkeypatch.setattr(
        cpu_graph, "repetition_of", lambda call: kernels.append(call.operation._schema.name) or repetition_of(call)
    )
    with without_gradients():
        replay, *_ = capture(lambda: function(*arguments))
        assert [name.partition("::")[2] for name in kernels if not name.endswith("ones")] == expected
        for _ in range(3):
            rows.copy_(torch.randn(rows.shape))
            atol = 10 * tolerance("product", dtype)
            torch.testing.assert_close(replay(), function(*arguments), rtol=0, atol=atol)


@torch.no_grad()
def test_parameters_of_a_captured_layer_norm_may_move():
    rows, (weight, bias) = torch.randn(ROWS, WIDTH), parameters(WIDTH)
    replay, *_ = capture(lambda: normed(rows, weight, bias))
    weight.data, bias.data = parameters(WIDTH)
    torch.testing.assert_close(replay(), torch.ops.fastgen.layer_norm(rows, weight, bias, EPSILON), rtol=0, atol=0)
