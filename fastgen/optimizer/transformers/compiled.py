"""Compiled models are left alone: their graphs were made for the library's caches."""

from __future__ import annotations

import torch
from torch import nn


def reasons(model: nn.Module) -> list[str]:
    """What of the model is compiled, by `module.compile()` or `torch.compile` of it or its forward; else empty."""
    compiled = next((name for name, module in model.named_modules() if _is_compiled(module)), None)
    if compiled is None:
        return []
    return [f"module {compiled} is compiled" if compiled else "the model is compiled"]


def _is_compiled(module: nn.Module) -> bool:
    if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
        return True
    if isinstance(module, torch.jit.ScriptModule):  # its class has no forward to look at
        return False
    return hasattr(vars(module).get("forward", type(module).forward), "_torchdynamo_orig_callable")
