"""What is switched on inside a model and makes a forward of one row per input differ from one of all rows."""

from __future__ import annotations

from torch import nn

# Packages whose hooks care for no row: captured outputs, weight normalisation, pruning.
_KNOWN_HOOKS = ("transformers", "torch")


def unsupported_reasons(model: nn.Module) -> list[str]:
    """Why a forward of fewer rows would not give what one of all rows gives; empty if it does."""
    reasons = []
    modules = dict(model.named_modules())
    training = next((name for name, module in modules.items() if module.training), None)
    if training is not None:
        where = f"module {training}" if training else "the model"
        reasons.append(f"{where} is in training mode, where dropout differs from row to row")
    hook = next((found for module in modules.values() for found in _unknown_hooks(module)), None)
    if hook is not None:
        reasons.append(f"the model has a forward hook, which would see fewer rows: {hook}")
    return reasons


def _unknown_hooks(module: nn.Module) -> list[str]:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # inside a functools.partial
    names = [f"{getattr(f, '__module__', '?')}.{getattr(f, '__qualname__', type(f).__name__)}" for f in functions]
    return [name for name in names if name.partition(".")[0] not in _KNOWN_HOOKS]
