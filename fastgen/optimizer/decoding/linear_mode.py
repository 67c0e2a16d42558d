"""Gives a model's large products to `cpu_linear`, without touching the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from fastgen.ops import cpu_linear
from fastgen.optimizer.decoding.gain import ModelSize


def for_models(sizes: Iterable[ModelSize], usages: list[Counter[str]]) -> AbstractContextManager:
    """A `FastLinear` where it pays for models of these sizes, whose counts it appends to `usages`; else nothing.

    It costs a microsecond for every call of torch.
    """
    if cpu_linear.machine_reasons() or not any(size.is_large for size in sizes):
        return nullcontext()
    usages.append(Counter())
    return FastLinear(usages[-1])


class FastLinear(TorchFunctionMode):
    """Inside this context, in this thread, `linear` and `addmm` are `cpu_linear` where that can multiply.

    usage: counts the products that went this way, under "cpu_linear".
    """

    def __init__(self, usage: Counter[str]) -> None:
        super().__init__()
        self.usage = usage

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if kwargs:
            return func(*args, **kwargs)
        if func is functional.linear and len(args) in (2, 3):
            product = (*args, None) if len(args) == 2 else args
        elif func is torch.addmm and len(args) == 3 and all(_is_matrix(matrix) for matrix in args[1:]):
            product = (args[1], args[2].t(), args[0])
        else:
            return func(*args)
        if torch.compiler.is_compiling() or not cpu_linear.can_multiply(*product) or is_watched():
            return func(*args)
        self.usage["cpu_linear"] += 1
        return cpu_linear.cpu_linear(*product)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.layout == torch.strided


def is_watched() -> bool:
    """Whether a mode of the program would miss what it waits for, or keeps what nobody else is to have."""
    return any(
        not isinstance(torch._C._get_function_stack_at(index), (FastLinear, DeviceContext))
        for index in range(torch._C._len_torch_function_stack())
    )
