"""No-repeat-n-gram in Triton: the same algorithm as the CUDA kernel, compiled when first used.

Tests: tests/ops/test_no_repeat_ngram_kernels.py, tests/ops/test_no_repeat_ngram_build.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


# Arguments that change as a text grows: the kernel is not compiled again for other values.
GROWING = ("ngram_size", "width", "source_width", "token_row_stride", "source_row_stride")


@triton.jit(do_not_specialize=list(GROWING))
def _ban_kernel(
    scores,
    tokens,
    source,
    lengths,
    ngram_size,
    width,
    source_width,
    vocabulary_size,
    rows_per_source,
    score_row_stride,
    score_stride,
    token_row_stride,
    token_stride,
    source_row_stride,
    source_stride,
    lengths_stride,
    HAS_LENGTHS: tl.constexpr,
    IS_OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bans in program (i, j) for the windows `[j * BLOCK, (j + 1) * BLOCK)` of row i."""
    row = tl.program_id(0).to(tl.int64)
    window = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    length = width.to(tl.int64)
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lengths + row * lengths_stride).to(tl.int64), 0), length)
    start = length - ngram_size + 1
    if start < 0:
        return  # fewer tokens than n - 1
    windows = source_width - ngram_size + 1
    if IS_OWN:
        windows = start
    own_tokens = tokens + row * token_row_stride
    own_source = source + row // rows_per_source * source_row_stride
    matches = window < windows
    for i in range(ngram_size - 1):
        wanted = tl.load(own_tokens + (start + i) * token_stride)
        read = tl.load(own_source + (window + i) * source_stride, mask=matches, other=0)
        matches = matches & (read == wanted)
    token = tl.load(own_source + (window + ngram_size - 1) * source_stride, mask=matches, other=-1).to(tl.int64)
    matches = matches & (token >= 0) & (token < vocabulary_size)
    tl.store(scores + row * score_row_stride + token * score_stride, float("-inf"), mask=matches)


def ban(tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None, encoder_tokens: Tensor | None) -> None:
    """Does the same as `reference.ban`, on the current stream."""
    source = tokens if encoder_tokens is None else encoder_tokens
    windows = source.shape[1] - ngram_size + 1
    length_stride = lengths.stride(0) if lengths is not None and lengths.dim() else 0
    with torch.cuda.device_of(scores):
        _ban_kernel[(scores.shape[0], triton.cdiv(windows, BLOCK))](
            scores,
            tokens,
            source,
            tokens if lengths is None else lengths,
            ngram_size,
            tokens.shape[1],
            source.shape[1],
            scores.shape[1],
            scores.shape[0] // source.shape[0],
            *scores.stride(),
            *tokens.stride(),
            *source.stride(),
            length_stride,
            HAS_LENGTHS=lengths is not None,
            IS_OWN=encoder_tokens is None,
            BLOCK=BLOCK,
        )
