"""What beam search does between two forwards: it chooses the best next tokens, and reorders rows.

`best_of_…` return candidates in the order of `torch.topk` over the scores of all beams and tokens. Equal scores are
common in beam search: beams that are out of the race stay at -1e9, where float32 has steps of 64, and logits in bf16
have few values. So torch's order of equal scores is part of the answer, and these functions return it, or None if they
cannot. All choose k candidates for each of B inputs with M beams, whose scores are `beam_scores [B, M]`, and return
values and index `[B, k]`, the best first: index is `beam * vocabulary_size + token`.

`csrc/beam_top_k.cpp` does in one pass what torch does in three. AMD EPYC (family 25, model 17), 2 threads, ms, torch's
and this one: 8 inputs, 4 beams, 32,128 tokens 1.38, 0.10; 8 inputs, 5 beams, 51,865 tokens 3.20, 0.18; one input, 4
beams, 4,000 tokens 48 and 18 µs.

`move_rows` reorders keys and values in place (`csrc/move_rows.cpp`): only rows that change are copied, and only filled
positions. The same CPU, 12 layers of 12 heads of 64, keys and values, ms, layer by layer with torch and with this
kernel: 16 rows, 16 positions in bf16 1.9, 0.3; 4 rows, 31 positions in fp32 1.2, 0.3; 128 rows, 63 positions in fp32
67, 43. A table of `Ancestors` is reordered in place of values that stay where they are.

Tests: tests/ops/test_beam_top_k.py, tests/ops/test_move_rows.py
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops import simd
from fastgen.ops.kernel import Kernel, first_supported
from fastgen.ops.probes import probe

Candidates = tuple[Tensor, Tensor]

# Log-probabilities computed in one piece if they are discarded afterwards: about as many as fit into a CPU's cache.
PART = 2**21

# With at least this many numbers for each of the k, torch on a CPU fills a heap of the best k and visits the rest in
# order. A number that is not better than the worst of the heap changes nothing.
HEAP = 64

MIN_SCORES_OF_THREAD = 1 << 15
MIN_BYTES_OF_THREAD = 1 << 17

_TOP_K_ARGUMENTS = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 4, ctypes.c_int32)
_MOVE_ARGUMENTS = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4, ctypes.c_int32)


def _rows_of_a_part(logits: Tensor) -> int:
    return max(1, PART // int(logits.shape[1]))


def best_of_all(logits: Tensor, beam_scores: Tensor, k: int, log_probs: Tensor | None = None) -> Candidates:
    """Returns the best candidates for logits `[B * M, vocabulary_size]`, or for their processed log-probabilities."""
    kernel = first_supported(KERNELS, logits.device.type, logits if log_probs is None else log_probs, beam_scores, k)
    if log_probs is None and (kernel is KERNELS[-1] or logits.numel() <= PART):
        log_probs = functional.log_softmax(logits, dim=-1)
    if log_probs is not None:
        best: Candidates = kernel.run(log_probs, beam_scores, k)
        return best
    inputs = max(1, _rows_of_a_part(logits) // beam_scores.shape[1])
    parts = zip(logits.split(inputs * beam_scores.shape[1]), beam_scores.split(inputs))
    values, index = zip(*[kernel.run(functional.log_softmax(part, dim=-1), scores, k) for part, scores in parts])
    return torch.cat(values), torch.cat(index)


def best_in_one_stage(log_probs: Tensor, beam_scores: Tensor, k: int) -> Candidates:
    """Returns the best candidates for log_probs `[B * M, vocabulary_size]`, with all scores in one tensor."""
    scores = log_probs.view(*beam_scores.shape, -1) + beam_scores[:, :, None]
    values, index = torch.topk(scores.flatten(1), k=k)
    return values, index


def _can_choose(log_probs: Tensor, beam_scores: Tensor, k: int) -> bool:
    """Whether the kernel supports these tensors, for which torch has an order."""
    for tensor in (log_probs, beam_scores):
        if not tensor.is_cpu or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return False
    is_heap = 0 < k * HEAP <= beam_scores.shape[1] * log_probs.shape[1]
    return is_heap and not torch._C._len_torch_dispatch_stack()


def _choose(log_probs: Tensor, beam_scores: Tensor, k: int) -> Candidates:
    inputs, beams = beam_scores.shape
    values = beam_scores.new_empty((inputs, k))
    index = torch.empty((inputs, k), dtype=torch.int64, device="cpu")
    addresses = log_probs.data_ptr(), beam_scores.data_ptr(), values.data_ptr(), index.data_ptr()
    threads = min(inputs, simd.threads_for(log_probs.numel(), MIN_SCORES_OF_THREAD))
    function = simd.function("beam_top_k", torch.float32, _TOP_K_ARGUMENTS)
    function(*addresses, inputs, beams, log_probs.shape[1], k, threads)
    return values, index


def best_of_allowed(logits: Tensor, beam_scores: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Candidates | None:
    """Returns the best as if the log-probabilities of all but the allowed tokens were -inf.

    logits: `[B * M, vocabulary_size]`, before the softmax over all tokens. rows, tokens: the allowed pairs, `[count]`,
    sorted by row and then by token. Returns None if a log-probability is not finite, or if the order of equal scores
    may differ from torch's: on devices other than a CPU, and with large k for a small vocabulary.
    """
    if logits.device.type != "cpu" or k * HEAP > beam_scores.shape[1] * logits.shape[1] or not keeps_order():
        return best_of_different(logits, beam_scores, rows, tokens, k)
    scored = _scored(logits, beam_scores, rows, tokens)
    return None if scored is None else _best(*scored, beam_scores.shape[0], k)


def best_of_different(logits: Tensor, beam_scores: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Candidates | None:
    """Returns `best_of_allowed` for any order of equal scores; None if some of the best k + 1 are equal."""
    scored = _scored(logits, beam_scores, rows, tokens)
    if scored is None:
        return None
    values, index = _best(*scored, beam_scores.shape[0], k + 1)
    return (values[:, :k], index[:, :k]) if _differ(values) else None


def _differ(values: Tensor) -> bool:
    """Whether sorted values `[B, k]` are all different, and none is NaN."""
    return bool((values[:, 1:] < values[:, :-1]).all())


def _scored(logits: Tensor, beam_scores: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the scores, inputs and indices of the allowed tokens, `[count]`; None if a score is not finite."""
    beams, vocabulary = beam_scores.shape[1], logits.shape[1]
    log_probs = _log_probs_of(logits, rows, tokens)
    if not bool(log_probs.isfinite().all()):
        return None
    return log_probs + beam_scores.flatten()[rows], rows // beams, rows % beams * vocabulary + tokens


