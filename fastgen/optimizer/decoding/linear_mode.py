"""Gives a model's large products to `cpu_linear`, without touching the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fastgen.ops.cpu_linear import can_multiply, cpu_linear


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
        if func is functional.linear:
            product = (*args, None) if len(args) == 2 else args
        elif func is torch.addmm and len(args) == 3:
            product = (args[1], args[2].t(), args[0])
        else:
            return func(*args)
        if not can_multiply(*product):
            return func(*args)
        self.usage["cpu_linear"] += 1
        return cpu_linear(*product)
