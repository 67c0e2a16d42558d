"""Rows of keys and values change places where they are, on a CPU: `csrc/move_rows.cpp`.

Only rows that change move, and only the positions that are filled. AMD EPYC (family 25, model 17), 2 threads, 12 layers
of 12 heads of 64, keys and values, ms, layer by layer with torch and this one: 16 rows, 16 positions in
bf16 1.9, 0.3; 4 rows, 31 positions in fp32 1.2, 0.3; 128 rows, 63 positions in fp32 67, 43.

Tests: tests/ops/test_move_rows.py
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fastgen.ops import x86

# Of fewer bytes threads would wait longer for each other than they work.
MIN_BYTES_OF_THREAD = 1 << 17

_ARGUMENTS = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4, ctypes.c_int32)


def move_rows(states: Tensor, beam_idx: Tensor) -> None:
    """Row i of states `[layers, rows, heads, length, width]` becomes what row `beam_idx[i]` (`[rows]`, ints) was.

    Raises IndexError where a number in beam_idx is not that of a row.
    """
    layers, rows, heads, length, width = states.shape
    is_packed = states.stride(4) == 1 and states.stride(3) == width
    if not states.is_cpu or not is_packed or torch._C._len_torch_dispatch_stack() or x86.machine_reasons():
        states.copy_(states.index_select(1, beam_idx.to(states.device)))
        return
    source = beam_idx.to("cpu", torch.int64).contiguous()
    if source.shape != (rows,) or not bool(((source >= 0) & (source < rows)).all()):
        raise IndexError(f"beam_idx is {beam_idx.tolist()}, of {rows} rows")
    strides = (ctypes.c_int64 * 3)(*(stride * states.itemsize for stride in states.stride()[:3]))
    nbytes = length * width * states.itemsize
    threads = min(torch.get_num_threads(), 1 + states.nbytes // MIN_BYTES_OF_THREAD)
    function = x86.function("move_rows", torch.float32, _ARGUMENTS)  # of any type
    function(states.data_ptr(), source.data_ptr(), strides, layers, rows, heads, nbytes, threads)
