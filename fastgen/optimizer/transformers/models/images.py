"""Images and videos in prompts, as transformers has encoded them before the prefill.

The items (images, videos) of an input stand together and are repeated for each of its rows: A B A B for two rows.

Tests: tests/optimizer/transformers/test_multimodal.py
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from fastgen.optimizer.decoding.reasons import Reason
from fastgen.optimizer.transformers.row_groups import IMAGES, RowGroups


def with_one_row_per_group(arguments: dict[str, Any], groups: RowGroups) -> dict[str, Any]:
    """The same arguments with the items of the first row of each group only."""
    if arguments.get(IMAGES) is None:
        return arguments
    firsts = groups.firsts.tolist()
    reduced = {modality: _items_of(output, groups.rows, firsts) for modality, output in arguments[IMAGES].items()}
    return {**arguments, IMAGES: reduced}


def unsupported_reasons_sync(arguments: dict[str, Any], config: Any, groups: RowGroups) -> list[Reason]:
    """Why these items cannot be reduced to those of one row per group; empty if they can. Reads the device."""
    for modality, output in (arguments.get(IMAGES) or {}).items():
        items = getattr(output, "pooler_output", None)
        token_id = getattr(config, f"{modality}_token_id", None)
        deep = getattr(output, "deepstack_features", None)
        if items is None or token_id is None or arguments.get("inputs_embeds") is not None:
            text = f"argument {IMAGES}: its {modality}s are not known to be those of the prompt's rows"
            return [Reason("IMAGES", text)]
        if deep is not None and not isinstance(deep[0][0], Tensor):
            text = f"argument {IMAGES}: the features of its {modality}s are in the model's own order"
            return [Reason("IMAGES", text)]
        wanted = (arguments["input_ids"] == token_id).sum(-1).tolist()
        each, left = divmod(len(items), groups.rows)
        lengths = iter([len(item) for item in items])
        if left or wanted != [sum(islice(lengths, each)) for _ in range(groups.rows)]:
            text = f"argument {IMAGES}: not every row of the prompt has the same number of {modality}s"
            return [Reason("IMAGES_PER_ROW", text)]
        firsts = groups.firsts[groups.of_rows].tolist()
        if not all(torch.equal(item, items[index]) for item, index in zip(items, _places(firsts, each))):
            text = f"argument {IMAGES}: equal rows of the prompt have different {modality}s"
            return [Reason("IMAGES_DIFFER", text)]
    return []


def _items_of(output: ModelOutput, rows: int, kept: list[int]) -> ModelOutput:
    """The same output with the items of these of all rows only."""

    def of_kept(items: Any) -> Any:
        chosen = _places(kept, len(items) // rows)
        return items[chosen] if isinstance(items, Tensor) else [items[index] for index in chosen]

    changed = {"pooler_output": of_kept(output.pooler_output)}
    if getattr(output, "deepstack_features", None) is not None:
        changed["deepstack_features"] = [of_kept(features) for features in output.deepstack_features]
    return type(output)(**{**output, **changed})


def _places(rows: list[int], each: int) -> list[int]:
    """Where the items of these rows stand among those of all rows, of which each has so many."""
    return [row * each + item for row in rows for item in range(each)]
