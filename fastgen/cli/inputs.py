"""From lines of text to padded batches of token ids, in file order."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers


@dataclass(frozen=True)
class Batch:
    """Some lines of the input, ready for generate."""

    line_indices: list[int]  # counted from 0 over all lines of the input
    input_ids: torch.Tensor  # [B, N]
    attention_mask: torch.Tensor  # [B, N], 0 where input_ids is padding

    def __len__(self) -> int:
        return len(self.line_indices)


def tokenize_lines(
    lines: list[str],
    tokenizer: transformers.PreTrainedTokenizerBase,
    prefix: str = "",
    max_tokenizer_length: int | None = None,
) -> list[list[int]]:
    """Token ids of every line, truncated only where a length is given; none for lines without visible text."""
    # Truncating is asked for by a length; without one the full length is wanted, to compare it with the limits.
    truncation = {} if max_tokenizer_length is None else {"truncation": True, "max_length": max_tokenizer_length}
    token_ids: list[list[int]] = [[] for _ in lines]
    filled = [index for index, line in enumerate(lines) if line.strip()]
    if filled:
        texts = [prefix + lines[index] for index in filled]
        encoded = tokenizer(texts, verbose=False, **truncation)["input_ids"]
        for index, ids in zip(filled, encoded, strict=True):
            token_ids[index] = ids
    return token_ids


def make_batches(
    token_ids: list[list[int]], bs: int, tokenizer: transformers.PreTrainedTokenizerBase, device: torch.device
) -> Iterator[Batch]:
    """Batches of `bs` lines in file order, padded to their longest line; lines without tokens are left out."""
    filled = [index for index, ids in enumerate(token_ids) if ids]
    for start in range(0, len(filled), bs):
        line_indices = filled[start : start + bs]
        rows = [token_ids[index] for index in line_indices]
        width = max(map(len, rows))
        left = tokenizer.padding_side == "left"
        input_ids = [_pad(row, tokenizer.pad_token_id, width, left) for row in rows]
        attention_mask = [_pad([1] * len(row), 0, width, left) for row in rows]
        yield Batch(line_indices, torch.tensor(input_ids, device=device), torch.tensor(attention_mask, device=device))


def _pad(values: list[int], filler: int, width: int, left: bool) -> list[int]:
    padding = [filler] * (width - len(values))
    return padding + values if left else values + padding