def _log_probs_of(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Returns the log-probabilities of these tokens of these rows, `[count]`; rows are sorted."""
    unique_rows, counts = torch.unique_consecutive(rows, return_counts=True)
    index = torch.arange(len(unique_rows), device=rows.device).repeat_interleave(counts)
    parts = []
    first_row = 0
    first = 0
    for part in unique_rows.split(_rows_of_a_part(logits)):
        end = int(torch.searchsorted(index, first_row + len(part)))
        log_probs = functional.log_softmax(logits[part], dim=-1)
        parts.append(log_probs[index[first:end] - first_row, tokens[first:end]])
        first_row = first_row + len(part)
        first = end
    return torch.cat(parts)


def _best(scores: Tensor, input_of: Tensor, indices: Tensor, inputs: int, k: int) -> Candidates:
    """Returns `torch.topk` of rows of -inf that hold `scores` at `indices`, without storing most of the -inf.

    `scores`, `input_of`, `indices`: `[count]`, sorted. torch's heap begins with the first k numbers, -inf or not; after
    those, no -inf enters it.
    """
    is_later = indices >= k
    later_counts = is_later.cumsum(0)
    # The number of later candidates of the inputs before each.
    starts = torch.searchsorted(input_of, torch.arange(inputs, device=scores.device))
    offsets = torch.where(starts > 0, later_counts[starts - 1], 0)
    columns = torch.where(is_later, k - 1 + later_counts - offsets[input_of], indices)
    width = max(HEAP * k, int(columns.max()) + 1)
    dense = scores.new_full((inputs, width), -torch.inf)
    dense[input_of, columns] = scores
    index = torch.arange(width, device=scores.device).repeat(inputs, 1)
    index[input_of, columns] = indices
    values, positions = torch.topk(dense, k=k)
    return values, index.gather(1, positions)


@probe("this torch orders equal numbers in another way")
def _chooses_as_torch() -> bool:
    """Whether this torch orders equal numbers as the kernel does."""
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randint(-9, 0, (6, 1000), generator=generator).float()
    beam_scores = torch.tensor([[-1.0, -2.0, -1e9], [0.0, -3.0, -3.0]])
    return all(map(torch.equal, _choose(log_probs, beam_scores, 16), best_in_one_stage(log_probs, beam_scores, 16)))


@probe("this torch orders equal numbers in another way")
def keeps_order() -> bool:
    """Whether this torch orders equal numbers as `_best` assumes."""
    generator = torch.Generator().manual_seed(0)
    inputs = 3
    k = 16
    length = 4 * HEAP * 16
    input_of, indices = (torch.rand(inputs, length, generator=generator) < 0.02).nonzero().unbind(1)
    scores = torch.randint(0, 5, indices.shape, generator=generator).float()
    dense = scores.new_full((inputs, length), -torch.inf)
    dense[input_of, indices] = scores
    return all(map(torch.equal, torch.topk(dense, k=k), _best(scores, input_of, indices, inputs, k)))


@functools.cache
def _reasons() -> list[str]:
    """Returns why the kernel is not used on this machine, or with this torch; empty if it is."""
    return simd.machine_reasons() or _chooses_as_torch.reasons()


KERNELS = (Kernel("C++", _reasons, _choose, "cpu", _can_choose), Kernel("torch", list, best_in_one_stage))


# Rows.


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Copies numbers of the host (int64) to the device, without waiting for it."""
    numbers = torch.tensor(values, dtype=torch.int64, device="cpu")
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def move_rows(buffers: Sequence[Tensor], beam_idx: Tensor) -> None:
    """Overwrites row i of each buffer `[layers, rows, heads, length, width]` with its row `beam_idx[i]`.

    beam_idx: `[rows]`, integers. Raises IndexError if one of them is not the index of a row.
    """
    first_supported(MOVE_KERNELS, buffers[0].device.type, buffers).run(buffers, beam_idx)


def can_move(buffers: Sequence[Tensor]) -> bool:
    """Whether the kernel supports the strides of these buffers, and no dispatch mode records calls."""
    for states in buffers:
        if not states.is_cpu or states.stride(4) != 1 or states.stride(3) != states.shape[4]:
            return False
    return not torch._C._len_torch_dispatch_stack()


def _move(buffers: Sequence[Tensor], beam_idx: Tensor) -> None:
    source = beam_idx.to("cpu", torch.int64).contiguous()
    count = buffers[0].shape[1]
    if source.shape != (count,) or not bool(((source >= 0) & (source < count)).all()):
        raise IndexError(f"beam_idx is {beam_idx.tolist()} (accepted: {count} integers from 0 to {count - 1})")
    function = simd.function("move_rows", torch.float32, _MOVE_ARGUMENTS)  # for any type
    threads = simd.threads_for(buffers[0].nbytes, MIN_BYTES_OF_THREAD)
    for states in buffers:
        (layers, rows, heads, length, width), size = states.shape, states.itemsize
        of_layer, of_row, of_head = states.stride()[:3]
        strides = (ctypes.c_int64 * 3)(of_layer * size, of_row * size, of_head * size)
        function(states.data_ptr(), source.data_ptr(), strides, layers, rows, heads, length * width * size, threads)


def _move_in_torch(buffers: Sequence[Tensor], beam_idx: Tensor) -> None:
    beam_idx = beam_idx.to(buffers[0].device)
    for states in buffers:
        states.copy_(states.index_select(1, beam_idx))


class Ancestors:
    """A table that is reordered in place of values: those of row r at position p are in row `table[r, p]`.

    table: int32 `[rows, positions]`.
    """

    def __init__(self, rows: int, positions: int, device: torch.device) -> None:
        self.table = torch.empty((rows, positions), dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)[:, None]

    def reset(self, positions: slice = slice(None)) -> None:
        """Makes the table say that each row has its own values at these positions."""
        self.table[:, positions] = self._rows[: len(self.table)]

    def reorder(self, beam_idx: Tensor, positions: slice) -> None:
        """Overwrites row i with row `beam_idx[i]` at these positions, as `move_rows` does."""
        move_rows([self.table[None, :, None, positions, None]], beam_idx)

    def select(self, rows: Tensor) -> Ancestors:
        """Returns a copy with these rows (integers), at most as many as here."""
        selected = copy.copy(self)
        selected.table = self.table.index_select(0, rows)
        return selected


def follow(ancestors: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns values `[…, heads, positions, width]` of the rows in a table `[rows, positions]`, see `Ancestors`."""
    _, heads, positions, width = values.shape
    index = ancestors[:, None, :positions, None].long().expand(-1, heads, -1, width)
    return torch.gather(values, 0, index, out=out)


MOVE_KERNELS = (Kernel("C++", simd.machine_reasons, _move, "cpu", can_move), Kernel("torch", list, _move_in_torch))
