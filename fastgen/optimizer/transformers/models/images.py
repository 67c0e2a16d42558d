"""Images and videos in prompts, as transformers has encoded them before the prefill.

In the order of rows, each feature fills a placeholder token (`_slice_mm_encoder_output` in the library, which prefills
in chunks). So the features of some rows, or of some columns, are selected by index.

Tests: tests/optimizer/transformers/test_multimodal.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from fastgen.optimizer.decoding.report import PREFILL, LeaveAlone, Reason, check
from fastgen.optimizer.transformers.row_groups import IMAGES, RowGroups


def _rows_sync(arguments: dict[str, Any], config: Any) -> dict[str, tuple[int, list[Tensor]]] | None:
    """Returns each modality's placeholder token and the feature indices of each row, int64; None if unknown."""
    rows = {}
    for modality, output in arguments[IMAGES].items():
        items = getattr(output, "pooler_output", None)
        token = getattr(config, f"{modality}_token_id", None)
        if items is None or token is None or arguments.get("inputs_embeds") is not None:
            return None
        counts = (arguments["input_ids"] == token).sum(-1).tolist()
        features = torch.arange(len(_flat(items)), device=items[0].device)
        if sum(counts) != len(features):
            return None
        rows[modality] = token, list(features.split(counts))
    return rows


def _flat(items: Any) -> Tensor:
    """Returns the features `[placeholders, width]` of a tensor or a list of images."""
    return torch.cat([item.reshape(-1, item.shape[-1]) for item in items])


def _chosen(output: ModelOutput, features: Tensor) -> ModelOutput:
    """Returns an output with one item, the features at these indices."""

    def choose(items: Any) -> Any:
        return _flat(items)[features][None] if isinstance(items, Tensor) else [_flat(items)[features]]

    changed = {"pooler_output": choose(output.pooler_output)}
    if (deep := getattr(output, "deepstack_features", None)) is not None:
        changed["deepstack_features"] = list(map(choose, deep))
    return type(output)(**{**output, **changed})


@check(PREFILL)
def of_first_rows_sync(arguments: dict[str, Any], config: Any, groups: RowGroups) -> dict[str, ModelOutput]:
    """Returns the images of each group's first row. Raises LeaveAlone if other rows of a group have different ones."""
    rows = _rows_sync(arguments, config)
    name = f"argument {IMAGES}"
    firsts = groups.firsts[groups.group_of_row].tolist()
    if rows is None:
        raise LeaveAlone([Reason("IMAGES", f"{name}: they are not known to be those of the prompt's rows")])
    outputs = {}
    for modality, (_, indices) in rows.items():
        output = arguments[IMAGES][modality]
        deep = getattr(output, "deepstack_features", None)
        if deep is not None and not isinstance(deep[0][0], Tensor):
            text = f"{name}: the features of its {modality}s are in the model's own order"
            raise LeaveAlone([Reason("IMAGES", text)])
        features = _flat(output.pooler_output)
        if not all(torch.equal(features[indices[first]], features[row]) for first, row in zip(firsts, indices)):
            text = f"{name}: equal rows of the prompt have different {modality}s"
            raise LeaveAlone([Reason("IMAGES_DIFFER", text)])
        outputs[modality] = _chosen(output, torch.cat([indices[first] for first in groups.firsts.tolist()]))
    return outputs


def can_split_sync(arguments: dict[str, Any], config: Any) -> bool:
    """Whether a prefix may be computed separately: not if image tokens see each other or enter later layers."""
    outputs = arguments[IMAGES].values()
    is_deep = any(getattr(output, "deepstack_features", None) is not None for output in outputs)
    return not is_deep and arguments.get("token_type_ids") is None and _rows_sync(arguments, config) is not None


def common_length_sync(arguments: dict[str, Any], config: Any, tokens: Tensor) -> int:
    """Returns how many of the common first tokens `[length]` also have the same features in all rows."""
    length = len(tokens)
    for modality, (token, rows) in (_rows_sync(arguments, config) or {}).items():
        positions = (tokens[:length] == token).nonzero()[:, 0]
        features = _flat(arguments[IMAGES][modality].pooler_output)
        row_features = torch.stack([features[row[: len(positions)]] for row in rows])  # [rows, placeholders, width]
        differ = (row_features != row_features[0]).any(dim=-1).any(dim=0)
        if differ.any():
            length = int(positions[differ.long().argmax()])
    return length


def split_sync(arguments: dict[str, Any], config: Any, tokens: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the images of a common prefix with tokens `[length]`, and those after it in all rows."""
    first, rest = {}, {}
    for modality, (token, rows) in (_rows_sync(arguments, config) or {}).items():
        output = arguments[IMAGES][modality]
        count = int((tokens == token).sum())
        if count:
            first[modality] = _chosen(output, rows[0][:count])
        if len(left := torch.cat([row[count:] for row in rows])):
            rest[modality] = _chosen(output, left)
    return first, rest
