"""Batches for the masked-target objective of UniLM (§2.3 and §2.5 of the paper).

Tests: tests/models/unilm/test_unilm_training.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.models.unilm.configuration import UniLMConfig
from fastgen.models.unilm.masks import attention_masks

IGNORED = -100


def masked_target_batch(
    config: UniLMConfig,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    mask_probability: float = 0.7,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Returns the arguments of `UniLMForConditionalGeneration`'s forward for a training step.

    sources: token ids from the tokenizer, `[CLS] … [SEP]`.
    targets: token ids without special tokens; `[SEP]` (`config.eos_token_id`) is appended to each.
    mask_probability: the share of target tokens, including `[SEP]`, that become `[MASK]`; at least one in each row.
    generator: the source of random numbers, on the CPU.

    Returns, for `[rows, longest]` tokens, padded at the end: `input_ids`, `token_type_ids` and `labels` (-100 where
    nothing is masked), int64, and `attention_mask` `[rows, longest, longest]`, boolean, sequence-to-sequence.

    It follows the paper's fine-tuning, but a chosen token always becomes `[MASK]`; the paper keeps one in ten and draws
    one in ten at random. Raises ValueError for a `mask_probability` outside 0 to 1, for numbers of sources and targets
    that differ or are 0, and for sequences longer than `config.max_position_embeddings`.
    """
    if not 0 <= mask_probability <= 1:
        raise ValueError(f"mask_probability={mask_probability}: from 0 to 1")
    if len(sources) != len(targets) or not sources:
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets: equal numbers, and at least one")
    source_lengths = torch.tensor([len(source) for source in sources])
    lengths = source_lengths + torch.tensor([len(target) + 1 for target in targets])
    rows = len(sources)
    longest = int(lengths.max())
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"a source and a target of {longest} tokens together: "
            f"at most {config.max_position_embeddings} (max_position_embeddings)"
        )
    input_ids = torch.full((rows, longest), config.pad_token_id)
    for row, (source, target) in enumerate(zip(sources, targets)):
        input_ids[row, : lengths[row]] = torch.tensor([*source, *target, config.eos_token_id])
    positions = torch.arange(longest)
    in_target = (positions >= source_lengths[:, None]) & (positions < lengths[:, None])
    chances = torch.rand(rows, longest, generator=generator).masked_fill(~in_target, 2.0)
    chosen = in_target & ((chances < mask_probability) | (chances == chances.amin(dim=1, keepdim=True)))
    return {
        "input_ids": input_ids.masked_fill(chosen, config.mask_token_id),
        "token_type_ids": torch.where(
            positions < source_lengths[:, None], config.source_type_id, config.target_type_id
        ),
        "attention_mask": attention_masks("sequence-to-sequence", lengths, source_lengths),
        "labels": input_ids.masked_fill(~chosen, IGNORED),
    }
