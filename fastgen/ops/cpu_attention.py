"""Attention on a CPU in fp32, bf16 or fp16, to keys in segments.

`attend_few` (`csrc/few_queries.cpp`) is for decode steps, which have one query for each row, and a few for each copy of
keys that rows have in common. It takes little longer than reading keys and values once. torch's flash attention packs
them first; two products write scores. AMD EPYC (family 25, model 17), 2 threads, keys not in a cache, ms, torch and
this kernel in fp32, then in bf16: BART's cross-attention (4 inputs, 4 beams, 512 keys) 1.02, 0.54; 0.77, 0.41.
Whisper-tiny's (8, 5, 1500) 3.43, 1.55; 2.65, 1.31. GPT-2's prompt and generated tokens (4, 16 samples, 512 + 32) 2.44,
1.71; 1.95, 1.76. One row, 600 keys: 0.14, 0.06; 0.46, 0.05.

`attend_many` (`csrc/flash_attention.cpp`) is for prompts and encoders. torch's flash attention computes all scores that
a causal mask hides, and in bf16 is not faster than in fp32. This kernel skips keys that are hidden from a whole tile of
queries, and multiplies bf16 with dot products of pairs (AVX512_BF16). The same CPU, heads of 64, ms, torch and this
kernel in fp32, then in bf16: BART's encoder (4 inputs, 12 heads, 512 tokens) 23, 20; 24, 12. Whisper-tiny's (8, 6,
1500) 177, 153; 193, 90. T5's (8, 12, 128, with a bias) 4.8, 3.9; 5.7, 2.8. GPT-2's prompt (4, 12, 512) 22, 11; 28, 9.2.
Llama's padded prompt (4, 12 of 3 heads, 512) 23, 14; 29, 12. With AVX2 only, one thread: BART's encoder 42, 39; 48, 40.
GPT-2's prompt 43, 23; 48, 24.

Tests: tests/ops/test_attention_kernels.py
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops import simd
from fastgen.ops.kernel import Kernel
from fastgen.ops.tracing import Arguments, Options, TransparentMode, is_transformed, is_watched

# The largest number of queries for each copy of keys. At 72, with 4 key heads and 640 keys, this kernel takes 0.42 ms
# in fp32 and 0.37 in bf16, torch 0.50 and 0.49; with more, products that reuse keys come close.
MOST_QUERIES = 64

# The same for several segments, for which torch has no kernel. A prompt of 512 and 64 samples of 32 tokens, 12 heads:
# 1.0 ms in fp32, 0.79 in bf16 (in products 2.2, 1.3).
MOST_IN_SEGMENTS = 256

# With fewer keys and no mask, torch's flash attention treats rows whose scores are all NaN as hidden.
MIN_KEYS_WITHOUT_MASK = 16

# torch's own operations; in inference mode the second of these is recorded.
SDPA = ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::scaled_dot_product_attention")

_MASKS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2, torch.bool: 3}
_CAUSAL = 4
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int32)

# Fewer queries per row and key head, or fewer keys, are not worth packing.
MIN_QUERIES = MIN_KEYS = 32


# Few queries.


def can_attend_few(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None) -> bool:
    """Whether this kernel supports the arguments of `attend_few`, and is worthwhile for them."""
    rows, heads, length, _ = query.shape
    queries = rows // min([segment.shape[0] for segment in keys]) * length * heads // keys[0].shape[1]
    if queries > (MOST_QUERIES if len(keys) == 1 else MOST_IN_SEGMENTS):
        return False
    if mask is None and sum([part.shape[2] for part in keys]) < MIN_KEYS_WITHOUT_MASK:
        return False
    return can_read(query, keys, values, mask)


def can_read(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None) -> bool:
    """Whether attention kernels in C++ support these arguments, and no mode waits for torch's operations."""
    if not query.is_cpu or query.dtype not in simd.DTYPES:
        return False
    if mask is not None and (type(mask) is not Tensor or mask.dtype not in (query.dtype, torch.float32, torch.bool)):
        return False
    return are_plain(query, keys, values)


