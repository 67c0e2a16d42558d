"""Whether somebody watches, records or transforms what torch computes: then an operation of another name differs.

Tests: tests/optimizer/transformers/test_foreign_code.py
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from fastgen.ops.cpu_graph.trace import Tracer


def is_transformed() -> bool:
    """Inside torch.func, forward-mode AD, torch.jit.trace or a dispatch mode of this thread that is not fastgen's.

    Raises AttributeError where this version of torch does not tell.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or not all(
            isinstance(torch._C._get_dispatch_stack_at(index), Tracer)
            for index in range(torch._C._len_torch_dispatch_stack())
        )
    )


def is_watched() -> bool:
    """Whether a mode of the program would miss what it waits for, or keeps what nobody else is to have."""
    return any(
        not isinstance(torch._C._get_function_stack_at(index), DeviceContext)
        for index in range(torch._C._len_torch_function_stack())
    )
