"""Checksums of all tensors of a device in one launch, in Triton; compiled when first used.

Each program reads every `PROGRAMS`-th block of a tensor. A word of 8 bytes is mixed with its position by invertible
steps (as in MurmurHash3), and the results are added up. If one word changes, the sum changes; if words swap their
positions, it does too, except with probability 2^-64.

Tests: tests/ops/test_checksums.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, PROGRAMS = 4096, 64

# Odd, so that a product with them can be undone.
_POSITION_FACTOR = tl.constexpr(0x1E3779B97F4A7C15)
_MIX = tl.constexpr(0x7F51AFD7ED558CCD)


@triton.jit
def _mixed(words, position):
    """Returns uint64 that depend on words, int64, and on their positions."""
    mixed = (words + (position + 1) * _POSITION_FACTOR).to(tl.uint64, bitcast=True)
    mixed = (mixed ^ (mixed >> 33)) * _MIX
    return mixed ^ (mixed >> 29)


@triton.jit
def _add_up(addresses, sums, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """Adds to `sums[j]` what program (i, j) reads of tensor j. `addresses`: the address and number of bytes of each."""
    program, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    address = tl.load(addresses + 2 * tensor)
    length = tl.load(addresses + 2 * tensor + 1)
    words = length // 8
    data = address.to(tl.pointer_type(tl.int64))
    total = tl.zeros([BLOCK], tl.uint64)
    for start in range(program * BLOCK, words, PROGRAMS * BLOCK):
        position = (start + tl.arange(0, BLOCK)).to(tl.int64)
        is_word = position < words
        mixed = _mixed(tl.load(data + position, mask=is_word, other=0), position)
        total += tl.where(is_word, mixed, tl.zeros([BLOCK], tl.uint64))
    if program == 0:  # the last bytes, which are not a whole word
        position = (8 * words + tl.arange(0, 8)).to(tl.int64)
        is_byte = position < length
        byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + position, mask=is_byte, other=0)
        mixed = tl.where(is_byte, _mixed(byte.to(tl.int64), position), tl.zeros([8], tl.uint64))
        tl.atomic_add(sums + tensor, tl.sum(mixed, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(sums + tensor, tl.sum(total, 0).to(tl.int64, bitcast=True))


def checksums(tensors: list[Tensor]) -> Tensor:
    """Returns a checksum of the bits of each tensor and their positions, int64 `[tensors]`; all are on one device."""
    whole = [tensor.detach().contiguous() for tensor in tensors]
    whole = [tensor if tensor.data_ptr() % 8 == 0 else tensor.clone() for tensor in whole]
    addresses = torch.tensor([(tensor.data_ptr(), tensor.nbytes) for tensor in whole], device=whole[0].device)
    sums = torch.zeros(len(whole), dtype=torch.int64, device=addresses.device)
    with torch.cuda.device_of(sums):
        _add_up[(PROGRAMS, len(whole))](addresses, sums, BLOCK=BLOCK, PROGRAMS=PROGRAMS)
    return sums
