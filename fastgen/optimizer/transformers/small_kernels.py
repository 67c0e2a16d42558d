"""Forwards of modules on a GPU that call Liger-Kernel's kernels, see fastgen/ops/liger.py.

No name of a class is trusted. A class of modules gets such a forward by what its code says, and if for random inputs
Liger's numbers are those of its own forward, up to rounding. They are compared once for each dtype, and again for
modules with other settings.

    norms         a weight and an epsilon, and nothing else
    gates         code that names nothing but `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, with SiLU
    attention     code that calls Llama's `apply_rotary_pos_emb`: it runs with Liger's function instead

Tests: tests/optimizer/transformers/test_small_kernels.py
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from fastgen.ops import liger
from fastgen.ops.kernel import tolerance
from fastgen.ops.tracing import is_watched
from fastgen.optimizer import trust
from fastgen.optimizer.decoding.call import GenerateCall, count
from fastgen.optimizer.decoding.faster_forwards import FasterForward, Forward, Whole

logger = logging.getLogger("fastgen")

DEVICE = "cuda"

NORM, ROTARY, GATE = "RMS norm, Liger", "rotary positions, Liger", "SiLU gate, Liger"

_ROTARY, _ROTATE = "apply_rotary_pos_emb", "rotate_half"
_OF_GATE = ("gate_proj", "up_proj", "down_proj", "act_fn")

Build: TypeAlias = Callable[[], Forward | Whole]
Settings: TypeAlias = tuple[torch.dtype, frozenset[Any]]

# For each class of modules and their settings: what builds the forward; None: the class keeps its own.
_compared: WeakKeyDictionary[type[nn.Module], dict[Settings, Build | None]] = WeakKeyDictionary()


def forwards_on_gpu(modules: Iterable[nn.Module]) -> dict[type[nn.Module], Forward | Whole]:
    """Returns the forwards of these modules, which are on a GPU where Liger's kernels run, by their class."""
    forwards: dict[type[nn.Module], Forward | Whole] = {}
    variants_of: defaultdict[type[nn.Module], dict[Settings, tuple[Any, nn.Module, Tensor]]] = defaultdict(dict)
    for module in modules:
        compare = next((compare for is_one, compare in _KINDS if is_one(module)), None)
        if compare is not None and (weight := next(module.parameters(), None)) is not None:
            settings = weight.dtype, _plain_settings(module)
            variants_of[type(module)].setdefault(settings, (compare, module, weight))
    for kind, variants in variants_of.items():
        if len(variants) == 1:
            ((settings, variant),) = variants.items()
            compared = _compared.setdefault(kind, {})
            if settings not in compared:
                compared[settings] = _compare(*variant)
            if (build := compared[settings]) is not None:
                forwards[kind] = build()
    return forwards


def _plain_settings(module: nn.Module) -> frozenset[Any]:
    """Returns the numbers, flags and texts among a module's attributes, on which its code may depend."""
    values = ((name, value) for name, value in vars(module).items() if type(value) in (bool, int, float, str))
    return frozenset((name, value) for name, value in values if name not in ("training", "layer_idx"))


def _compare(compare: Callable[..., Build | None], module: nn.Module, weight: Tensor) -> Build | None:
    try:
        with torch.no_grad():
            return compare(module, partial(_random, weight)) if weight.dtype in liger.DTYPES else None
    except Exception as error:  # the forward has other arguments, or Triton cannot compile
        logger.info("Liger's kernels are not used for %s: %r", type(module).__name__, error)
        return None


