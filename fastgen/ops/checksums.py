"""Checksums of tensors, which show whether their bits have changed.

They are integers, so a huge number does not hide small ones. All bytes are read, as a decode step reads all weights.
Each kernel defines its own checksum, so only checksums from the same device are comparable.

Tests: tests/ops/test_checksums.py, tests/optimizer/transformers/test_kept_prefix.py
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.ops.kernel import Kernel, first_supported, triton_reasons
from fastgen.ops.probes import probe

# A checksum sums words (8 bytes, or single bytes in unaligned tensors) whose distance is a multiple of one of these
# numbers. They are coprime: words that swap their positions less than 2 GiB apart, such as rows of a one-hot matrix,
# change at least one sum.
_STRIDES = (1 << 14, (1 << 14) + 1)


def checksums_sync(tensors: list[Tensor]) -> list[int]:
    """Returns a checksum of the bits of each tensor and their positions, device by device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return [
        value
        for device, some in by_device.items()
        for value in first_supported(KERNELS, device.type).run(some).tolist()
    ]


def _checksums_in_torch(tensors: list[Tensor]) -> Tensor:
    return torch.stack(list(map(_checksum, tensors)))


def _checksum(tensor: Tensor) -> Tensor:
    """Returns a checksum, int64, of a tensor's bits and their positions."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 == 0 and data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0:
        data = data.view(torch.int64)
    sums = []
    for stride in _STRIDES if data.numel() >= _STRIDES[-1] else (0,):  # few words are used without summing
        whole = data.numel() // stride * stride if stride else 0
        sums += [data[:whole].view(-1, stride or 1).sum(dim=0, dtype=torch.int64)] if whole else []
        sums.append(data[whole:].long())
    words = torch.cat(sums)
    halves = torch.cat([words & 0xFFFFFFFF, words >> 32])  # round numbers have all bits in the upper half
    return (halves * _factors(data.device)[: len(halves)]).sum()


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Returns int64 random numbers, one for each half of a sum."""
    random = torch.Generator(device).manual_seed(0)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (8 * _STRIDES[-1],), generator=random, device=device)


def _checksums_with_triton(tensors: list[Tensor]) -> Tensor:
    from fastgen.ops import triton_checksums  # importing triton takes half a second

    return triton_checksums.checksums(tensors)


def _triton_reasons() -> list[str]:
    return triton_reasons() or _notices_changed_bytes.reasons()


@probe("the kernel in Triton overlooks changed bytes")
def _notices_changed_bytes() -> bool:
    original = torch.arange(99_999, device="cuda").to(torch.uint8)
    changed = original.clone()
    changed[[-1, 50_000]] += 1
    sums = _checksums_with_triton([original, changed, original.clone(), original[8:]]).tolist()
    return sums[0] == sums[2] and len(set(sums)) == 3


_kernel = functools.partial(Kernel, task="checksums of weights whose prefixes are kept")
KERNELS = (
    _kernel("Triton", _triton_reasons, _checksums_with_triton, "cuda"),
    _kernel("torch", list, _checksums_in_torch),
)
