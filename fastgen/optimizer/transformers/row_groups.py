"""Groups of consecutive equal rows in a prefill's arguments: of beams, of samples, or repeated by the caller.

Tests: tests/optimizer/transformers/test_repeated_rows.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput

from fastgen.optimizer.decoding.report import COMPACTION, PREFILL, Reason, check
from fastgen.optimizer.transformers.compat import UNREAD_ARGUMENTS

# Arguments whose rows belong to images, videos or sounds in a prompt, not to the rows of the prompt.
MULTIMODAL = re.compile("pixel|image|video|audio|mm_|input_features|input_values|vision|speech")

# The type of each token of the prompt, text or image: `[rows, length]`.
OF_THE_PROMPT = ("mm_token_type_ids",)

# Arguments that have one position, not one row, per element.
WITHOUT_ROWS = ("cache_position",)

# The images and videos of a prompt, encoded before the prefill; models/images.py reduces them.
IMAGES = "mm_encoder_outputs"

# The argument that stop strings need. The library passes it on to the forward, which has no use for it.
TOKENIZER = "tokenizer"

# Arguments of these types have no rows.
_PLAIN = (bool, int, float, str, Cache, torch.dtype, torch.device)


class RowGroups:
    """Groups of consecutive equal rows; sizes: the number of rows in each group.

    rows_per_input: the greatest common divisor of the sizes: 8 for groups of 16 and 8 rows, 1 for 5 and 3. are_inputs:
    whether all sizes are equal, so that each group is an input. are_equal: whether the rows were compared. firsts: the
    first row of each group, int64 `[groups]`. group_of_row: the group of each row, int64 `[rows]`.
    """

    def __init__(self, sizes: Sequence[int], are_equal: bool = False) -> None:
        self.sizes, self.are_equal = sizes, are_equal
        self.rows, self.rows_per_input = sum(sizes), math.gcd(*sizes) or 1  # 1 for an empty batch
        self.inputs = self.rows // self.rows_per_input
        self.are_inputs = len(sizes) == self.inputs

    @cached_property  # created on demand: most calls have one row per input
    def firsts(self) -> Tensor:
        sizes = torch.tensor(self.sizes, device="cpu")
        return sizes.cumsum(0) - sizes

    @cached_property
    def group_of_row(self) -> Tensor:
        sizes = torch.tensor(self.sizes, device="cpu")
        return torch.arange(len(self), device="cpu").repeat_interleave(sizes)

    def __len__(self) -> int:
        return len(self.sizes)


@check(PREFILL, COMPACTION)
def unsupported_reasons(model_type: str, arguments: dict[str, Any], rows: int) -> list[Reason]:
    """Returns why rows of these arguments cannot be left out; empty if they can."""
    reasons = []
    unread = UNREAD_ARGUMENTS.get(model_type, ())
    for name, value in _leaves(arguments):
        if name in unread or name in (IMAGES, TOKENIZER) or value is None or isinstance(value, _PLAIN):
            continue
        if name not in OF_THE_PROMPT and MULTIMODAL.search(name):
            reasons.append(Reason("ARGUMENT_ROWS", f"argument {name}: its rows are not those of the prompt"))
        elif isinstance(value, Tensor):
            if name not in WITHOUT_ROWS and value.dim() and _row_dim(name, value, rows) is None:
                text = f"argument {name} of shape {tuple(value.shape)} does not have {rows} rows"
                reasons.append(Reason("ARGUMENT_ROWS", text))
        elif not (isinstance(value, tuple) and name.startswith("encoder_outputs.")):
            # hidden states or attentions of the encoder, which the library does not repeat
            reasons.append(Reason("ARGUMENT_TYPE", f"argument {name} is a {type(value).__name__}"))
    return reasons


def take(arguments: Mapping[str, Any], rows: int, indices: Tensor) -> dict[str, Any]:
    """Returns the arguments with only these rows (int64); images are not reduced, because decode steps ignore them."""
    return {name: _taken(name, value, rows, indices) for name, value in arguments.items()}


def repeat(arguments: Mapping[str, Any], groups: RowGroups) -> dict[str, Any]:
    """Expands arguments or outputs of one row per group to all rows."""
    return {name: _taken(name, value, len(groups), groups.group_of_row) for name, value in arguments.items()}


def _taken(name: str, value: Any, rows: int, indices: Tensor) -> Any:
    if isinstance(value, ModelOutput):
        return type(value)(**take(value, rows, indices))
    if isinstance(value, tuple):
        return tuple(_taken(name, part, rows, indices) for part in value)
    dim = _row_dim(name, value, rows) if isinstance(value, Tensor) else None
    return value if dim is None else value.index_select(dim, indices.to(value.device))


def groups_are_equal_sync(arguments: dict[str, Any], groups: RowGroups) -> bool:
    """Whether the rows of each group have the same values in all arguments. Reads the device."""
    equal = _equal_to_row_before_sync(arguments, groups.rows)
    equal[groups.firsts[1:] - 1] = True
    return bool(equal.all())


def repetitions_sync(arguments: dict[str, Any], rows: int) -> RowGroups:
    """Returns the groups of adjacent equal rows. Reads the device."""
    changes = (~_equal_to_row_before_sync(arguments, rows)).nonzero().flatten() + 1
    starts = [0, *changes.tolist()]
    return RowGroups([end - start for start, end in zip(starts, [*starts[1:], rows])], are_equal=True)


def _equal_to_row_before_sync(arguments: dict[str, Any], rows: int) -> Tensor:
    """Returns for each row but the first whether it equals the previous row, bool `[rows - 1]`."""
    equal = torch.ones(rows - 1, dtype=torch.bool, device="cpu")
    tensors = [(value.numel(), name, value) for name, value in _leaves(arguments) if isinstance(value, Tensor)]
    for count, name, value in sorted(tensors, key=itemgetter(0)):
        dim = _row_dim(name, value, rows)
        if dim is not None and count and equal.any():
            flat = value.movedim(dim, 0).reshape(rows, -1)
            equal &= (flat[1:] == flat[:-1]).all(dim=1).cpu()
    return equal


def _leaves(arguments: Mapping[str, Any], within: str = "") -> list[tuple[str, Any]]:
    """Returns names and values of arguments; a model's outputs are replaced by their parts, as `NAME.PART`."""
    leaves = []
    for name, value in arguments.items():
        leaves += _leaves(value, f"{within}{name}.") if isinstance(value, ModelOutput) else [(within + name, value)]
    return leaves


def _row_dim(name: str, value: Tensor, rows: int) -> int | None:
    """Returns the dimension of the rows, or None; multimodal position_ids are `[axes, rows, length]`."""
    if name in WITHOUT_ROWS or not value.dim():
        return None
    dim = 1 if name == "position_ids" and value.dim() == 3 else 0
    return dim if value.shape[dim] == rows else None
