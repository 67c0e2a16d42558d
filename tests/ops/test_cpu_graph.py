"""A replay returns what the captured function would return for the present contents of its tensors."""

from collections import Counter
from unittest import mock

import pytest
import torch
from simd_kernels import needs_library
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from fastgen.ops import activations, cpu_attention, cpu_graph, cpu_linear, simd
from fastgen.ops.cpu_graph import capture
from fastgen.ops.kernel import tolerance
from fastgen.ops.tracing import NotRepeatable
from fastgen.optimizer.decoding.segmented_kv import SegmentedKV

ROWS, WIDTH = 3, 8


class Layer(nn.Module):
    """A layer of a decoder: keys written in place, attention, views, constants of which one is written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.zeros(ROWS, 1, 5, WIDTH))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.place, self.norm(states)[:, None, None])
        hidden = (torch.arange(5) > self.place)[None]
        bias = torch.zeros(1, 5).masked_fill(hidden, -torch.inf)
        written = torch.ones(ROWS, WIDTH)
        written.mul_(states)
        attended = functional.scaled_dot_product_attention(states[:, None, None], self.keys, self.keys, bias)
        scores = torch.matmul(states.view(ROWS, 1, WIDTH), self.keys[:, 0].transpose(1, 2)).softmax(-1)
        mixed = self.mlp(functional.gelu(attended.flatten(1))) + written
        return mixed * scores.sum(-1) / torch.full((), 3.0), torch.topk(mixed.clone(), 2).indices


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def without_gradients(request):
    with request.param():
        yield


@pytest.mark.usefixtures("without_gradients")
def test_a_replay_returns_what_the_function_returns():
    torch.manual_seed(0)
    layer, states = Layer(), torch.randn(ROWS, WIDTH)
    replay, *_ = capture(lambda: layer(states))
    for place in range(5):
        layer.place.fill_(place)
        states.copy_(torch.randn(ROWS, WIDTH))
        keys = layer.keys.clone()
        expected = layer(states)
        layer.keys.copy_(keys)
        torch.testing.assert_close(replay(), expected)


@needs_library
@pytest.mark.usefixtures("without_gradients")
def test_products_of_few_rows_are_replayed_on_moved_weights():
    layer, states = nn.Linear(16, 24), torch.randn(3, 16)

    def run() -> Tensor:
        return cpu_linear.skinny_linear(
            cpu_linear.skinny_linear(states, layer.weight, layer.bias)[:, :16].clone(), square
        )

    square = torch.randn(16, 16)
    replay, *_ = capture(run)
    states.mul_(2)
    layer.weight.data, layer.bias.data = layer.weight.data * 3, layer.bias.data + 1
    torch.testing.assert_close(replay(), run())


@needs_library
@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize("queries", [1, cpu_attention.MOST_QUERIES + 1])
def test_attention_of_few_queries_is_replayed_by_its_kernel(queries, monkeypatch):
    """The cache is a plain one, which torch's attention sees in one piece."""
    used = []
    attend = cpu_attention.call_into
    monkeypatch.setattr(cpu_attention, "call_into", lambda *args: used.append(args) or attend(*args))
    query = torch.randn(3, queries, 4, 16).transpose(1, 2)
    keys, values, mask = torch.randn(3, 4, 40, 16), torch.randn(3, 4, 40, 16), torch.randn(3, 1, 1, 40)

    def run() -> Tensor:
        attended = functional.scaled_dot_product_attention(query * 2, keys, values, mask + 1)
        return attended.transpose(1, 2).reshape(3, -1) + 1

    replay, *_ = capture(run)
    assert len(used) == (queries == 1)
    for tensor in (query, keys, values, mask):
        tensor.mul_(-0.5)
    mask[1, :, :, 3:] = -torch.inf
    torch.testing.assert_close(replay(), run())


def test_tensors_share_memory_unless_returned_or_constant():
    states = torch.randn(1000)

    def run() -> list[Tensor]:
        constant = torch.ones(1000).cumsum(0)
        middle = states
        for _ in range(50):
            middle = middle + constant
        return [middle, middle * 2, constant]

    with torch.no_grad():
        replay, nbytes, _ = capture(run)
        states.mul_(3)
        for _ in range(2):
            torch.testing.assert_close(replay(), run())
    assert nbytes <= 5 * states.nbytes


def calls_of(function) -> list[str]:
    """Returns the operations that a replay repeats, in their order."""
    repeated, repetition = [], cpu_graph.repetition_of
    with (
        mock.patch.object(cpu_graph, "repetition_of", lambda call: repeated.append(call) or repetition(call)),
        torch.no_grad(),
    ):
        capture(function)
    return [call.operation._schema.name for call in repeated]


def test_results_computed_twice_or_never_used_are_left_out():
    """Each layer of T5 makes the same mask, and reads the length of its cache."""
    mask, bias, states = torch.rand(3, 9) < 0.5, torch.randn(9), torch.randn(3, 9)
    length = torch.zeros((), dtype=torch.int64)

    def run() -> tuple[Tensor, Tensor]:
        total = states
        for _ in range(4):
            unused = length.clone() + 1
            added = torch.where(mask, bias, -9.0).clone()
            total = total + added[:, :9]
            length.add_(1)
        return total, unused * 0

    assert calls_of(run).count("aten::where") == 1
    with torch.no_grad():
        replay, *_ = capture(run)
        mask.logical_not_()
        length.zero_()
        expected = run()[0]
        length.zero_()
        for _ in range(2):
            torch.testing.assert_close(replay()[0], expected)
    assert length == 8


