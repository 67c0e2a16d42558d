"""The plain weight of a layer with weight norm: folded once, and kept as long as what it was made of is unchanged.

No module is changed: `state_dict`, training, `remove_weight_norm`, copies and files are the library's.

Tests: tests/optimizer/vocoder/test_weight_norm.py
"""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from fastgen.config import CONFIG

WEIGHT = "weight"


class Norm(NamedTuple):
    """What a weight is made of, and the dimension for which lengths are taken, as in `torch._weight_norm`."""

    direction: Tensor
    length: Tensor
    dim: int


class _Folded(NamedTuple):
    """A plain weight, and what tells whether it is right: nobody wrote in it, and it is made of the same numbers."""

    weight: Tensor
    version: int
    state: tuple
    checksum: Tensor | None


# By the bytes of a number.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_LOCK = threading.Lock()
_known: WeakKeyDictionary[nn.Module, _Folded] = WeakKeyDictionary()


def norm_of(layer: nn.Module) -> Norm | None:
    """The weight norm of a layer, put on by `torch.nn.utils.weight_norm` or by `parametrizations.weight_norm`."""
    for hook in layer._forward_pre_hooks.values():
        if type(hook) is WeightNorm and hook.name == WEIGHT:
            return Norm(layer.weight_v, layer.weight_g, hook.dim)
    if "parametrizations" in layer._modules and WEIGHT in layer.parametrizations:
        originals = layer.parametrizations[WEIGHT]
        if len(originals) == 1 and type(originals[0]) is _WeightNorm:
            return Norm(originals.original1, originals.original0, originals[0].dim)
    return None


def sources_of(layer: nn.Module) -> tuple[Tensor, ...]:
    """The parameters that its weight is made of."""
    norm = norm_of(layer)
    return (layer.weight,) if norm is None else (norm.direction, norm.length)


def plain_weight(layer: nn.Module) -> Tensor:
    """The weight that a forward of this layer would use, without gradients; of the shape and type of its parameter."""
    norm = norm_of(layer)
    if norm is None:
        return layer.weight.detach()
    if not CONFIG.pack or norm.direction.is_inference() or norm.length.is_inference():
        return _fold(norm)
    tensors = [(t.data_ptr(), t._version, t.shape, t.stride(), t.dtype, t.device) for t in sources_of(layer)]
    state, checksum = (norm.dim, *tensors), _checksum(norm)
    known = _known.get(layer)
    if known is None or not _is_right(known, state, checksum):
        weight = _fold(norm)
        known = _Folded(weight, weight._version, state, checksum)
        with _LOCK:
            _known[layer] = known
    if WEIGHT in vars(layer):  # where the hook would have put it, so that the module can be copied
        layer.weight = known.weight
    return known.weight


def _fold(norm: Norm) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch._weight_norm(norm.direction.detach(), norm.length.detach(), norm.dim)


def _checksum(norm: Norm) -> Tensor | None:
    """Of the bits, on a CPU: tells of numbers that were written through `.data`, of which a state does not tell.

    Each row's sum of integers, modulo 2 to their bits, with odd factors: any other number gives another sum.
    """
    if not norm.direction.is_cpu:
        return None
    integers = INTEGERS[norm.direction.itemsize]
    bits, limits = norm.direction.detach().flatten(1).view(integers), torch.iinfo(integers)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(limits.min, limits.max, bits.shape[1:], generator=generator, dtype=integers) | 1
    return torch.cat([torch.mv(bits, factors), norm.length.detach().flatten().view(integers)])


def _is_right(known: _Folded, state: tuple, checksum: Tensor | None) -> bool:
    if (known.weight._version, known.state) != (known.version, state):
        return False
    return checksum is None or (known.checksum is not None and torch.equal(known.checksum, checksum))
