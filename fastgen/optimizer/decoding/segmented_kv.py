"""Keys or values of many rows as one tensor that is stored in segments.

`SegmentedKV` has the shape of the tensor that a model expects from its cache, `[rows, kv_heads, length, head_dim]`, but
no storage of that size:

    row 0   | prefix 0 | prompt 0 | generated 0 |        prefix      [1, kv_heads, P, head_dim]
    row 1   | prefix 0 | prompt 0 | generated 1 |        prompt      [inputs, kv_heads, S, head_dim]
    row 2   | prefix 0 | prompt 1 | generated 2 |        generated   [rows, kv_heads, t, head_dim]
    row 3   | prefix 0 | prompt 1 | generated 3 |

The operations of attention (`scaled_dot_product_attention`, `matmul`, the transposition before it, the repetition of
grouped heads) work on the segments. Every other operation materializes the tensor: it gets memory of its own, which
replaces the segments from then on, so that addresses, views and writes are real. Because torch's operations are
intercepted, no model and no attention function of a host library must be known or patched.

Tests: tests/optimizer/decoding/test_segmented_kv.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from fastgen.ops.shared_attention import (
    Bounds,
    follow_ancestors,
    query_key_scores,
    shared_attention,
    weighted_values,
)
from fastgen.optimizer.decoding.report import MATERIALIZED

KV = tuple[Tensor, ...]  # keys and values
Function = Callable[..., Any]

# The forms that keys take on their way into the product with the queries.
PLAIN = "plain"  # [rows, kv_heads, length, head_dim]
TRANSPOSED = "transposed"  # [rows, kv_heads, head_dim, length]
UNSQUEEZED = "unsqueezed"  # [rows, kv_heads, 1, length, head_dim]: repeat_kv, first step
EXPANDED = "expanded"  # [rows, kv_heads, groups, length, head_dim]: repeat_kv, second step
FLAT = "flat"  # [rows * kv_heads, length, head_dim]: for a batched product in three dimensions
FLAT_TRANSPOSED = "flat, transposed"  # [rows * kv_heads, head_dim, length]

# The names under which `usage` counts products that work on segments.
OPERATIONS = SDPA, MATMUL, BMM = "scaled_dot_product_attention", "matmul", "bmm"

_TRANSPOSES = {PLAIN: TRANSPOSED, TRANSPOSED: PLAIN, FLAT: FLAT_TRANSPOSED, FLAT_TRANSPOSED: FLAT}


class SegmentedKV(Tensor):
    """Keys or values `[rows, kv_heads * groups, length, head_dim]` stored in segments.

    stored: one or more segments, whose lengths sum to `length`; each is `[copies, kv_heads, its length, head_dim]`, and
        its copy `c` belongs to the `rows // copies` rows from `c * rows // copies` on.
    usage: counts the operations that worked on the segments, and those that materialized the tensor (`MATERIALIZED` and
        the name).
    groups: how often each head is repeated.
    base: the tensor that this one views in another form; None if it is not a view.
    bounds: for kernels, see `Bounds`; None if there is no spare capacity to hide.
    memory: the materialized tensor, `[rows, kv_heads * groups, length, head_dim]`, or None. Once it is set, the
        segments are outdated.
    """

    stored: tuple[Tensor, ...]
    rows: int
    usage: Counter[str]
    form: str
    groups: int
    base: SegmentedKV | None
    memory: Tensor | None
    bounds: Bounds | None

    @staticmethod
    def __new__(
        cls,
        segments: tuple[Tensor, ...],
        rows: int,
        usage: Counter[str],
        form: str = PLAIN,
        groups: int = 1,
        base: SegmentedKV | None = None,
        bounds: Bounds | None = None,
    ) -> SegmentedKV:
        first = segments[0]
        _, heads, length, width = first.shape
        for segment in segments[1:]:
            length += segment.shape[2]
        block = length * width
        size, strides = {
            PLAIN: ((rows, heads * groups, length, width), (heads * groups * block, block, width, 1)),
            TRANSPOSED: ((rows, heads * groups, width, length), (heads * groups * block, block, 1, width)),
            UNSQUEEZED: ((rows, heads, 1, length, width), (heads * block, block, block, width, 1)),
            EXPANDED: ((rows, heads, groups, length, width), (heads * block, block, 0, width, 1)),
            FLAT: ((rows * heads * groups, length, width), (block, width, 1)),
            FLAT_TRANSPOSED: ((rows * heads * groups, width, length), (block, 1, width)),
        }[form]
        self: SegmentedKV = Tensor._make_wrapper_subclass(cls, size, strides, dtype=first.dtype, device=first.device)
        self.stored, self.rows, self.usage = segments, rows, usage
        self.form = form
        self.groups = groups
        self.base = base
        self.memory = None
        self.bounds = bounds
        self._size = torch.Size(size)
        return self

    # Attributes that attention reads often; a tensor's own would take microseconds each.
    shape = property(lambda self: self._size)
    ndim = property(lambda self: len(self._size))
    dtype = property(lambda self: self.stored[0].dtype)
    device = property(lambda self: self.stored[0].device)

    def dim(self) -> int:
        return len(self._size)

    def size(self, dim: int | None = None) -> Any:
        return self._size if dim is None else self._size[dim]

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """The segments as attention without a table of ancestors reads them."""
        return follow_ancestors(self.stored, self.bounds)

    @property
    def is_segmented(self) -> bool:
        """Whether the segments are up to date: the tensor was not materialized, so nothing has written into it."""
        return (self if self.base is None else self.base).memory is None

    def view_as_form(self, form: str, groups: int = 1) -> SegmentedKV:
        """Returns the same tensor in another form, which shares its memory as a view does."""
        base = self if self.base is None else self.base
        return SegmentedKV(self.stored, self.rows, self.usage, form, groups, base, self.bounds)

    def materialize(self) -> Tensor:
        """Returns the tensor in one piece, `[rows, …]` in its form; this costs what the segments were to save."""
        if self.base is not None:
            memory = self.base.materialize()
            if self.form in (FLAT, FLAT_TRANSPOSED):
                memory = memory.flatten(0, 1)
            if self.form in (TRANSPOSED, FLAT_TRANSPOSED):
                return memory.transpose(-2, -1)
            if self.form in (UNSQUEEZED, EXPANDED):
                return memory.unsqueeze(2).expand(self.shape)
            return memory
        if self.memory is None:
            segments = self.segments
            is_whole = len(segments) == 1 and segments[0].shape[0] == self.rows
            self.memory = segments[0] if is_whole else materialized(segments, self.rows)
            if self.groups > 1:
                self.memory = self.memory.repeat_interleave(self.groups, dim=1)
        return self.memory

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, SegmentedKV) and not arg.is_segmented:
                handler = None
        try:
            result = NotImplemented if handler is None else handler(*args, **kwargs)
        except (TypeError, AttributeError):  # arguments that the handler does not support (`out`, …)
            result = NotImplemented
        return _on_materialized(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached by code that bypasses __torch_function__; there is no storage to read, so the tensor is materialized.
        return _on_materialized(func, args, kwargs or {})


def _on_materialized(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def materialize(states: SegmentedKV) -> Tensor:
        states.usage[f"{MATERIALIZED}{getattr(func, '__name__', func)}"] += 1
        return states.materialize()

    args, kwargs = tree_map_only(SegmentedKV, materialize, (args, kwargs))
    return func(*args, **kwargs)


def repeated(pair: KV, rows: int) -> KV:
    """Returns a copy of a segment's keys and values with one copy for each row."""
    return tuple(_repeated_states(states, rows) for states in pair)


