"""`mm_encoder_outputs`: what the library has encoded of a prompt's images and videos before the prefill.

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

NAME = "mm_encoder_outputs"


def unsupported_reasons_sync(arguments: dict[str, Any], config: Any, firsts: list[int]) -> list[Reason]:
    """Why these items cannot be reduced to those of one row per group; empty if they can. Reads the device.

    firsts: for each row, the first row of its group.
    """
    rows = len(firsts)
    for modality, output in (arguments.get(NAME) or {}).items():
        items = getattr(output, "pooler_output", None)
        token_id = getattr(config, f"{modality}_token_id", None)
        deep = getattr(output, "deepstack_features", None)
        if items is None or token_id is None or arguments.get("inputs_embeds") is not None:
            return [
                Reason("IMAGES", f"argument {NAME}: its {modality}s are not known to be those of the prompt's rows")
            ]
        if deep is not None and not isinstance(deep[0][0], Tensor):
            return [Reason("IMAGES", f"argument {NAME}: the features of its {modality}s are in the model's own order")]
        wanted = (arguments["input_ids"] == token_id).sum(-1).tolist()
        each, left = divmod(len(items), rows)
        lengths = iter([len(item) for item in items])
        if left or wanted != [sum(islice(lengths, each)) for _ in range(rows)]:
            text = f"argument {NAME}: not every row of the prompt has the same number of {modality}s"
            return [Reason("IMAGES_PER_ROW", text)]
        first = [row * each + item for row in firsts for item in range(each)]
        if not all(torch.equal(item, items[index]) for item, index in zip(items, first)):
            return [Reason("IMAGES_DIFFER", f"argument {NAME}: equal rows of the prompt have different {modality}s")]
    return []


def of_rows(outputs: dict[str, ModelOutput], rows: int, kept: list[int]) -> dict[str, ModelOutput]:
    """The same outputs with the items of these of all rows only."""

    def of_kept(items: Any) -> Any:
        each = len(items) // rows
        chosen = [row * each + item for row in kept for item in range(each)]
        return items[chosen] if isinstance(items, Tensor) else [items[index] for index in chosen]

    reduced = {}
    for modality, output in outputs.items():
        changed = {"pooler_output": of_kept(output.pooler_output)}
        if getattr(output, "deepstack_features", None) is not None:
            changed["deepstack_features"] = [of_kept(features) for features in output.deepstack_features]
        reduced[modality] = type(output)(**{**output, **changed})
    return reduced
