"""Attention of decode steps to keys and values in segments on a GPU, in Triton.

One kernel launch for each segment. A program folds the queries of all rows and heads that share a key head of one copy
into a tile of a tensor-core product (FastSeq §4.1, Hydragen), and sums over a chunk of the segment's length (split-KV,
as in Flash-Decoding) if a segment has fewer programs than the GPU has multiprocessors; scores and sums are fp32. The
programs of the last segment merge what earlier launches have summed, unless they sum over chunks themselves: then
another launch merges. With `Bounds`, which say on the device what a step sees, padding and spare capacity of a static
cache are not read, and keys of each row are found in the rows that wrote them.

docs/gpu-checks.md compares its times with torch's products and stock attention.

Tests: tests/ops/test_triton_attention.py, tests/gpu/test_triton_attention_cuda.py
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgen.ops.cpu_attention import are_plain
from fastgen.ops.shared_attention import Bounds, in_parts

DTYPES = (torch.float16, torch.bfloat16)  # fp32 works as well, but torch's products are faster
LARGEST_WIDTH = 256
MOST_POSITIONS = 32  # with one segment: with more, torch's attention keeps the GPU busy
MOST_PARTIAL_BYTES = 1 << 28  # with one chunk per segment
SHORTEST_CHUNK = 128  # keys per program

_NO_MASK, _ADDED, _BOOL = 0, 1, 2


@triton.jit
def _weights(scores, largest):
    """Returns weights of scores `[queries, keys]`, the factor for earlier sums, and new maxima, both `[queries]`."""
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    return tl.exp(scores - base[:, None]), tl.exp(largest - base), new_largest


@triton.jit
def _seen_scores(scores, seen, is_key, mask, copy_offset, offsets, s, MASK: tl.constexpr, ONE_MASK: tl.constexpr):
    """Applies the mask to scores `[queries, keys]`; -inf where a query does not see a key, as `seen` or the mask says.

    `copy_offset`, `offsets`: where the mask of the copy begins, and those of the queries.
    """
    if MASK != 0:
        if ONE_MASK:
            read = tl.load(mask + copy_offset + s, mask=is_key, other=0)[None, :]
        else:
            read = tl.load(mask + offsets[:, None] + s[None, :], mask=seen, other=0)
        if MASK == 1:
            scores += read.to(tl.float32)
        else:
            seen &= read != 0
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _offset(row, head, position, row_stride, head_stride, position_stride):
    """Returns the 64-bit offset of a query in a tensor `[rows, heads, positions, …]`."""
    return row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride + position.to(tl.int64) * position_stride


@triton.jit
def _chunk_of(
    split, chunk, length, first_key, last_key,
    HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns where the keys of a chunk that a step sees begin and end."""
    start, end = split * chunk, tl.minimum(split * chunk + chunk, length)
    if HAS_FIRST:
        start = tl.maximum(start, tl.load(first_key).to(tl.int32) // BLOCK * BLOCK)
    if HAS_LAST:
        end = tl.minimum(end, tl.load(last_key).to(tl.int32) + 1)
    return start, end


@triton.jit
def _store_parts(result, largest, total, sums, maxima, slot, is_query, is_there, dv, VALUE_WIDTH: tl.constexpr):
    """Writes partial results into one slot of each query."""
    tl.store(sums + slot[:, None] * VALUE_WIDTH + dv[None, :], result, mask=is_there)
    tl.store(maxima + slot * 2, largest, mask=is_query)
    tl.store(maxima + slot * 2 + 1, total, mask=is_query)


@triton.jit
def _merged(result, largest, total, sums, maxima, slot, slots, is_query, is_there, dv, VALUE_WIDTH: tl.constexpr):
    """Returns the weighted means `[queries, width]` of these sums and of the partial results in all slots."""
    for _ in range(slots):
        part = tl.load(sums + slot[:, None] * VALUE_WIDTH + dv[None, :], mask=is_there, other=0.0)
        part_largest = tl.load(maxima + slot * 2, mask=is_query, other=-float("inf"))
        new_largest = tl.maximum(largest, part_largest)
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        factor, part_factor = tl.exp(largest - base), tl.exp(part_largest - base)
        result = result * factor[:, None] + part * part_factor[:, None]
        total = total * factor + tl.load(maxima + slot * 2 + 1, mask=is_query, other=0.0) * part_factor
        largest = new_largest
        slot += 1
    return tl.where(total[:, None] == 0.0, 0.0, result / tl.where(total == 0.0, 1.0, total)[:, None])


@triton.jit(do_not_specialize=[
    "positions", "slots", "first_slot", "length", "queries", "rows_per_copy", "splits", "chunk", "mask_start",
])  # fmt: skip
def _add_up(
    query, q_row, q_head, q_position, keys, k_copy, k_head, k_key, values, v_copy, v_head, v_key,
    mask, mask_row, mask_head, mask_position, first_key, last_key, ancestors, a_row, sums, maxima,
    output, o_row, o_head, o_position, scale, heads, positions, slots, first_slot, length, queries, rows_per_copy,
    splits, chunk, mask_start, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, GROUPS: tl.constexpr, MASK: tl.constexpr,
    ONE_MASK: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, HAS_ANCESTORS: tl.constexpr,
    MERGES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, WIDTH_2: tl.constexpr, VALUE_WIDTH_2: tl.constexpr,
):  # fmt: skip
    """Computes the partial results for a chunk of a copy, a tile of its queries, and a key head.

    sums `[queries of all rows, slots, VALUE_WIDTH]`, maxima `[…, slots, 2]`: the partial results. This segment has
    `splits` slots from `first_slot` on; with MERGES it has none, but merges those of earlier segments into the output.
    ONE_MASK: all queries of a copy see the same keys.
    """
    index, kv_head = tl.program_id(0), tl.program_id(1)
    split, tiles = index % splits, tl.cdiv(queries, TILE)
    copy = index // splits // tiles
    n = index // splits % tiles * TILE + tl.arange(0, TILE)
    is_query = n < queries
    row = copy * rows_per_copy + n // (GROUPS * positions)
    head = kv_head * GROUPS + n // positions % GROUPS
    position = n % positions
    d, dv = tl.arange(0, WIDTH_2), tl.arange(0, VALUE_WIDTH_2)
    is_width, is_value_width = d < WIDTH, dv < VALUE_WIDTH
    q_ptrs = query + _offset(row, head, position, q_row, q_head, q_position)
    q = tl.load(q_ptrs[:, None] + d[None, :], mask=is_query[:, None] & is_width[None, :], other=0.0)
    k_ptrs, v_ptrs = keys + kv_head * k_head, values + kv_head * v_head
    if not HAS_ANCESTORS:
        k_ptrs += copy.to(tl.int64) * k_copy
        v_ptrs += copy.to(tl.int64) * v_copy
    copy_mask_offset = copy.to(tl.int64) * rows_per_copy * mask_row + mask_start
    mask_offsets = mask_start + _offset(row, head, position, mask_row, mask_head, mask_position)
    largest, total = tl.full((TILE,), -float("inf"), tl.float32), tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, VALUE_WIDTH_2), tl.float32)
    start, end = _chunk_of(split, chunk, length, first_key, last_key, HAS_FIRST, HAS_LAST, BLOCK)
    for block in range(start, end, BLOCK):
        s = block + tl.arange(0, BLOCK)
        is_key = s < end
        seen = is_query[:, None] & is_key[None, :]
        k_start, v_start = s * k_key, s * v_key
        if HAS_ANCESTORS:
            writer = tl.load(ancestors + copy * a_row + s, mask=is_key, other=0).to(tl.int64)
            k_start += writer * k_copy
            v_start += writer * v_copy
        k = tl.load(k_ptrs + k_start[None, :] + d[:, None], mask=is_key[None, :] & is_width[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = _seen_scores(scores, seen, is_key, mask, copy_mask_offset, mask_offsets, s, MASK, ONE_MASK)
        weights, shrunk, largest = _weights(scores, largest)
        v = tl.load(v_ptrs + v_start[:, None] + dv[None, :], mask=is_key[:, None] & is_value_width[None, :], other=0.0)
        result = result * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrunk + tl.sum(weights, 1)
    slot = ((row.to(tl.int64) * heads + head) * positions + position) * slots
    is_there = is_query[:, None] & is_value_width[None, :]
    if MERGES:
        mean = _merged(result, largest, total, sums, maxima, slot, slots, is_query, is_there, dv, VALUE_WIDTH)
        o_ptrs = output + _offset(row, head, position, o_row, o_head, o_position)
        tl.store(o_ptrs[:, None] + dv[None, :], mean.to(output.dtype.element_ty), mask=is_there)
    else:
        slot += first_slot + split
        _store_parts(result, largest, total, sums, maxima, slot, is_query, is_there, dv, VALUE_WIDTH)


@triton.jit(do_not_specialize=["positions", "slots"])
def _merge(
    sums, maxima, output, o_row, o_head, o_position, heads, positions, slots,
    VALUE_WIDTH: tl.constexpr, VALUE_WIDTH_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of one query into their weighted mean, or zeros if it sees nothing."""
    index = tl.program_id(0).to(tl.int64)
    row, head, position = index // positions // heads, index // positions % heads, index % positions
    dv = tl.arange(0, VALUE_WIDTH_2)
    largest = -float("inf")
    for block in range(0, slots, BLOCK):
        slot = block + tl.arange(0, BLOCK)
        slot_maxima = tl.load(maxima + (index * slots + slot) * 2, mask=slot < slots, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(slot_maxima, 0))
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = 0.0
    result = tl.zeros((VALUE_WIDTH_2,), tl.float32)
    for block in range(0, slots, BLOCK):
        slot = block + tl.arange(0, BLOCK)
        slot_index = index * slots + slot
        weights = tl.exp(tl.load(maxima + slot_index * 2, mask=slot < slots, other=-float("inf")) - base)
        total += tl.sum(weights * tl.load(maxima + slot_index * 2 + 1, mask=slot < slots, other=0.0), 0)
        is_there = (slot < slots)[:, None] & (dv < VALUE_WIDTH)[None, :]
        part = tl.load(sums + slot_index[:, None] * VALUE_WIDTH + dv[None, :], mask=is_there, other=0.0)
        result += tl.sum(part * weights[:, None], 0)
    mean = tl.where(total == 0.0, 0.0, result / tl.where(total == 0.0, 1.0, total))
    o_ptr = output + row * o_row + head * o_head + position * o_position
    tl.store(o_ptr + dv, mean.to(output.dtype.element_ty), mask=dv < VALUE_WIDTH)


def can_attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None) -> bool:
    """Whether these kernels support these arguments, are worthwhile, and no mode waits for torch's operations."""
    if query.dtype not in DTYPES or (len(keys) == 1 and query.shape[2] > MOST_POSITIONS):
        return False
    if mask is not None and (type(mask) is not Tensor or mask.device != query.device):
        return False
    if max(query.shape[3], values[0].shape[3]) > LARGEST_WIDTH:
        return False
    return are_plain(query, keys, values)


def attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    bounds: Bounds | None = None,
) -> Tensor:
    """Computes `shared_attention` on the current stream, with one launch per segment; one more if the last has chunks.

    Many positions are computed in parts, whose partial results need no more than `MOST_PARTIAL_BYTES`; a step has few.
    """
    rows, heads, positions, width = query.shape
    kv_heads, value_width = keys[0].shape[1], values[0].shape[3]
    slots = max(len(keys) - 1, 1)
    most = max(MOST_PARTIAL_BYTES // (4 * rows * heads * slots * (value_width + 2)), MOST_POSITIONS)
    if bounds is None and positions > most:
        return in_parts(attention, query, keys, values, mask, scale, most)
    width_2, value_width_2 = _padded(width), _padded(value_width)
    queries = [rows // segment.shape[0] * (heads // kv_heads) * positions for segment in keys]
    tiles = [_tile(count, width, query.dtype) for count in queries]
    programs = [segment.shape[0] * triton.cdiv(count, tile) for segment, count, tile in zip(keys, queries, tiles)]
    chunks = [_chunk(part.shape[2], kv_heads * count, query.device) for count, part in zip(programs, keys)]
    splits = [triton.cdiv(segment.shape[2], chunk) for segment, chunk in zip(keys, chunks)]
    merges = splits[-1] == 1
    slots, first_slot, start = sum(splits) - merges, 0, 0
    sums = query.new_empty((rows * heads * positions, slots, value_width), dtype=torch.float32)
    maxima = query.new_empty((rows * heads * positions, slots, 2), dtype=torch.float32)
    output = query.new_empty((rows, positions, heads, value_width)).transpose(1, 2)
    kind, mask_arguments = _NO_MASK, (query, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(rows, heads, positions, sum(segment.shape[2] for segment in keys))
        mask = mask if mask.stride(3) == 1 else mask.contiguous()
        kind = _BOOL if mask.dtype == torch.bool else _ADDED
        mask_arguments = (mask.view(torch.uint8) if kind == _BOOL else mask, *mask.stride()[:3])
    by_row = positions == 1 and mask_arguments[2] == 0  # the mask depends on the row only
    first_key, last_key, ancestors = bounds or (query, query, None)
    table = (query, 0) if ancestors is None else (ancestors, ancestors.stride(0))
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        for index, (k, v) in enumerate(zip(keys, values)):
            length, rows_per_copy, is_last = k.shape[2], rows // k.shape[0], index == len(keys) - 1
            _add_up[(programs[index] * splits[index], kv_heads)](
                query, *query.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], *mask_arguments,
                first_key, last_key, *table, sums, maxima, output, *output.stride()[:3], scale, heads, positions, slots,
                first_slot, length, queries[index], rows_per_copy, splits[index], chunks[index], start,
                WIDTH=width, VALUE_WIDTH=value_width, GROUPS=heads // kv_heads, MASK=kind,
                ONE_MASK=by_row and (rows_per_copy == 1 or mask_arguments[1] == 0),
                HAS_FIRST=bounds is not None and index == 0, HAS_LAST=bounds is not None and is_last,
                HAS_ANCESTORS=ancestors is not None and is_last, MERGES=merges and is_last,
                TILE=tiles[index], WIDTH_2=width_2, VALUE_WIDTH_2=value_width_2,
                **_tuning(tiles[index], width_2, query.dtype),
            )  # fmt: skip
            first_slot, start = first_slot + splits[index], start + length
        if not merges:
            _merge[(rows * heads * positions,)](
                sums, maxima, output, *output.stride()[:3], heads, positions, slots,
                VALUE_WIDTH=value_width, VALUE_WIDTH_2=value_width_2, BLOCK=min(triton.next_power_of_2(slots), 32),
            )  # fmt: skip
    return output


def _padded(number: int) -> int:
    """Returns the dimension of a tensor-core product for `number` elements: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(number)))


def _tile(queries: int, width: int, dtype: torch.dtype) -> int:
    """Returns the number of queries in a program's tile."""
    most = 32 if width > 128 else 64
    return min(_padded(queries), 16 if dtype == torch.float32 else most)


def _tuning(tile: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns the number of keys loaded together and of warps, chosen so that a program spills no registers."""
    block = 32 if width > 128 or dtype == torch.float32 else 64
    warps = 8 if tile * width >= 64 * 128 else 4
    return {"BLOCK": block, "num_warps": warps}


def _chunk(length: int, programs: int, device: torch.device) -> int:
    """Returns how many of a segment's keys a program sums over; programs: how many there are without chunks.

    Programs fill the multiprocessors; with more chunks, more partial results would be written.
    """
    splits = max(1, _multiprocessors(device) // programs)
    return max(SHORTEST_CHUNK, -(-length // splits // 64) * 64)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Returns the number of a GPU's multiprocessors; without one, in Triton's interpreter, that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