def test_written_and_returned_results_are_computed_each_time():
    states = torch.randn(5)

    def run() -> list[Tensor]:
        written, second, third = states + 1, states + 1, states + 1
        written.mul_(2)
        return [written * 1, second, third]

    with torch.no_grad():
        replay, *_ = capture(run)
        states.mul_(3)
        replayed, expected = replay(), run()
    assert all(map(torch.equal, replayed, expected)) and replayed[1].data_ptr() != replayed[2].data_ptr()


@needs_library
@pytest.mark.parametrize("dtype", simd.DTYPES)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_do_the_relu_and_the_sum_after_them(dtype, is_transposed):
    torch.manual_seed(0)
    up, down = (nn.Linear(*sizes, bias=bias).to(dtype) for *sizes, bias in ((40, 70, True), (70, 40, False)))
    weights = [layer.weight.data.t().contiguous().t() if is_transposed else layer.weight.data for layer in (up, down)]
    states = torch.randn(5, 40).to(dtype)

    def run() -> Tensor:
        hidden = cpu_linear.skinny_linear(states, weights[0], up.bias).relu()
        return states + cpu_linear.skinny_linear(hidden, weights[1])

    assert calls_of(run) == ["fastgen::skinny_linear"] * 2
    with torch.no_grad():
        replay, *_ = capture(run)
        states.mul_(-3)
        states[0, 0] = torch.nan
        assert torch.equal(replay().nan_to_num(7), run().nan_to_num(7))


@needs_library
@pytest.mark.parametrize("dtype", simd.DTYPES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("activation", [activations.GELU, activations.GELU_TANH])
def test_products_do_the_gelu_after_them(activation, is_transposed, dtype):
    torch.manual_seed(0)
    layer, states = nn.Linear(40, 70).to(dtype), torch.randn(5, 40).to(dtype)
    weight = layer.weight.data.t().contiguous().t() if is_transposed else layer.weight.data

    def run() -> Tensor:
        product = cpu_linear.skinny_linear(states, weight, layer.bias)
        if dtype == torch.float32:
            return torch.ops.fastgen.gelu(product, activation)
        return nn.functional.gelu(product, approximate="tanh" if activation == activations.GELU_TANH else "none")

    is_fused = dtype == torch.float32 or activation == activations.GELU
    assert calls_of(run) == ["fastgen::skinny_linear"] + ["aten::gelu"] * (not is_fused)
    with torch.no_grad():
        replay, *_ = capture(run)
        states.mul_(-3)
        product = nn.functional.linear(*(each.double() for each in (states, weight, layer.bias))).to(dtype).double()
        expected = nn.functional.gelu(product, approximate="tanh" if activation == activations.GELU_TANH else "none")
        atol = tolerance("product", dtype) * expected.abs().max().item()
        torch.testing.assert_close(replay().double(), expected, rtol=0, atol=atol)


@needs_library
def test_products_with_other_users_are_not_fused():
    layer, states = nn.Linear(8, 8), torch.randn(3, 8)

    def product() -> Tensor:
        return cpu_linear.skinny_linear(states, layer.weight)

    def used_twice() -> Tensor:
        states_up = product()
        return states_up.relu() + states_up

    def returned() -> tuple[Tensor, Tensor]:
        states_up = product()
        return states_up, states_up + states

    def written_before_the_sum() -> Tensor:
        states_up = product()
        states.mul_(2)
        return states_up + states

    def of_another_shape() -> Tensor:
        return product() + torch.ones(8)

    def scaled() -> Tensor:
        return torch.add(states, product(), alpha=2)

    def doubled() -> Tensor:
        states_up = product()
        return states_up + states_up

    for function in (used_twice, returned, written_before_the_sum, of_another_shape, scaled, doubled):
        before = states.clone()
        with torch.no_grad():
            replay, *_ = capture(function)
            states.copy_(before)
            replayed = [output.clone() for output in tree_leaves(replay())]
            states.copy_(before)
            expected = tree_leaves(function())
        assert all(map(torch.equal, replayed, expected)) and calls_of(function)[-1] != "fastgen::skinny_linear"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_a_position_outside_of_the_buffer_is_an_error(dtype):
    buffer, place = torch.zeros(2, 3, 4, 5, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    added = torch.arange(30).view(2, 3, 1, 5).to(dtype)
    with torch.no_grad():
        replay, *_ = capture(lambda: buffer.index_copy_(2, place, added))
        place.fill_(3)
        replay()
        assert torch.equal(buffer[:, :, 3], added[:, :, 0])
        for outside in (4, -1):
            place.fill_(outside)
            with pytest.raises(IndexError):
                replay()


def subclass_inside() -> Tensor:
    states = SegmentedKV((torch.ones(1, 1, 2, 2),), 2, Counter())
    with torch._C.DisableTorchFunctionSubclass():
        return states.sin()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: torch.rand(3), "random numbers"),
        (lambda: torch.rand(3, generator=torch.Generator()), "draws numbers"),
        (lambda: functional.dropout(torch.ones(3), 0.5), "random numbers"),
        (lambda: torch.arange(3).nonzero(), "results of any size"),
        (lambda: torch.arange(3)[torch.arange(3) > 1], "results of any size"),
        (lambda: torch.tensor(float("nan")).item() or torch.ones(1), "returned nan on the host"),
        (subclass_inside, "works on SegmentedKV"),
    ],
)
def test_functions_that_cannot_be_repeated_are_refused(function, message):
    with torch.no_grad(), pytest.raises(NotRepeatable, match=message):
        capture(function)
