"""Gives a model's large products to `cpu_linear`, without touching the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from fastgen.ops import cpu_linear

MIN_ELEMENTS_PER_MODULE = 1 << 16


def for_models(models: Iterable[nn.Module | None], usages: list[Counter[str]]) -> AbstractContextManager:
    """A `FastLinear` where it pays for these models, whose counts it appends to `usages`; else nothing."""
    if cpu_linear.machine_reasons() or not _has_large_products([model for model in models if model is not None]):
        return nullcontext()
    usages.append(Counter())
    return FastLinear(usages[-1])


def _has_large_products(models: list[nn.Module]) -> bool:
    """Whether what `FastLinear` saves is more than it costs, which is a microsecond for every call of torch."""
    modules = sum(1 for model in models for _ in model.modules())
    weights = [weight for model in models for weight in model.parameters()]
    sizes = [weight.numel() for weight in weights if weight.is_cpu and weight.dtype == torch.float32]
    return sum(size for size in sizes if size >= cpu_linear.MIN_ELEMENTS) >= MIN_ELEMENTS_PER_MODULE * modules


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