def are_plain(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether kernels that take addresses and strides support these, and no mode waits for torch's operations."""
    for segment in (query, *keys, *values):
        if type(segment) is not Tensor or segment.dtype != query.dtype or segment.stride(3) != 1 or not segment.numel():
            return False
    is_left_alone = torch.is_grad_enabled() or torch.is_autocast_enabled(query.device.type) or is_transformed()
    return keys[0].shape[3] == query.shape[3] and not is_left_alone


def attend_few(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None, scale: float
) -> Tensor:
    """Computes `shared_attention` for few queries per copy, see `can_attend_few`."""
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.fastgen.few_queries_attention(query, keys, values, mask, scale)
    return _attention(query, keys, values, mask, scale)


def output_of(query: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Returns an empty output `[rows, heads, length, width]` with adjacent heads, the layout that models need next."""
    rows, heads, length, _ = query.shape
    return query.new_empty((rows, length, heads, values[0].shape[3])).transpose(1, 2)


def call_into(
    output: Tensor,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    kernel: str = "few_queries",
    is_causal: bool = False,
) -> partial[None]:
    """Returns a call that writes attention into `output`; all tensors must stay at their addresses.

    is_causal: query `i` sees keys 0 to `i`, and there is no mask; only `csrc/flash_attention.cpp` supports it.
    """
    rows, heads, length, width = query.shape
    pointers = [query.data_ptr(), output.data_ptr(), None]
    mask_sizes = [0, 0, 0, 0, _CAUSAL if is_causal else 0]
    if mask is not None:
        total = sum(segment.shape[2] for segment in keys)
        pointers[2] = mask.data_ptr()
        mask_sizes = [*mask.expand(rows, heads, length, total).stride(), _MASKS[mask.dtype]]
    sizes = [rows, heads, length, keys[0].shape[1], width, values[0].shape[3], len(keys)]
    sizes += [*query.stride()[:3], *output.stride()[:3], *mask_sizes]
    for key, value in zip(keys, values):
        pointers += key.data_ptr(), value.data_ptr()
        sizes += key.shape[0], key.shape[2], *key.stride()[:3], *value.stride()[:3]
    arrays = (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(sizes))(*sizes)
    return partial(simd.function(kernel, query.dtype, _ARGUMENTS), *arrays, scale, torch.get_num_threads())


def sdpa_into(operation: Any, output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> partial[None] | None:
    """Returns `call_into` for a call of one of torch's `SDPA`; None if its options or sizes are not supported."""
    arguments = dict(zip((argument.name for argument in operation._schema.arguments), args)) | kwargs
    query = arguments["query"]
    keys = [arguments["key"]]
    values = [arguments["value"]]
    mask, scale = arguments.get("attn_mask"), arguments.get("scale")
    if arguments.get("dropout_p") or arguments.get("is_causal") or simd.machine_reasons():
        return None
    if not can_attend_few(query, keys, values, mask):
        return None
    return call_into(output, query, keys, values, mask, query.shape[-1] ** -0.5 if scale is None else scale)


_attention = simd.operation(
    "few_queries_attention(Tensor query, Tensor[] keys, Tensor[] values, Tensor? mask, float scale)",
    call_into,
    lambda query, keys, values, *rest: output_of(query, values),
)


# Many queries.


@functools.cache
def _is_faster(dtype: torch.dtype) -> bool:
    """Whether this kernel is faster than torch's: not in bf16 with AMX, where torch's takes 0.34 to 0.63 of its time.

    Measured on an Intel Xeon (family 6, model 167), 64 to 1,024 queries, causal and without a mask.
    """
    return dtype != torch.bfloat16 or not getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def can_attend_many(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None) -> bool:
    """Whether this kernel supports the arguments of `attend_many`, and is worthwhile for them."""
    queries = query.shape[2] * query.shape[1] // keys[0].shape[1]
    if queries < MIN_QUERIES or sum([segment.shape[2] for segment in keys]) < MIN_KEYS:
        return False
    # A dispatch mode would not see this kernel's call; and a user who disables flash attention wants other sums.
    if torch._C._len_torch_dispatch_stack() or not torch.backends.cuda.flash_sdp_enabled():
        return False
    return _is_faster(query.dtype) and can_read(query, keys, values, mask)


def attend_many(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> Tensor:
    """Computes `shared_attention`, see `can_attend_many`.

    is_causal: query `i` sees keys 0 to `i`, and there is no mask.
    """
    output = output_of(query, values)
    call_into(output, query, keys, values, mask, scale, "flash_attention", is_causal)()
    return output


class FlashAttention(TransparentMode):
    """A context in which `functional.scaled_dot_product_attention` calls this kernel if `can_attend_many` is true."""

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
    if not can_attend_many(query, [key], [value], attn_mask):
        return None
    return attend_many(query, [key], [value], attn_mask, width**-0.5 if scale is None else scale, is_causal)


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = mask.shape[::-1]
    return 2 <= len(sizes) <= len(shape) and all(mask_size in (1, size) for mask_size, size in zip(sizes, shape[::-1]))


_TASK = "prompts and encoders of large models, in fp32, bf16 and fp16"
KERNELS = (
    Kernel("C++", simd.machine_reasons, attend_many, "cpu", can_attend_many, _TASK, ("flash attention",)),
    Kernel("torch", list, functional.scaled_dot_product_attention),
)
