"""Attention of many queries (a prompt, an encoder) in fp32, bf16 or fp16 on a CPU: `csrc/flash_attention.cpp`.

torch's flash attention computes all scores that a causal mask hides, and in bf16 is no faster than in fp32. This kernel
skips keys that are hidden from a whole tile of queries, and multiplies bf16 with dot products of pairs (AVX512_BF16).

AMD EPYC (family 25, model 17), 2 threads, heads of 64, ms, torch and this kernel in fp32, then in bf16:
BART's encoder (4 inputs, 12 heads, 512 tokens) 23, 20; 24, 12. Whisper-tiny's (8, 6, 1500) 177, 153; 193, 90. T5's
(8, 12, 128, with a bias) 4.8, 3.9; 5.7, 2.8. GPT-2's prompt (4, 12, 512) 22, 11; 28, 9.2. Llama's padded prompt
(4, 12 of 3 heads, 512) 23, 14; 29, 12. With AVX2 only, one thread: BART's encoder 42, 39; 48, 40. GPT-2's prompt
43, 23; 48, 24.

Tests: tests/ops/test_attention_kernels.py
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops import few_queries, simd
from fastgen.ops.kernel import Kernel
from fastgen.ops.tracing import Arguments, Options, TransparentMode, is_watched

# Fewer queries per row and key head, or fewer keys, are not worth packing.
MIN_QUERIES = MIN_KEYS = 32


@functools.cache
def _is_faster(dtype: torch.dtype) -> bool:
    """Whether this kernel is faster than torch's: not in bf16 with AMX, where torch's takes 0.34 to 0.63 of its time.

    Measured on an Intel Xeon (family 6, model 167), 64 to 1,024 queries, causal and without a mask.
    """
    return dtype != torch.bfloat16 or not getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def can_attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None) -> bool:
    """Whether this kernel supports the arguments of `attention`, and is worthwhile for them."""
    queries = query.shape[2] * query.shape[1] // keys[0].shape[1]
    if queries < MIN_QUERIES or sum([segment.shape[2] for segment in keys]) < MIN_KEYS:
        return False
    # A dispatch mode would not see this kernel's call; and a user who disables flash attention wants other sums.
    if torch._C._len_torch_dispatch_stack() or not torch.backends.cuda.flash_sdp_enabled():
        return False
    return _is_faster(query.dtype) and few_queries.can_read(query, keys, values, mask)


def attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    is_causal: bool = False,
    bounds: object = None,
) -> Tensor:
    """Computes `shared_attention`, see `can_attend`; ignores `bounds`.

    is_causal: query `i` sees keys 0 to `i`, and there is no mask.
    """
    output = few_queries.output_of(query, values)
    few_queries.call_into(output, query, keys, values, mask, scale, "flash_attention", is_causal)()
    return output


class FlashAttention(TransparentMode):
    """A context in which `functional.scaled_dot_product_attention` calls this kernel if `can_attend` is true."""

    def __init__(self, usage: Counter[str]) -> None:
        super().__init__()
        self.usage = usage

    def __torch_function__(self, func: Any, types: Any, args: Arguments = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and not is_watched():
            output = _attention_of_call(*args, **kwargs)
            if output is not None:
                self.usage["flash attention"] += 1
                return output
        return func(*args, **kwargs)


def _attention_of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Returns the result of a call of torch's function, or None if torch must compute it or raise the error."""
    if dropout_p or {query.dim(), key.dim(), value.dim()} != {4} or (is_causal and attn_mask is not None):
        return None
    rows, heads, _, width = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != rows or not key.shape[1]:
        return None
    if key.shape[1] != heads and (not enable_gqa or heads % key.shape[1]):
        return None
    if attn_mask is not None and not _broadcasts(attn_mask, (rows, heads, query.shape[2], key.shape[2])):
        return None
    if not can_attend(query, [key], [value], attn_mask):
        return None
    return attention(query, [key], [value], attn_mask, width**-0.5 if scale is None else scale, is_causal)


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = mask.shape[::-1]
    return 2 <= len(sizes) <= len(shape) and all(one in (1, size) for one, size in zip(sizes, shape[::-1]))


_TASK = "prompts and encoders of large models, in fp32, bf16 and fp16"
KERNELS = (
    Kernel("C++", simd.machine_reasons, attention, "cpu", can_attend, _TASK, ("flash attention",)),
    Kernel("torch", list, functional.scaled_dot_product_attention),
)
