"""Buffers of large outputs: memory is used again only if no tensor holds it, and tokens stay the same."""

import pytest
import torch
from architecture_parity import measure
from architectures import BY_NAME
from hooks import ANY_SIZE, costs, force, limits
from torch import nn
from torch.nn import functional

from fastgen.ops import cpu_linear, simd
from fastgen.ops.output_buffers import OutputBuffers
from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.decoding.faster_forwards import faster_forwards
from fastgen.optimizer.transformers.call import forwards

BACKENDS = [cpu_linear.BLAS, cpu_linear.ONEDNN, cpu_linear.SKINNY_GEMM]
LIKE = torch.empty(0)


@pytest.fixture
def any_bytes():
    with limits(min_bytes_of_buffer=1):
        yield


@pytest.mark.parametrize(
    "holder", [lambda x: x, lambda x: x[:1].view(-1), lambda x: x.numpy(), lambda x: nn.Parameter(x)]
)
def test_a_buffer_is_used_again_once_no_tensor_holds_it(holder, any_bytes):
    buffers = OutputBuffers()
    output = buffers.empty((4, 8), LIKE)
    address = output.data_ptr()
    held = holder(output)
    del output
    assert buffers.empty((4, 8), LIKE).data_ptr() != address
    del held
    output = buffers.empty((2, 2, 8), LIKE)
    assert output.data_ptr() == address and output.is_contiguous() and output.shape == (2, 2, 8)
    assert output.untyped_storage().nbytes() == 4 * 8 * 4


def test_buffers_of_other_rows_are_freed(any_bytes):
    buffers = OutputBuffers()
    buffers.empty((4, 8), LIKE)
    buffers.empty((4, 9), LIKE)
    assert [storage.nbytes() for storage in buffers.storages] == [128, 144]
    buffers.empty((1, 8), LIKE)
    assert [storage.nbytes() for storage in buffers.storages] == [32]


def test_small_outputs_have_no_buffers():
    buffers = OutputBuffers()
    buffers.empty((4, 8), LIKE)
    assert not buffers.storages


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", simd.DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_product_in_a_buffer_has_the_bits_of_its_backend(backend, dtype, with_bias, is_transposed):
    if backend not in cpu_linear.gemm_backends(dtype):
        pytest.skip(f"{backend} has no products in {dtype} on this CPU")
    torch.manual_seed(0)
    rows, bias = torch.randn(3, 5, 40).to(dtype), torch.randn(24).to(dtype) if with_bias else None
    weight = torch.randn(40, 24).to(dtype).t() if is_transposed else torch.randn(24, 40).to(dtype)
    output = torch.full((3, 5, 24), torch.nan, dtype=dtype)
    with torch.no_grad():
        cpu_linear.write_product(backend, output, rows, weight, bias)
        assert torch.equal(output, cpu_linear.gemm_backends(dtype)[backend](rows, weight, bias))


def test_onednn_computes_some_rows_at_a_time(monkeypatch):
    if cpu_linear.machine_reasons():
        pytest.skip(f"oneDNN: {cpu_linear.machine_reasons()}")
    monkeypatch.setattr(cpu_linear, "ROWS_AT_ONCE", 4)
    rows, weight, output = torch.randn(11, 40), torch.randn(24, 40), torch.full((11, 24), torch.nan)
    with torch.no_grad():
        cpu_linear.write_product(cpu_linear.ONEDNN, output, rows, weight, None)
        torch.testing.assert_close(output, functional.linear(rows, weight))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "bart", "t5", "whisper", "llama"])
def test_generation_in_buffers_has_the_same_tokens(name, backend, any_bytes):
    """Every output is in a buffer that later outputs use again."""
    if backend not in cpu_linear.gemm_backends(torch.float32):
        pytest.skip(f"{backend} has no products on this CPU")
    architecture = BY_NAME[name]
    with force(backend), costs(**ANY_SIZE):
        parity = measure(architecture.model(), architecture.inputs(), "beam search")
    assert parity.tokens_equal and parity.largest_score_difference < 1e-4


@torch.no_grad()
def test_layers_of_a_call_use_the_same_memory(any_bytes):
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    expected = layers(torch.ones(4, 16))
    with force(cpu_linear.BLAS), generate_call("test") as call, faster_forwards(call, {layers: [*layers]}, forwards()):
        output = layers(torch.ones(4, 16))
        assert len(call.outputs.storages) == 2
    assert torch.equal(output, expected)
