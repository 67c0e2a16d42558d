"""Checksums see changed bits and changed places, by torch and by the kernel in Triton, in its interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from python_process import run_functions
from torch import Tensor
from versions import needs_triton

from fastgen.ops import checksums


def of(tensor: Tensor) -> int:
    (checksum,) = checksums.checksums_sync([tensor])
    return checksum


def sees_two_that_change_places(tensor: Tensor, first: int, second: int) -> bool:
    after = tensor.clone()
    after[[first, second]] = after[[second, first]]
    return (of(tensor) != of(after)) == (not torch.equal(tensor, after))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint8, torch.bool))
@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 20_000), data=st.data())
def test_changed_bits_and_changed_places_are_seen(dtype, size, data):
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    tensor = (tensor % 2 if dtype == torch.bool else tensor).view(dtype)
    before, data_bytes = of(tensor), tensor.view(torch.uint8)
    first, second = (data.draw(st.integers(0, len(data_bytes) - 1)) for _ in range(2))
    assert sees_two_that_change_places(data_bytes, first, second)
    data_bytes[first] ^= 1
    assert before != of(tensor)


def mixed(word: int, position: int) -> int:
    """Returns what the kernel adds up for a word."""
    value = (word + (position + 1) * 0x1E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 33)) * 0x7F51AFD7ED558CCD % 2**64
    return value ^ (value >> 29)


def definition(tensor: Tensor) -> int:
    """Returns a tensor's checksum by the kernel's definition, as a signed integer."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    whole = len(content) // 8
    words = [int.from_bytes(content[8 * i : 8 * i + 8], "little") for i in range(whole)]
    total = sum(mixed(word, i) for i, word in enumerate(words))
    total += sum(mixed(byte, 8 * whole + i) for i, byte in enumerate(content[8 * whole :]))
    return (total + 2**63) % 2**64 - 2**63


def compare_with_definition() -> None:
    from fastgen.ops import triton_checksums

    numbers = torch.randn(3 * triton_checksums.BLOCK + 77)
    tensors = [
        numbers,
        numbers[1:],  # at an address that is no multiple of 8
        numbers[:6].reshape(2, 3).t(),
        numbers[:5].to(torch.bfloat16),
        torch.tensor([-1, 1 << 62]),
        torch.zeros(7, dtype=torch.bool),
        torch.zeros(0),
    ]
    assert triton_checksums.checksums(tensors).tolist() == list(map(definition, tensors))


def compare_blocks() -> None:
    """Programs read several blocks each. This changes the module for the rest of the process."""
    from fastgen.ops import triton_checksums

    triton_checksums.BLOCK, triton_checksums.PROGRAMS = 16, 2
    numbers = torch.randn(999)
    assert triton_checksums.checksums([numbers, numbers[:3]]).tolist() == [definition(numbers), definition(numbers[:3])]


def compile_all() -> None:
    from triton_compile import MOST_SPILLED, compile_kernel

    from fastgen.ops import triton_checksums

    constants = {"BLOCK": triton_checksums.BLOCK, "PROGRAMS": triton_checksums.PROGRAMS}
    for architecture in MOST_SPILLED:
        compile_kernel(triton_checksums._add_up, architecture, {"addresses": "*i64", "sums": "*i64"}, constants)


@needs_triton
def test_the_kernel_in_triton_equals_its_definition():
    run_functions(__file__, "compare_with_definition", "compare_blocks", TRITON_INTERPRET="1")


@needs_triton
def test_the_kernel_in_triton_compiles_without_a_gpu(tmp_path):
    run_functions(__file__, "compile_all", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
