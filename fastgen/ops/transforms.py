"""Whether somebody records or transforms what torch computes: then an operation of another name is not the same."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Inside torch.func, forward-mode AD, torch.jit.trace or a dispatch mode of this thread.

    Raises AttributeError where this version of torch does not tell.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )
