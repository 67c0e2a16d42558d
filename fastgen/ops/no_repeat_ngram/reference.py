"""No-repeat-n-gram with torch's own operations: the oracle for the kernels, and the fallback without any.

Tests: tests/ops/test_no_repeat_ngram.py, tests/ops/test_no_repeat_ngram_kernels.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ban(tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None, encoder_tokens: Tensor | None) -> None:
    """Writes -inf into `scores`; takes the arguments of `no_repeat_ngram_`, checked, for which `can_ban` is true."""
    source = tokens if encoder_tokens is None else encoder_tokens
    matches = _matches(tokens, source, ngram_size, lengths, is_own=encoder_tokens is None)  # [rows, windows]
    if scores.device.type == "cpu":
        _write_few(scores, source, matches, ngram_size)
    else:
        _write_all(scores, source, matches, ngram_size)


def _matches(tokens: Tensor, source: Tensor, ngram_size: int, lengths: Tensor | None, *, is_own: bool) -> Tensor:
    """Whether the first n - 1 tokens of each window of `source` are the last n - 1 valid ones of the row."""
    rows, width = tokens.shape
    windows = source.shape[1] - ngram_size + 1
    if lengths is None:
        start = width - ngram_size + 1
        prefix = tokens[:, start:]  # [R, n - 1]
    else:
        start = (lengths.clamp(0, width) - ngram_size + 1).expand(rows).unsqueeze(1)  # [R, 1]
        offsets = torch.arange(ngram_size - 1, device=tokens.device)
        prefix = tokens.gather(1, (start + offsets).clamp(min=0).long())
    inputs = source.unsqueeze(1)  # [B, 1, N]
    prefix = prefix.unflatten(0, (source.shape[0], -1))  # [B, M, n - 1]
    matches = torch.ones(*prefix.shape[:2], windows, dtype=torch.bool, device=tokens.device)
    for i in range(ngram_size - 1):
        equal = inputs[..., i : i + windows] == prefix[..., i : i + 1]
        matches = matches.logical_and_(equal) if i else equal
    matches = matches.flatten(0, 1)
    if lengths is not None:
        matches &= start >= 0
        if is_own:
            matches &= torch.arange(windows, device=tokens.device) < start
    return matches


def _write_few(scores: Tensor, source: Tensor, matches: Tensor, ngram_size: int) -> None:
    """Writes once for each match: the least work, if the host may read the number of matches."""
    row, window = matches.nonzero(as_tuple=True)
    token = source[row // (scores.shape[0] // source.shape[0]), window + (ngram_size - 1)]
    is_known = (token >= 0) & (token < scores.shape[1])
    scores.index_put_((row[is_known], token[is_known].long()), scores.new_tensor(-math.inf))


def _write_all(scores: Tensor, source: Tensor, matches: Tensor, ngram_size: int) -> None:
    """Writes once for each window: shapes do not depend on the matches, and no score is written with two values.

    Windows without a match write what the first matching window of their row writes, -inf; in a row without a match
    they write the current score of one token.
    """
    token = source[:, ngram_size - 1 :].repeat_interleave(scores.shape[0] // source.shape[0], dim=0).long()
    matches &= (token >= 0) & (token < scores.shape[1])
    first = matches.to(torch.uint8).argmax(1, keepdim=True)
    substitute = token.gather(1, first).clamp(0, scores.shape[1] - 1)
    value = scores.gather(1, substitute).masked_fill_(matches.any(1, keepdim=True), -math.inf)
    scores.scatter_(1, torch.where(matches, token, substitute), value.expand_as(token))