def _random(weight: Tensor, *shape: int) -> Tensor:
    """Returns random numbers of a weight's dtype and device; the program's random numbers stay as they were."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu").to(weight)


def _difference(numbers: Tensor, expected: Tensor) -> float:
    return float((numbers - expected).abs().max() / expected.abs().max())


def _are_close(numbers: Tensor, expected: Tensor) -> bool:
    return numbers.shape == expected.shape and _difference(numbers, expected) <= tolerance("product", expected.dtype)


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
    of_liger = {norm: liger.rms_norm(rows, module.weight, _epsilon_of(module), *norm) for norm in liger.NORMS}
    offset, rounds = min(liger.NORMS, key=lambda norm: _difference(of_liger[norm], expected))
    is_close = _are_close(of_liger[offset, rounds], expected)
    return (lambda: partial(_normalized, offset=offset, rounds=rounds)) if is_close else None


def _normalized(forward: FasterForward, rows: Tensor, call: GenerateCall, offset: float, rounds: str) -> Tensor | None:
    weight = forward.module._parameters.get("weight")  # some modules of a class have none
    if weight is None or not _can_run(rows, weight.dtype):
        return None
    call.report.kernels[NORM] += 1
    return liger.rms_norm(rows, weight, _epsilon_of(forward.module), offset, rounds)


# Gates.


def _is_gate(module: nn.Module) -> bool:
    if module._parameters or module._buffers or module._modules.keys() != {*_OF_GATE}:
        return False
    *projections, activation = map(module._modules.get, _OF_GATE)
    is_plain = all(type(getattr(projection, "weight", None)) is nn.Parameter for projection in projections)
    names = getattr(getattr(type(module).forward, "__code__", None), "co_names", ("",))
    return is_plain and isinstance(activation, (nn.SiLU, SiLUActivation)) and {*names} == {*_OF_GATE}


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
    return is_plain and _ROTARY in forward.__code__.co_names


def _compared_attention(module: Any, random: Callable[..., Tensor]) -> Build | None:
    forward = type(module).forward
    rotary = forward.__globals__.get(_ROTARY)
    width = getattr(module, "head_dim", None)
    if type(rotary) is not FunctionType or type(width) is not int or width % 2 or not _is_llamas(rotary):
        return None
    queries, keys, angles = random(2, 4, 3, width), random(2, 2, 3, width), random(2, 3, width // 2)
    angles = torch.cat([angles, angles], dim=-1)
    expected = rotary(queries, keys, angles.cos(), angles.sin())
    turned = liger.rotated(queries.clone(), keys.clone(), angles.cos(), angles.sin())
    return partial(_turning, forward, rotary) if all(map(_are_close, turned, expected)) else None


def _is_llamas(rotary: Any) -> bool:
    """Whether this function has the source of Llama's. HunYuan-VL's, whose cosines have unequal halves, has another."""
    llama = import_module("transformers.models.llama.modeling_llama").__name__
    theirs, llamas = (
        [trust.hash_of(f"{module}:{name}") for name in (_ROTARY, _ROTATE)]
        for module in (getattr(rotary, "__module__", ""), llama)
    )
    return None not in llamas and theirs == llamas


def _turning(forward: FunctionType, rotary: Callable[..., Any]) -> Whole:
    """Returns an attention's forward that turns queries and keys in one launch; other threads keep the library's."""

    def turned(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor, *rest: Any, **options: Any) -> Any:
        parts = queries, keys, cosines, sines
        is_usual = not (rest or options) and queries.dim() == 4 and cosines.dim() == 3
        is_usual = is_usual and cosines.shape[0] in (1, len(queries)) and cosines.shape[1:] == queries.shape[2:]
        if not (is_usual and all(_can_run(part, queries.dtype) for part in parts)):
            return rotary(*parts, *rest, **options)
        count(ROTARY)
        return liger.rotated(*parts)

    names = {**forward.__globals__}
    if names.get(_ROTARY) is rotary:
        names[_ROTARY] = turned
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__

    def attend(call: GenerateCall, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (forward if is_watched() else copied)(module, *args, **kwargs)

    return Whole(attend)


_KINDS = ((_is_norm, _compared_norm), (_is_gate, _compared_gate), (_is_attention, _compared_attention))
