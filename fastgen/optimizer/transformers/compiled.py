"""Compiled models are left alone: their graphs were made for the library's caches."""

from __future__ import annotations

from torch import nn


def reasons(model: nn.Module) -> list[str]:
    """How the model is compiled, by `model.compile()` or `torch.compile(model.forward)`; empty if it is not."""
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        return ["the model is compiled"]
    if hasattr(model.forward, "_torchdynamo_orig_callable"):
        return ["the model's forward is compiled"]
    return []
