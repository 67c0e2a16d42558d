"""`NewGELUActivation.forward` (GPT-2, GPT-J, T5 v1.1, …): one pass over the tensor instead of eight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.optimizer import report


def new_gelu(original: Callable, self: Any, input: Tensor) -> Tensor:
    """The same formula as the original, fused by torch; inside `generate`, in fp32, where no gradient is recorded.

    In half precision the original rounds after each of its steps, which the fused one does not repeat.
    """
    plain = type(input) is Tensor and input.dtype == torch.float32 and not torch.is_grad_enabled()
    if plain and report.running() is not None and not torch.compiler.is_compiling():
        return functional.gelu(input, approximate="tanh")
    return original(self, input)
