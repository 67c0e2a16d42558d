"""Arguments of a decode step for keys with padding before them: so a recording serves other lengths of the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

MASK, ENCODED = "attention_mask", "encoder_outputs"


def can_be_padded(inputs: dict[str, Any], is_cross: bool) -> bool:
    """Whether masks among these arguments of a forward can hide the padding.

    is_cross: it is in the keys of the cross-attention, whose mask `[rows, length]` the model makes larger. Otherwise
    the masks have to be those of the attention, `[rows, 1, 1, length]`, one for all layers or one for each kind.
    """
    masks, wanted = tree_leaves(inputs.get(MASK)), 2 if is_cross else 4
    fits = bool(masks) and all(isinstance(mask, Tensor) and mask.dim() == wanted for mask in masks)
    if not fits or not is_cross:
        return fits
    encoded = inputs.get(ENCODED)  # of sound, a mask may count the frames before the encoder joined some
    return encoded is not None and masks[0].shape[1] == encoded[0].shape[1]


class Padding:
    """Pads the arguments of each step of a call; those that stay the same are padded once."""

    def __init__(self, is_cross: bool) -> None:
        self.is_cross = is_cross
        self._padded: dict[str, tuple[Any, int, Any]] = {}  # by name: what was given, the padding, and what it gave

    def of(self, inputs: dict[str, Any], padding: int) -> dict[str, Any]:
        """These arguments of a forward, with so many hidden positions before the first one."""
        if not padding:
            return inputs
        if not self.is_cross:
            masks = tree_map_only(Tensor, lambda mask: _hidden_before(mask, padding), inputs[MASK])
            return {**inputs, MASK: masks}
        return {**inputs, **{name: self._once(name, inputs[name], padding) for name in (MASK, ENCODED)}}

    def _once(self, name: str, given: Any, padding: int) -> Any:
        known, of, padded = self._padded.get(name, (None, 0, None))
        if known is not given or of != padding:
            pad = _hidden_before if name == MASK else _zeros_before
            padded = tree_map_only(Tensor, lambda tensor: pad(tensor, padding), given)
            self._padded[name] = given, padding, padded
        return padded


def _hidden_before(mask: Tensor, padding: int) -> Tensor:
    """A mask `[…, length]` of bool or numbers (1 is seen), or of what is added to scores if it has four dimensions."""
    is_added = mask.dim() == 4 and mask.dtype != torch.bool
    return functional.pad(mask, (padding, 0), value=torch.finfo(mask.dtype).min if is_added else 0)


def _zeros_before(states: Tensor, padding: int) -> Tensor:
    """States of an encoder `[rows, length, width]`."""
    return functional.pad(states, (0, 0, padding, 0))
