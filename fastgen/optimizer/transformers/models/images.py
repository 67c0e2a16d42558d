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

from fastgen.optimizer.decoding.report import Reason
from fastgen.optimizer.transformers.row_groups import IMAGES, RowGroups


def with_one_row_per_group(arguments: dict[str, Any], groups: RowGroups) -> dict[str, Any]:
    """The same arguments with the items of the first row of each group only."""
    firsts = groups.firsts.tolist()

    def of_firsts(items: Any) -> Any:
        chosen = _places(firsts, len(items) // groups.rows)
        return items[chosen] if isinstance(items, Tensor) else [items[index] for index in chosen]

    def reduced(output: ModelOutput) -> ModelOutput:
        changed = {"pooler_output": of_firsts(output.pooler_output)}
        if getattr(output, "deepstack_features", None) is not None:
            changed["deepstack_features"] = [of_firsts(features) for features in output.deepstack_features]
        return type(output)(**{**output, **changed})

    return {**arguments, IMAGES: {modality: reduced(output) for modality, output in arguments[IMAGES].items()}}


def unsupported_reasons_sync(arguments: dict[str, Any], config: Any, groups: RowGroups) -> list[Reason]:
    """Why these items cannot be reduced to those of one row per group; empty if they can. Reads the device."""
    name = f"argument {IMAGES}"
    for modality, output in arguments[IMAGES].items():
        items = getattr(output, "pooler_output", None)
        token_id = getattr(config, f"{modality}_token_id", None)
        deep = getattr(output, "deepstack_features", None)
        if items is None or token_id is None or arguments.get("inputs_embeds") is not None:
            return [Reason("IMAGES", f"{name}: its {modality}s are not known to be those of the prompt's rows")]
        if deep is not None and not isinstance(deep[0][0], Tensor):
            return [Reason("IMAGES", f"{name}: the features of its {modality}s are in the model's own order")]
        wanted = (arguments["input_ids"] == token_id).sum(-1).tolist()
        each, left = divmod(len(items), groups.rows)
        lengths = iter([len(item) for item in items])
        if left or wanted != [sum(islice(lengths, each)) for _ in range(groups.rows)]:
            return [Reason("IMAGES_PER_ROW", f"{name}: not every row of the prompt has the same number of {modality}s")]
        firsts = groups.firsts[groups.of_rows].tolist()
        if not all(torch.equal(item, items[index]) for item, index in zip(items, _places(firsts, each))):
            return [Reason("IMAGES_DIFFER", f"{name}: equal rows of the prompt have different {modality}s")]
    return []


# Behind a common prefix. An item stands for as many placeholder tokens as it has features, in the order of rows.


def features_of_rows_sync(arguments: dict[str, Any], config: Any) -> dict[str, tuple[int, list[Tensor]]] | None:
    """For each modality the id of its placeholder tokens, and the features of each row, `[placeholders, width]`.

    None where features are not known to be those of the placeholders: images whose tokens see each other, and those of
    models that also put them into later layers, are the library's. Reads the device.
    """
    found = {}
    for modality, output in arguments[IMAGES].items():
        items, token_id = getattr(output, "pooler_output", None), getattr(config, f"{modality}_token_id", None)
        if items is None or token_id is None or getattr(output, "deepstack_features", None) is not None:
            return None
        if arguments.get("inputs_embeds") is not None or arguments.get("token_type_ids") is not None:
            return None
        counts = (arguments["input_ids"] == token_id).sum(-1).tolist()
        features = torch.cat([item.reshape(-1, item.shape[-1]) for item in items])
        if sum(counts) != len(features):
            return None
        found[modality] = token_id, list(features.split(counts))
    return found


def length_without_others_sync(arguments: dict[str, Any], config: Any, tokens: Tensor) -> int:
    """How many of the tokens `[length]` that all rows begin with have the same features in all rows, too."""
    length = len(tokens)
    for token_id, rows in (features_of_rows_sync(arguments, config) or {}).values():
        places = (tokens[:length] == token_id).nonzero()[:, 0]
        differ = torch.zeros(len(places), dtype=torch.bool, device=tokens.device)
        for row in rows:
            differ |= (row[: len(places)] != rows[0][: len(places)]).any(dim=-1)
        if differ.any():
            length = int(places[differ.long().argmax()])
    return length


def split_sync(arguments: dict[str, Any], config: Any, tokens: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """The features that belong to the tokens `[length]` of a common prefix, and those behind it in all rows."""
    first, behind = {}, {}
    for modality, (token_id, rows) in (features_of_rows_sync(arguments, config) or {}).items():
        output, count = arguments[IMAGES][modality], int((tokens == token_id).sum())
        if count:
            first[modality] = _with_features(output, rows[0][:count])
        if any(len(row) > count for row in rows):
            behind[modality] = _with_features(output, torch.cat([row[count:] for row in rows]))
    return first, behind


def _with_features(output: ModelOutput, features: Tensor) -> ModelOutput:
    """One item with these features, as the library has it where a prompt is prefilled in chunks."""
    return type(output)(pooler_output=features[None] if isinstance(output.pooler_output, Tensor) else [features])


def _places(rows: list[int], each: int) -> list[int]:
    """Where the items of these rows stand among those of all rows, of which each has so many."""
    return [row * each + item for row in rows for item in range(each)]
