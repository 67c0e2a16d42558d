"""Forwards of modules on a GPU that call Liger-Kernel's kernels, see fastgen/ops/liger.py.

A class of modules gets such a forward if its own one gives the same numbers for random ones, except for rounding. The
two are compared once for each dtype, before the first call that uses the class: no name of a class is trusted.

    norms         a weight and an epsilon, and nothing else
    gates         `down_proj(act_fn(gate_proj(x)) * up_proj(x))` with SiLU
    attention     code that calls `apply_rotary_pos_emb`: it runs with Liger's function instead

Tests: tests/optimizer/transformers/test_small_kernels.py
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from fastgen.ops import liger
from fastgen.ops.kernel import tolerance
from fastgen.optimizer.decoding.call import GenerateCall, count
from fastgen.optimizer.decoding.faster_forwards import FasterForward, Forward, Whole

logger = logging.getLogger("fastgen")

DEVICE = "cuda"

NORM, ROTARY, GATE = "RMS norm, Liger", "rotary positions, Liger", "SiLU gate, Liger"

_FUNCTION = "apply_rotary_pos_emb"
_OF_GATE = ("gate_proj", "up_proj", "down_proj", "act_fn")

Build: TypeAlias = Callable[[], Forward | Whole]

# For each class of modules and dtype: what builds the forward; None: the class keeps its own.
_compared: WeakKeyDictionary[type[nn.Module], dict[torch.dtype, Build | None]] = WeakKeyDictionary()


def forwards_on_gpu(modules: Iterable[nn.Module]) -> dict[type[nn.Module], Forward | Whole]:
    """Returns the forwards of these modules, which are on a GPU, by their class."""
    forwards: dict[type[nn.Module], Forward | Whole] = {}
    if liger.unsupported_reasons():
        return forwards
    for kind, module in {type(module): module for module in modules}.items():
        compare = next((compare for is_one, compare in _KINDS if is_one(module)), None)
        weight = next(module.parameters(), None)
        if compare is None or weight is None or weight.dtype not in liger.DTYPES:
            continue
        compared = _compared.setdefault(kind, {})
        if weight.dtype not in compared:
            compared[weight.dtype] = None
            try:
                with torch.no_grad():
                    compared[weight.dtype] = compare(module, partial(_random, weight))
            except Exception as error:  # the forward has other arguments, or Triton cannot compile
                logger.info("Liger's kernels are not used for %s: %r", kind.__name__, error)
        if (build := compared[weight.dtype]) is not None:
            forwards[kind] = build()
    return forwards


def _random(weight: Tensor, *shape: int) -> Tensor:
    """Returns random numbers of a weight's dtype and device; the program's random numbers stay as they were."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu").to(weight)


def _are_close(numbers: Tensor, expected: Tensor) -> bool:
    difference = (numbers - expected).abs().max() / expected.abs().max()
    return numbers.shape == expected.shape and bool(difference <= tolerance("product", expected.dtype))


def _can_run(tensor: Any, dtype: torch.dtype) -> bool:
    is_plain = type(tensor) is Tensor and tensor.dtype == dtype and tensor.device.type == DEVICE
    return is_plain and not torch.is_grad_enabled()


# Norms.


def _epsilon_of(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_norm(module: nn.Module) -> bool:
    has_weight = [*module._parameters] == ["weight"] and module._parameters["weight"] is not None
    return has_weight and not module._modules and not module._buffers and type(_epsilon_of(module)) is float


def _compared_norm(module: Any, random: Callable[..., Tensor]) -> Build | None:
    module = copy.copy(module)
    width = len(module.weight)
    module._parameters = {"weight": nn.Parameter(random(width), requires_grad=False)}
    rows = 2 * random(3, width)
    expected = type(module).forward(module, rows)
    for offset, rounds in liger.NORMS:
        if _are_close(liger.rms_norm(rows, module.weight, _epsilon_of(module), offset, rounds), expected):
            return lambda: partial(_normalized, offset=offset, rounds=rounds)
    return None


def _normalized(forward: FasterForward, rows: Tensor, call: GenerateCall, offset: float, rounds: str) -> Tensor | None:
    module = forward.module
    if not _can_run(rows, module.weight.dtype):
        return None
    call.report.kernels[NORM] += 1
    return liger.rms_norm(rows, module.weight, _epsilon_of(module), offset, rounds)


# Gates.


def _is_gate(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in _OF_GATE]
    is_gate = len(module._modules) == len(_OF_GATE) and None not in parts
    return is_gate and isinstance(parts[3], (nn.SiLU, SiLUActivation))


def _compared_gate(module: Any, random: Callable[..., Tensor]) -> Build | None:
    width = getattr(module.gate_proj, "in_features", 0)
    rows = random(3, width)
    expected = type(module).forward(module, rows)
    return (lambda: _gated) if width and _are_close(_gate_of(module, rows), expected) else None


def _gate_of(module: Any, rows: Tensor) -> Tensor:
    output: Tensor = module.down_proj(liger.gated(module.gate_proj(rows), module.up_proj(rows)))
    return output


def _gated(forward: FasterForward, rows: Tensor, call: GenerateCall) -> Tensor | None:
    if not _can_run(rows, rows.dtype) or rows.dtype not in liger.DTYPES:
        return None
    call.report.kernels[GATE] += 1
    return _gate_of(forward.module, rows)


# Attention.


def _is_attention(module: nn.Module) -> bool:
    forward = type(module).forward
    is_plain = type(forward) is FunctionType and not hasattr(forward, "__wrapped__")
    return is_plain and _FUNCTION in forward.__code__.co_names


def _compared_attention(module: Any, random: Callable[..., Tensor]) -> Build | None:
    forward = type(module).forward
    rotary = forward.__globals__.get(_FUNCTION)
    width = getattr(module, "head_dim", None)
    if type(rotary) is not FunctionType or type(width) is not int or width % 2:
        return None
    queries, keys, angles = random(2, 4, 3, width), random(2, 2, 3, width), random(2, 3, width // 2)
    angles = torch.cat([angles, angles], dim=-1)
    expected = rotary(queries, keys, angles.cos(), angles.sin())
    turned = liger.rotated(queries.clone(), keys.clone(), angles.cos(), angles.sin())
    return partial(_turning, forward, rotary) if all(map(_are_close, turned, expected)) else None


def _turning(forward: FunctionType, rotary: Callable[..., Any]) -> Whole:
    """Returns an attention's forward that turns queries and keys in one launch; other threads keep the library's."""

    def turned(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor, *rest: Any, **options: Any) -> Any:
        parts = queries, keys, cosines, sines
        is_usual = not (rest or options) and cosines.dim() == 3 and cosines.shape[-1] == queries.shape[-1]
        if not (is_usual and queries.dim() == 4 and all(_can_run(part, queries.dtype) for part in parts)):
            return rotary(*parts, *rest, **options)
        count(ROTARY)
        return liger.rotated(*parts)

    names = {**forward.__globals__}
    if names.get(_FUNCTION) is rotary:
        names[_FUNCTION] = turned
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return Whole(copied)


_KINDS = ((_is_norm, _compared_norm), (_is_gate, _compared_gate), (_is_attention, _compared_attention))
