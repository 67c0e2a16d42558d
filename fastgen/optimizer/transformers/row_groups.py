"""Which consecutive rows of a prefill's arguments are equal: those of beams, of samples, or repeated by the caller.

Tests: tests/optimizer/transformers/test_row_groups.py, tests/optimizer/transformers/test_repeated_rows.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput

from fastgen.optimizer.decoding.report import Reason

# Arguments whose rows belong to images, videos or sounds in a prompt and not to the prompt's own rows.
MULTIMODAL_WORDS = ("pixel", "image", "video", "audio", "mm_", "input_features", "input_values", "vision", "speech")

# What each token of the prompt is, text or image: `[rows, length]`.
OF_THE_PROMPT = ("mm_token_type_ids",)

# Arguments that have one position, not one row, per element.
WITHOUT_ROWS = ("cache_position",)

# What the library has encoded of a prompt's images and videos before the prefill; models/images.py reduces it.
IMAGES = "mm_encoder_outputs"

# Arguments that a model takes and does not read while it decodes. Whisper's generate goes on with the mask of all
# recordings when some of them have ended, or are decoded again at another temperature.
UNREAD = {"whisper": ("attention_mask",)}


class RowGroups:
    """Rows that are equal, next to each other: `sizes` of the groups, one after the other.

    An input has as many rows (`rows_per_input`) as divide all groups: of groups of 16 and 8 rows, 8; of 5 and 3, one.
    firsts: the first row of each group, `[groups]`. of_rows, of_inputs: the group of each row and of each input, int64.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.rows, self.rows_per_input = sum(sizes), math.gcd(*sizes)
        self.inputs = self.rows // self.rows_per_input

    # Tensors when they are asked for: most calls have one row per input.

    @cached_property
    def firsts(self) -> Tensor:
        sizes = torch.tensor(self.sizes, device="cpu")
        return sizes.cumsum(0) - sizes

    @cached_property
    def of_rows(self) -> Tensor:
        sizes = torch.tensor(self.sizes, device="cpu")
        return torch.arange(len(self), device="cpu").repeat_interleave(sizes)

    @property
    def of_inputs(self) -> Tensor:
        return self.of_rows[:: self.rows_per_input]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def are_inputs(self) -> bool:
        """Whether all are of one size, so that each is an input."""
        return len(self) == self.inputs


def unsupported_reasons(model_type: str, arguments: dict[str, Any], rows: int) -> list[Reason]:
    """Why rows of these arguments cannot be left out; empty if they can."""
    unread = UNREAD.get(model_type, ())
    read = {name: value for name, value in arguments.items() if name not in unread}
    return [reason for name, value in read.items() for reason in _reasons(name, value, rows)]


def one_per_group(arguments: dict[str, Any], groups: RowGroups) -> dict[str, Any]:
    """The same arguments with the first row of each group only."""
    return take(arguments, groups.rows, groups.firsts)


def take(arguments: dict[str, Any], rows: int, kept: Tensor) -> dict[str, Any]:
    """The same arguments with these of their rows (int64) only; images stay, no decoding step looks at them."""

    def reduce(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            dim = _row_dim(name, value, rows)
            return value if dim is None else value.index_select(dim, kept.to(value.device))
        if isinstance(value, ModelOutput):
            return type(value)(**{key: reduce(f"{name}.{key}", part) for key, part in value.items()})
        return value

    return {name: reduce(name, value) for name, value in arguments.items()}


def repeat(name: str, value: Any, groups: RowGroups) -> Any:
    """A value of one row per group (a tensor, or tuples of tensors) with all rows of each group."""
    if isinstance(value, tuple):
        return tuple(repeat(name, part, groups) for part in value)
    dim = _row_dim(name, value, len(groups)) if isinstance(value, Tensor) else None
    return value if dim is None else value.index_select(dim, groups.of_rows.to(value.device))


def groups_are_equal_sync(arguments: dict[str, Any], groups: RowGroups) -> bool:
    """Whether the rows of each group hold the same values in all arguments. Reads the device."""
    equal = _equal_to_row_before_sync(arguments, groups.rows)
    firsts = set(groups.firsts.tolist())
    return all(equal[row] for row in range(groups.rows) if row not in firsts)


def repetitions_sync(arguments: dict[str, Any], rows: int) -> RowGroups:
    """Equal rows that stand next to each other. Reads the device."""
    equal = _equal_to_row_before_sync(arguments, rows)
    starts = [row for row in range(rows) if not equal[row]]
    return RowGroups([end - start for start, end in zip(starts, [*starts[1:], rows])])


def _equal_to_row_before_sync(arguments: dict[str, Any], rows: int) -> list[bool]:
    """For each row whether all its values are those of the row before; the first row has none before it."""
    equal = [False] + [True] * (rows - 1)
    for name, value in sorted(_tensors(arguments), key=lambda item: item[1].numel()):
        dim = _row_dim(name, value, rows)
        if dim is not None and value.numel() and any(equal):
            flat = value.movedim(dim, 0).flatten(1) if value.dim() > 1 else value.unsqueeze(1)  # [rows, …]
            same = (flat[1:] == flat[:-1]).all(dim=1).tolist()
            equal[1:] = [before and now for before, now in zip(equal[1:], same)]
    return equal


def _tensors(arguments: dict[str, Any]) -> list[tuple[str, Tensor]]:
    found = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, ModelOutput):
            found += _tensors({f"{name}.{key}": part for key, part in value.items()})
    return found


def _row_dim(name: str, value: Tensor, rows: int) -> int | None:
    """The dimension that holds the rows, or None; multimodal position_ids are `[axes, rows, length]`."""
    if name in WITHOUT_ROWS or not value.dim():
        return None
    dim = 1 if name == "position_ids" and value.dim() == 3 else 0
    return dim if value.shape[dim] == rows else None


def _reasons(name: str, value: Any, rows: int) -> list[Reason]:
    if name == IMAGES or value is None or isinstance(value, (bool, int, float, str, Cache, torch.dtype, torch.device)):
        return []
    if name not in OF_THE_PROMPT and any(word in name for word in MULTIMODAL_WORDS):
        return [Reason("ARGUMENT_ROWS", f"argument {name}: its rows are not those of the prompt")]
    if isinstance(value, Tensor):
        if name in WITHOUT_ROWS or not value.dim() or _row_dim(name, value, rows) is not None:
            return []
        return [Reason("ARGUMENT_ROWS", f"argument {name} of shape {tuple(value.shape)} does not have {rows} rows")]
    if isinstance(value, ModelOutput):
        return [reason for key, part in value.items() for reason in _reasons(f"{name}.{key}", part, rows)]
    if isinstance(value, tuple) and name.startswith("encoder_outputs."):
        return []  # the encoder's hidden states or attentions, which the library does not repeat
    return [Reason("ARGUMENT_TYPE", f"argument {name} is a {type(value).__name__}")]
