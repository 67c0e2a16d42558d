"""Bans the tokens that would complete an n-gram a second time: FastSeq, section 4.2 and Algorithm 1.

`no_repeat_ngram_` writes into the scores, `no_repeat_ngram` returns new ones; `torch.ops.fastgen` has the first under
the same name, for graphs and compilers. With `encoder_tokens` they ban the n-grams of the encoder's input instead of
those of the row itself. Errors name the argument, its value and what would be accepted.

Tests: tests/ops/test_no_repeat_ngram.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen.ops.no_repeat_ngram import reference
from fastgen.ops.no_repeat_ngram.kernels import bans_as_torch, kernel_for
from fastgen.ops.tracing import is_transformed

TOKEN_DTYPES = (torch.int32, torch.int64)
SCORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICE_TYPES = ("cpu", "cuda")
BY_TORCH = ("mps", "xpu")  # without kernels: torch's form, if it agrees with a CPU's results

_LIBRARY = torch.library.Library("fastgen", "FRAGMENT")
_ARGUMENTS = "Tensor tokens, Tensor(a!) scores, int ngram_size, Tensor? lengths=None, Tensor? encoder_tokens=None"
_LIBRARY.define(f"no_repeat_ngram_({_ARGUMENTS}) -> ()")


def no_repeat_ngram_(
    tokens: Tensor,
    scores: Tensor,
    ngram_size: int,
    lengths: int | Tensor | None = None,
    encoder_tokens: Tensor | None = None,
) -> Tensor:
    """Sets `scores` of tokens that would repeat an n-gram to -inf, in place, and returns them.

    tokens: `[rows, width]`, int32 or int64, the tokens of each row so far.
    scores: `[rows, vocabulary_size]`, float32, float16 or bfloat16, of any strides, on the device of `tokens`.
        Tokens outside the vocabulary are ignored.
    ngram_size: n, at least 1. If n is 1, every token of a row is banned; if n exceeds the length, none is.
    lengths: the number of valid tokens per row: an int or an int32 or int64 tensor of shape `[]` for all rows, or a
        tensor of shape `[rows]`. Values of a tensor are clamped to `0…width` and not read on the host, so that a CUDA
        graph can capture the call. None: `width`.
    encoder_tokens: `[rows / beams, source_width]` of the dtype of `tokens`: row i bans the n-grams of
        `encoder_tokens[i // beams]` instead of its own.
    Raises TypeError or ValueError.
    """
    tokens, lengths = _typed(tokens, scores, ngram_size, lengths, encoder_tokens)
    torch.ops.fastgen.no_repeat_ngram_(tokens, scores, ngram_size, lengths, encoder_tokens)
    return scores


def no_repeat_ngram(
    tokens: Tensor,
    scores: Tensor,
    ngram_size: int,
    lengths: int | Tensor | None = None,
    encoder_tokens: Tensor | None = None,
) -> Tensor:
    """Does the same as `no_repeat_ngram_`, but returns new scores and does not change `scores`."""
    tokens, lengths = _typed(tokens, scores, ngram_size, lengths, encoder_tokens)
    scores = scores.clone(memory_format=torch.contiguous_format)
    torch.ops.fastgen.no_repeat_ngram_(tokens, scores, ngram_size, lengths, encoder_tokens)
    return scores


def _typed(tokens: Tensor, scores: object, ngram_size: object, lengths: Any, encoder_tokens: object) -> Any:
    """Returns tokens and lengths; an int length is applied to the tokens, as a view.

    Raises TypeError for an argument of the wrong type, ValueError for an int length outside `0…width`.
    """
    for name, value in (("tokens", tokens), ("scores", scores)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is of type {type(value).__name__} (accepted: Tensor)")
    if encoder_tokens is not None and not isinstance(encoder_tokens, Tensor):
        raise TypeError(f"encoder_tokens is of type {type(encoder_tokens).__name__} (accepted: Tensor, None)")
    if not _is_int(ngram_size):
        raise TypeError(f"ngram_size is of type {type(ngram_size).__name__} (accepted: int)")
    if lengths is None or isinstance(lengths, Tensor):
        return tokens, lengths
    if not _is_int(lengths):
        raise TypeError(f"lengths is of type {type(lengths).__name__} (accepted: int, tensor of int32 or int64, None)")
    _check_dimensions("tokens", tokens, "rows, width")
    if not 0 <= lengths <= tokens.shape[1]:
        raise ValueError(f"lengths is {lengths} (accepted: 0 to {tokens.shape[1]}, the width of tokens)")
    return tokens[:, :lengths], None


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def unsupported_reasons(tokens: Tensor, scores: Tensor) -> list[str]:
    """Returns why the host's own code must ban; empty if these are supported and no mode watches or transforms them."""
    if type(tokens) is not Tensor or type(scores) is not Tensor:
        return [f"tokens and scores are {type(tokens).__name__} and {type(scores).__name__} (supported: Tensor)"]
    if torch.compiler.is_compiling() or is_transformed():
        return ["the call is compiled, traced or transformed"]
    if scores.device.type in BY_TORCH and (reasons := bans_as_torch.reasons(reference.ban, scores.device.type)):
        return reasons
    if scores.device.type not in DEVICE_TYPES + BY_TORCH:
        return [f"scores is on {scores.device} (supported: {', '.join(DEVICE_TYPES + BY_TORCH)})"]
    try:
        check(tokens, scores, 1)
    except (TypeError, ValueError) as error:
        return [str(error)]
    return []


