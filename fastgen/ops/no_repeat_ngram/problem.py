"""What no-repeat-n-gram can be asked: checks that name the argument, what it was and what would be accepted.

Tests: tests/ops/test_no_repeat_ngram_build.py, tests/ops/test_no_repeat_ngram_kernels.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.tracing import is_transformed

TOKEN_DTYPES = (torch.int32, torch.int64)
SCORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICE_TYPES = ("cpu", "cuda")


def check_types(tokens: object, scores: object, ngram_size: object, encoder_tokens: object) -> None:
    """Raises TypeError for what is no tensor, or no int, and should be."""
    for name, value in (("tokens", tokens), ("scores", scores)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is of type {_type(value)} (accepted: Tensor)")
    if encoder_tokens is not None and not isinstance(encoder_tokens, Tensor):
        raise TypeError(f"encoder_tokens is of type {_type(encoder_tokens)} (accepted: Tensor, None)")
    if not _is_int(ngram_size):
        raise TypeError(f"ngram_size is of type {_type(ngram_size)} (accepted: int)")


def cut(tokens: Tensor, lengths: int | Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Tokens and lengths with an int length applied to the tokens, as a view."""
    if lengths is None or isinstance(lengths, Tensor):
        return tokens, lengths
    if not _is_int(lengths):
        raise TypeError(f"lengths is of type {_type(lengths)} (accepted: int, tensor of int32 or int64, None)")
    _check_dimensions("tokens", tokens, "rows, width")
    if not 0 <= lengths <= tokens.shape[1]:
        raise ValueError(f"lengths is {lengths} (accepted: 0 to {tokens.shape[1]}, the width of tokens)")
    return tokens[:, :lengths], None


def unsupported_reasons(tokens: Tensor, scores: Tensor) -> list[str]:
    """Why a host's own code has to ban here; empty if `check` accepts these and nobody watches or transforms them."""
    if type(tokens) is not Tensor or type(scores) is not Tensor:
        return [f"tokens and scores are {type(tokens).__name__} and {type(scores).__name__} (supported: Tensor)"]
    if torch.compiler.is_compiling() or is_transformed():
        return ["the call is compiled, traced or transformed"]
    if scores.device.type not in DEVICE_TYPES:
        return [f"scores is on {scores.device} (supported: {', '.join(DEVICE_TYPES)})"]
    try:
        check(tokens, scores, 1, None, None)
    except (TypeError, ValueError) as error:
        return [str(error)]
    return []


def check(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None, encoder_tokens: Tensor | None
) -> None:
    """Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or n."""
    _check_dimensions("tokens", tokens, "rows, width")
    _check_dimensions("scores", scores, "rows, vocabulary_size")
    _check_dtype("tokens", tokens, TOKEN_DTYPES)
    _check_dtype("scores", scores, SCORE_DTYPES)
    _check_device("tokens", tokens, scores)
    rows = tokens.shape[0]
    if scores.shape[0] != rows:
        raise ValueError(f"scores has {scores.shape[0]} rows (accepted: {rows}, as tokens)")
    if ngram_size < 1:
        raise ValueError(f"ngram_size is {ngram_size} (accepted: 1 or more)")
    if lengths is not None:
        _check_dtype("lengths", lengths, TOKEN_DTYPES)
        _check_device("lengths", lengths, scores)
        if lengths.dim() > 1 or (lengths.dim() == 1 and lengths.shape[0] != rows):
            raise ValueError(f"lengths has shape {list(lengths.shape)} (accepted: [] or [{rows}])")
    if encoder_tokens is not None:
        _check_dimensions("encoder_tokens", encoder_tokens, "rows / beams, source_width")
        _check_dtype("encoder_tokens", encoder_tokens, (tokens.dtype,))
        _check_device("encoder_tokens", encoder_tokens, scores)
        inputs = encoder_tokens.shape[0]
        if (rows % inputs if inputs else rows) != 0:
            raise ValueError(f"encoder_tokens has {inputs} rows (accepted: a divisor of {rows}, the rows of tokens)")
    if scores.requires_grad and torch.is_grad_enabled():
        raise ValueError("scores requires gradients (accepted: scores that do not, or a call under torch.no_grad())")


def check_writable(scores: Tensor) -> None:
    """Raises ValueError for scores of which two entries may be one place in memory."""
    for dimension, (size, stride) in enumerate(zip(scores.shape, scores.stride())):
        if size > 1 and stride == 0:
            raise ValueError(
                f"scores is expanded along dimension {dimension} (accepted: scores with memory of their own)"
            )
    (rows, vocabulary_size), (row_stride, stride) = scores.shape, scores.stride()
    if (
        rows > 1 < vocabulary_size
        and row_stride <= (vocabulary_size - 1) * stride
        and stride <= (rows - 1) * row_stride
    ):
        raise ValueError(f"scores has strides {row_stride} and {stride}, rows overlap (accepted: rows that do not)")


def can_ban(tokens: Tensor, scores: Tensor, ngram_size: int, encoder_tokens: Tensor | None) -> bool:
    """Whether the shapes alone leave anything to ban."""
    source = tokens if encoder_tokens is None else encoder_tokens
    return scores.numel() > 0 and source.shape[1] >= ngram_size and tokens.shape[1] >= ngram_size - 1


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _type(value: object) -> str:
    return type(value).__name__


def _check_dimensions(name: str, tensor: Tensor, wanted: str) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"{name} has shape {list(tensor.shape)} (accepted: [{wanted}])")


def _check_dtype(name: str, tensor: Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise TypeError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')} (accepted: {names})")


def _check_device(name: str, tensor: Tensor, scores: Tensor) -> None:
    if tensor.device != scores.device:
        raise ValueError(f"{name} is on {tensor.device} (accepted: {scores.device}, as scores)")
