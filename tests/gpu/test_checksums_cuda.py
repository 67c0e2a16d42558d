"""Checksums of weights on a GPU, by the kernel in Triton."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fastgen.ops import checksums

pytestmark = pytest.mark.skipif(
    checksums.KERNELS[0].state != "usable", reason=f"checksums in Triton: {checksums.KERNELS[0].state}"
)


def test_one_launch_sees_each_changed_byte():
    tensors = [torch.randn(length, device="cuda").to(torch.bfloat16) for length in (3, 1001, 1 << 20, 5_000_001)]
    before = checksums.checksums_sync(tensors)
    assert checksums.checksums_sync([tensor.clone() for tensor in tensors]) == before
    for index, tensor in enumerate(tensors):
        for place in (0, len(tensor) // 2, len(tensor) - 1):
            tensor.view(torch.int16)[place] ^= 1
            after = checksums.checksums_sync(tensors)
            assert [a != b for a, b in zip(after, before)] == [number == index for number in range(len(tensors))]
            tensor.view(torch.int16)[place] ^= 1


def test_all_tensors_take_one_launch():
    tensors = [torch.randn(99, device="cuda") for _ in range(50)]
    checksums.checksums_sync(tensors)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        checksums.checksums_sync(tensors)
    assert sum(event.count for event in profiled.key_averages() if "_add_up" in event.key) == 1
