"""Bans the tokens that would complete an n-gram a second time: FastSeq, section 4.2 and Algorithm 1.

`no_repeat_ngram_` writes into the scores, `no_repeat_ngram` returns new ones; `torch.ops.fastgen` has both under the
same names, for graphs and compilers. Given `encoder_tokens` they ban the n-grams of the encoder's input instead of
those of the row itself.

Tests: tests/ops/test_no_repeat_ngram.py, tests/ops/test_no_repeat_ngram_checks.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.no_repeat_ngram import problem
from fastgen.ops.no_repeat_ngram.implementations import implementation_for

__all__ = ["no_repeat_ngram", "no_repeat_ngram_"]

_LIBRARY = torch.library.Library("fastgen", "FRAGMENT")
_ARGUMENTS = "Tensor tokens, {} scores, int ngram_size, Tensor? lengths=None, Tensor? encoder_tokens=None"
_LIBRARY.define(f"no_repeat_ngram_({_ARGUMENTS.format('Tensor(a!)')}) -> ()")
_LIBRARY.define(f"no_repeat_ngram({_ARGUMENTS.format('Tensor')}) -> Tensor")


def no_repeat_ngram_(
    tokens: Tensor,
    scores: Tensor,
    ngram_size: int,
    lengths: int | Tensor | None = None,
    encoder_tokens: Tensor | None = None,
) -> Tensor:
    """Sets `scores` of tokens that would repeat an n-gram to -inf, in place, and returns them.

    tokens: `[rows, width]`, int32 or int64, what each row holds; the next token is to be chosen.
    scores: `[rows, vocabulary_size]`, float32, float16 or bfloat16, of any strides, on the device of `tokens`.
        Tokens outside the vocabulary are ignored.
    ngram_size: n, from 1 on. With n 1 every token of a row is banned; with n above the length nothing is.
    lengths: how many tokens of a row are valid: an int for all rows, an int32 or int64 tensor of shape `[]` for all, or
        of shape `[rows]`. A tensor is not read on the host (values outside `0…width` count as the nearest of them), so
        that a CUDA graph can hold the call. None: `width`.
    encoder_tokens: `[rows / beams, source_width]` of the dtype of `tokens`: bans the n-grams that these hold, row i
        those of `encoder_tokens[i // beams]`.
    Raises TypeError or ValueError with the argument, what it was and what would be accepted.
    """
    problem.check_types(tokens, scores, ngram_size, encoder_tokens)
    tokens, lengths = problem.cut(tokens, lengths)
    torch.ops.fastgen.no_repeat_ngram_(tokens, scores, ngram_size, lengths, encoder_tokens)
    return scores


def no_repeat_ngram(
    tokens: Tensor,
    scores: Tensor,
    ngram_size: int,
    lengths: int | Tensor | None = None,
    encoder_tokens: Tensor | None = None,
) -> Tensor:
    """As `no_repeat_ngram_`, but leaves `scores` as they are and returns new ones."""
    problem.check_types(tokens, scores, ngram_size, encoder_tokens)
    tokens, lengths = problem.cut(tokens, lengths)
    return torch.ops.fastgen.no_repeat_ngram(tokens, scores, ngram_size, lengths, encoder_tokens)


def _ban_in_place(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None = None, encoder_tokens: Tensor | None = None
) -> None:
    problem.check(tokens, scores, ngram_size, lengths, encoder_tokens)
    problem.check_writable(scores)
    if problem.can_ban(tokens, scores, ngram_size, encoder_tokens):
        implementation_for(scores.device.type).ban(tokens, scores, ngram_size, lengths, encoder_tokens)
    if not scores.is_inference():
        torch.autograd.graph.increment_version(scores)


def _ban(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None = None, encoder_tokens: Tensor | None = None
) -> Tensor:
    problem.check(tokens, scores, ngram_size, lengths, encoder_tokens)
    result = scores.clone(memory_format=torch.contiguous_format)
    if problem.can_ban(tokens, scores, ngram_size, encoder_tokens):
        implementation_for(scores.device.type).ban(tokens, result, ngram_size, lengths, encoder_tokens)
    return result


def _fake_ban_in_place(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None = None, encoder_tokens: Tensor | None = None
) -> None:
    problem.check(tokens, scores, ngram_size, lengths, encoder_tokens)


def _fake_ban(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None = None, encoder_tokens: Tensor | None = None
) -> Tensor:
    problem.check(tokens, scores, ngram_size, lengths, encoder_tokens)
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


_LIBRARY.impl("no_repeat_ngram_", _ban_in_place, "CompositeExplicitAutograd")
_LIBRARY.impl("no_repeat_ngram", _ban, "CompositeExplicitAutograd")
torch.library.register_fake("fastgen::no_repeat_ngram_", _fake_ban_in_place, lib=_LIBRARY)
torch.library.register_fake("fastgen::no_repeat_ngram", _fake_ban, lib=_LIBRARY)