def _repeated_states(states: Tensor, rows: int) -> Tensor:
    return states.repeat_interleave(rows // states.shape[0], dim=0)


def materialized(segments: Iterable[Tensor], rows: int) -> Tensor:
    """Returns segments as one tensor `[rows, kv_heads, length, head_dim]` in memory of its own."""
    by_row = [segment if segment.shape[0] == rows else _repeated_states(segment, rows) for segment in segments]
    return torch.cat(by_row, dim=2)


def length_of(segments: Iterable[KV]) -> int:
    """Returns the number of positions in these segments."""
    length = 0
    for keys, _ in segments:
        length += keys.shape[2]
    return length


def in_segments(
    segments: Sequence[KV], rows: int, usage: Counter[str], bounds: Bounds | None = None, is_plain: bool = True
) -> KV:
    """Returns keys and values `[rows, kv_heads, length, head_dim]` backed by these segments, see `SegmentedKV`.

    is_plain: whether one segment with all rows is returned as it is, a tensor of torch.
    """
    if is_plain and len(segments) == 1 and segments[0][0].shape[0] == rows and bounds is None:
        return segments[0]
    keys, values = zip(*segments)
    return SegmentedKV(keys, rows, usage, bounds=bounds), SegmentedKV(values, rows, usage, bounds=bounds)


def cut(pair: KV, start: int, end: int | None) -> KV:
    """Returns the positions from `start` to `end` as views."""
    keys, values = pair
    return keys[:, :, start:end], values[:, :, start:end]


# Handlers of operations on segments. They return NotImplemented if the tensor must be materialized. Arguments that are
# a SegmentedKV are segmented.


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not isinstance(key, SegmentedKV) or not isinstance(value, SegmentedKV) or dropout_p or is_causal:
        return NotImplemented
    if key.form != PLAIN or value.form != PLAIN or not _rows_fit(query, key):
        return NotImplemented
    if not enable_gqa and key.shape[1] not in (1, query.shape[1]):  # a single key head is broadcast
        return NotImplemented
    for keys, values in zip_longest(key.stored, value.stored):
        if keys is None or values is None or keys.shape[:3] != values.shape[:3]:
            return NotImplemented
    key.usage[SDPA] += 1
    return shared_attention(query, key.stored, value.stored, attn_mask, scale, key.bounds)


def _matmul(input: Tensor, other: SegmentedKV) -> Tensor:
    if not _rows_fit(input, other) or input.shape[3] != other.shape[2] or other.shape[1] not in (1, input.shape[1]):
        return NotImplemented
    other.usage[MATMUL] += 1
    return (query_key_scores if other.form == TRANSPOSED else weighted_values)(input, other.segments)


def _bmm(input: Tensor, mat2: SegmentedKV) -> Tensor:
    if isinstance(input, SegmentedKV) or mat2.form not in (FLAT, FLAT_TRANSPOSED) or input.dtype != mat2.dtype:
        return NotImplemented
    if input.dim() != 3 or input.shape[0] != mat2.shape[0] or input.shape[2] != mat2.shape[1]:
        return NotImplemented
    mat2.usage[BMM] += 1
    multiply = query_key_scores if mat2.form == FLAT_TRANSPOSED else weighted_values
    return multiply(input.unflatten(0, (mat2.rows, -1)), mat2.segments).flatten(0, 1)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: SegmentedKV, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = NotImplemented if isinstance(input, SegmentedKV) else _bmm(batch1, batch2)
    return product if product is NotImplemented else beta * input + alpha * product


def _rows_fit(rows: Any, states: Any) -> bool:
    """Whether `rows` is `[rows, heads, …, …]` with the rows of `states` and heads that its heads divide."""
    if not isinstance(states, SegmentedKV) or not isinstance(rows, Tensor) or type(rows) is SegmentedKV:
        return False
    fits = rows.dim() == 4 and states.dim() == 4 and rows.shape[0] == states.shape[0]
    return fits and rows.shape[1] % states.stored[0].shape[1] == 0 and rows.dtype == states.dtype


def _transpose(input: SegmentedKV, dim0: int, dim1: int) -> Tensor:
    dims = input.dim()
    if input.form not in _TRANSPOSES or {dim0 % dims, dim1 % dims} != {dims - 2, dims - 1}:
        return NotImplemented
    return input.view_as_form(_TRANSPOSES[input.form], input.groups)


def _getitem(states: SegmentedKV, index: Any) -> Tensor:
    everything = slice(None)
    added = isinstance(index, tuple) and len(index) in (3, 5) and index[2] is None
    rest = (*index[:2], *index[3:]) if added else ()
    is_plain = states.form == PLAIN and states.groups == 1
    if is_plain and added and all(isinstance(item, slice) and item == everything for item in rest):
        return states.view_as_form(UNSQUEEZED)
    return NotImplemented


def _expand(states: SegmentedKV, *size: Any) -> Tensor:
    size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if states.form != UNSQUEEZED or len(size) != 5 or size[2] <= 0:
        return NotImplemented
    fits = all(wanted in (-1, now) for dim, (wanted, now) in enumerate(zip(size, states.shape)) if dim != 2)
    return states.view_as_form(EXPANDED, size[2]) if fits else NotImplemented


def _reshape(states: SegmentedKV, *shape: Any) -> Tensor:
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    rows, heads, *rest = states.shape
    if states.form == PLAIN and shape in ((rows * heads, *rest), (rows * heads, -1, rest[-1])):
        return states.view_as_form(FLAT, states.groups)
    if states.form == EXPANDED and shape == (rows, heads * states.groups, *rest[1:]):
        return _repeated(states, states.groups) if states.groups > 1 else states.view_as_form(PLAIN)
    return states if states.form in (PLAIN, EXPANDED) and shape == states.shape else NotImplemented


def _repeat_interleave(input: SegmentedKV, repeats: Any, dim: int | None = None) -> Tensor:
    if input.form != PLAIN or dim not in (1, -3) or not isinstance(repeats, int) or repeats < 1:
        return NotImplemented
    return _repeated(input, input.groups * repeats)


def _repeated(states: SegmentedKV, groups: int) -> SegmentedKV:
    """Returns a copy with `groups` times the stored heads; torch would allocate memory for it."""
    return SegmentedKV(states.stored, states.rows, states.usage, PLAIN, groups, bounds=states.bounds)


def _to(states: SegmentedKV, *args: Any, **kwargs: Any) -> Tensor:
    if states.form != PLAIN:
        return NotImplemented
    segments = tuple(segment.to(*args, **kwargs) for segment in states.stored)
    if segments[0] is states.stored[0]:
        return states
    return SegmentedKV(segments, states.rows, states.usage, groups=states.groups, bounds=states.bounds)


def _same(states: SegmentedKV) -> Tensor:
    return states if states.form == PLAIN else NotImplemented


_HANDLERS: dict[Function, Function] = {
    functional.scaled_dot_product_attention: _sdpa,
    Tensor.__matmul__: _matmul,
    Tensor.mT.__get__: lambda states: _transpose(states, -2, -1),
    Tensor.__getitem__: _getitem,
    Tensor.expand: _expand,
    Tensor.reshape: _reshape,
    Tensor.to: _to,
    Tensor.contiguous: _same,
    Tensor.detach: _same,
}
for _handler in (_matmul, _bmm, _baddbmm, _transpose, _repeat_interleave):  # as functions and as methods
    _HANDLERS |= {getattr(owner, _handler.__name__[1:]): _handler for owner in (torch, Tensor)}

# Attributes and methods that the wrapper answers itself, since it has the shape, strides and dtype of the tensor.
_METADATA: frozenset[Function] = frozenset(
    attribute if callable(attribute) else attribute.__get__
    for attribute in (
        Tensor.shape, Tensor.dtype, Tensor.device, Tensor.layout, Tensor.ndim, Tensor.itemsize, Tensor.nbytes,
        Tensor.requires_grad, Tensor.grad, Tensor.grad_fn, Tensor.is_leaf, Tensor.is_cuda, Tensor.is_cpu,
        Tensor.is_meta, Tensor.is_sparse, Tensor.is_quantized, Tensor.is_nested,
        Tensor.size, Tensor.stride, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size,
        Tensor.storage_offset, Tensor.get_device, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex,
        Tensor.__len__, Tensor.__hash__, torch.numel, torch.is_floating_point, torch.is_complex,
    )
)  # fmt: skip
