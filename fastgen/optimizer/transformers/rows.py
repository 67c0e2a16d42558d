"""The arguments of a prefill, seen as rows: row `b * fan_out + m` is the m-th beam or sample of input b."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput

# Arguments whose rows belong to images, videos or sounds in a prompt and not to the prompt's own rows.
MULTIMODAL_WORDS = ("pixel", "image", "video", "audio", "mm_", "input_features", "input_values", "vision", "speech")

# Arguments that have one position, not one row, per element.
WITHOUT_ROWS = ("cache_position",)


def unsupported_reasons(arguments: dict[str, Any], rows: int) -> list[str]:
    """Why these arguments cannot be reduced to one row per input; empty if they can."""
    return [reason for name, value in arguments.items() for reason in _reasons(name, value, rows)]


def one_per_input(arguments: dict[str, Any], rows: int, fan_out: int) -> dict[str, Any]:
    """The same arguments with the first row of each input only."""

    def reduce(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            dim = _row_dim(name, value, rows)
            first = torch.arange(0, rows, fan_out, device=value.device)
            return value if dim is None else value.index_select(dim, first)
        if isinstance(value, ModelOutput):
            return type(value)(**{key: reduce(f"{name}.{key}", part) for key, part in value.items()})
        return value

    return {name: reduce(name, value) for name, value in arguments.items()}


def repeat(name: str, value: Any, inputs: int, fan_out: int) -> Any:
    """A value of one row per input (a tensor, or tuples of tensors) with `fan_out` rows per input."""
    if isinstance(value, tuple):
        return tuple(repeat(name, part, inputs, fan_out) for part in value)
    dim = _row_dim(name, value, inputs) if isinstance(value, Tensor) else None
    return value if dim is None else value.repeat_interleave(fan_out, dim=dim)


def groups_are_equal_sync(arguments: dict[str, Any], rows: int, fan_out: int) -> bool:
    """Whether the rows of each input hold the same values in all arguments. Reads one flag per device."""
    equal: dict[torch.device, Tensor] = {}
    for name, value in _tensors(arguments):
        dim = _row_dim(name, value, rows)
        if dim is not None:
            grouped = value.movedim(dim, 0).unflatten(0, (-1, fan_out))  # [B, M, …]
            flag = (grouped == grouped[:, :1]).all()
            equal[value.device] = flag & equal[value.device] if value.device in equal else flag
    return all(bool(flag) for flag in equal.values())


def _tensors(arguments: dict[str, Any]) -> list[tuple[str, Tensor]]:
    found = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, ModelOutput):
            found += _tensors({f"{name}.{key}": part for key, part in value.items()})
    return found


def _row_dim(name: str, value: Tensor, rows: int) -> int | None:
    """The dimension that holds the rows, or None; multimodal position_ids have theirs second."""
    if name in WITHOUT_ROWS or not value.dim():
        return None
    if value.shape[0] == rows:
        return 0
    return 1 if name == "position_ids" and value.dim() == 3 and value.shape[1] == rows else None


def _reasons(name: str, value: Any, rows: int) -> list[str]:
    if value is None or isinstance(value, (bool, int, float, str, Cache, torch.dtype, torch.device)):
        return []
    if any(word in name for word in MULTIMODAL_WORDS):
        return [f"argument {name}: its rows are not those of the prompt"]
    if isinstance(value, Tensor):
        if name in WITHOUT_ROWS or not value.dim() or _row_dim(name, value, rows) is not None:
            return []
        return [f"argument {name} of shape {tuple(value.shape)} does not have {rows} rows"]
    if isinstance(value, ModelOutput):
        return [reason for key, part in value.items() for reason in _reasons(f"{name}.{key}", part, rows)]
    if isinstance(value, tuple) and name.startswith("encoder_outputs."):
        return []  # the encoder's hidden states or attentions, which the library does not repeat
    return [f"argument {name} is a {type(value).__name__}"]
