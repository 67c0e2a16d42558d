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

MIN_BYTES_OF_THREAD = 1 << 17

_ARGUMENTS = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4, ctypes.c_int32)


def move_rows(buffers: Sequence[Tensor], beam_idx: Tensor) -> None:
    """Row i of each buffer `[layers, rows, heads, length, width]` becomes what row `beam_idx[i]` (`[rows]`, ints) was.

    Raises IndexError where a number in beam_idx is not that of a row.
    """
    if not all(map(_can_move, buffers)) or torch._C._len_torch_dispatch_stack() or x86.machine_reasons():
        beam_idx = beam_idx.to(buffers[0].device)
        for states in buffers:
            states.copy_(states.index_select(1, beam_idx))
        return
    source, count = beam_idx.to("cpu", torch.int64).contiguous(), buffers[0].shape[1]
    if source.shape != (count,) or not bool(((source >= 0) & (source < count)).all()):
        raise IndexError(f"beam_idx is {beam_idx.tolist()}, of {count} rows")
    function = x86.function("move_rows", torch.float32, _ARGUMENTS)  # of any type
    for states in buffers:
        layers, rows, heads, length, width = states.shape
        strides = (ctypes.c_int64 * 3)(*(stride * states.itemsize for stride in states.stride()[:3]))
        nbytes, threads = length * width * states.itemsize, x86.threads_for(states.nbytes, MIN_BYTES_OF_THREAD)
        function(states.data_ptr(), source.data_ptr(), strides, layers, rows, heads, nbytes, threads)


def _can_move(states: Tensor) -> bool:
    return states.is_cpu and states.stride(4) == 1 and states.stride(3) == states.shape[4]