def check(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None = None, encoder_tokens: Tensor | None = None
) -> None:
    """Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or n."""
    _check_dimensions("tokens", tokens, "rows, width")
    _check_dimensions("scores", scores, "rows, vocabulary_size")
    _check_tensor("tokens", tokens, TOKEN_DTYPES, scores)
    _check_tensor("scores", scores, SCORE_DTYPES, scores)
    rows = tokens.shape[0]
    if scores.shape[0] != rows:
        raise ValueError(f"scores has {scores.shape[0]} rows (accepted: {rows}, as tokens)")
    if ngram_size < 1:
        raise ValueError(f"ngram_size is {ngram_size} (accepted: 1 or more)")
    if lengths is not None:
        _check_tensor("lengths", lengths, TOKEN_DTYPES, scores)
        if lengths.dim() > 1 or (lengths.dim() == 1 and lengths.shape[0] != rows):
            raise ValueError(f"lengths has shape {list(lengths.shape)} (accepted: [] or [{rows}])")
    if encoder_tokens is not None:
        _check_dimensions("encoder_tokens", encoder_tokens, "rows / beams, source_width")
        _check_tensor("encoder_tokens", encoder_tokens, (tokens.dtype,), scores)
        inputs = encoder_tokens.shape[0]
        if (rows % inputs if inputs else rows) != 0:
            raise ValueError(f"encoder_tokens has {inputs} rows (accepted: a divisor of {rows}, the rows of tokens)")
    if scores.requires_grad and torch.is_grad_enabled():
        raise ValueError("scores requires gradients (accepted: scores that do not, or a call under torch.no_grad())")


def check_writable(scores: Tensor) -> None:
    """Raises ValueError if two entries of the scores may share memory."""
    for dimension, (size, stride) in enumerate(zip(scores.shape, scores.stride())):
        if size > 1 and stride == 0:
            expanded = f"scores is expanded along dimension {dimension}"
            raise ValueError(f"{expanded} (accepted: scores with memory of their own)")
    (rows, vocabulary_size), (row_stride, stride) = scores.shape, scores.stride()
    overlap = row_stride <= (vocabulary_size - 1) * stride and stride <= (rows - 1) * row_stride
    if rows > 1 < vocabulary_size and overlap:
        raise ValueError(f"scores has strides {row_stride} and {stride}, rows overlap (accepted: rows that do not)")


def can_ban(tokens: Tensor, scores: Tensor, ngram_size: int, encoder_tokens: Tensor | None) -> bool:
    """Whether the shapes allow any n-gram to repeat."""
    source = tokens if encoder_tokens is None else encoder_tokens
    return bool(scores.numel() > 0 and source.shape[1] >= ngram_size and tokens.shape[1] >= ngram_size - 1)


def _check_tensor(name: str, tensor: Tensor, accepted: tuple[torch.dtype, ...], scores: Tensor) -> None:
    if tensor.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise TypeError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')} (accepted: {names})")
    if tensor.device != scores.device:
        raise ValueError(f"{name} is on {tensor.device} (accepted: {scores.device}, as scores)")


def _check_dimensions(name: str, tensor: Tensor, wanted: str) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"{name} has shape {list(tensor.shape)} (accepted: [{wanted}])")


def _ban_in_place(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None = None, encoder_tokens: Tensor | None = None
) -> None:
    check(tokens, scores, ngram_size, lengths, encoder_tokens)
    check_writable(scores)
    if can_ban(tokens, scores, ngram_size, encoder_tokens):
        kernel_for(scores.device.type).run(tokens, scores, ngram_size, lengths, encoder_tokens)
    if not scores.is_inference():
        torch.autograd.graph.increment_version(scores)


_LIBRARY.impl("no_repeat_ngram_", _ban_in_place, "CompositeExplicitAutograd")
torch.library.register_fake("fastgen::no_repeat_ngram_", check, lib=_LIBRARY)
