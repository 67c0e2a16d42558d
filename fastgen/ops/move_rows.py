"""Rows of keys and values change places where they are, on a CPU: `csrc/move_rows.cpp`.

Only rows that change move, and only the positions that are filled. AMD EPYC (family 25, model 17), 2 threads, 12 layers
of 12 heads of 64, keys and values, ms, layer by layer with torch and this one: 16 rows, 16 positions in
bf16 1.9, 0.3; 4 rows, 31 positions in fp32 1.2, 0.3; 128 rows, 63 positions in fp32 67, 43.

Tests: tests/ops/test_move_rows.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.ops import x86
from fastgen.ops.kernel import Kernel, first_supported

MIN_BYTES_OF_THREAD = 1 << 17

_ARGUMENTS = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4, ctypes.c_int32)


def move_rows(buffers: Sequence[Tensor], beam_idx: Tensor) -> None:
    """Row i of each buffer `[layers, rows, heads, length, width]` becomes what row `beam_idx[i]` (`[rows]`, ints) was.

    Raises IndexError where a number in beam_idx is not that of a row.
    """
    first_supported(KERNELS, buffers[0].device.type, buffers).run(buffers, beam_idx)


def can_move(buffers: Sequence[Tensor]) -> bool:
    """Whether the kernel can read these buffers, and nobody notes what is called."""
    for states in buffers:
        if not states.is_cpu or states.stride(4) != 1 or states.stride(3) != states.shape[4]:
            return False
    return not torch._C._len_torch_dispatch_stack()


def _move(buffers: Sequence[Tensor], beam_idx: Tensor) -> None:
    source, count = beam_idx.to("cpu", torch.int64).contiguous(), buffers[0].shape[1]
    if source.shape != (count,) or not bool(((source >= 0) & (source < count)).all()):
        raise IndexError(f"beam_idx is {beam_idx.tolist()}, of {count} rows")
    function = x86.function("move_rows", torch.float32, _ARGUMENTS)  # of any type
    for states in buffers:
        (layers, rows, heads, length, width), size = states.shape, states.itemsize
        of_layer, of_row, of_head, *_ = states.stride()
        strides = (ctypes.c_int64 * 3)(of_layer * size, of_row * size, of_head * size)
        threads = x86.threads_for(states.nbytes, MIN_BYTES_OF_THREAD)
        function(states.data_ptr(), source.data_ptr(), strides, layers, rows, heads, length * width * size, threads)


def _move_in_torch(buffers: Sequence[Tensor], beam_idx: Tensor) -> None:
    beam_idx = beam_idx.to(buffers[0].device)
    for states in buffers:
        states.copy_(states.index_select(1, beam_idx))


KERNELS = (Kernel("C++", x86.machine_reasons, _move, "cpu", can_move), Kernel("torch", list, _move_in_torch))
