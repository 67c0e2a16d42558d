"""Keys or values of many rows as one tensor that is stored in two parts, shared and own.

`TwoPartStates` has the shape of the tensor that a model expects from its cache, `[rows, kv_heads, length, head_dim]`,
but no storage of that size. The operations of which attention is made (`scaled_dot_product_attention`, `matmul`, the
transposition before it, the repetition of grouped heads) work on the parts; every other operation gets the whole
tensor, so that code which does something else with its keys stays right. Because the recognition happens at torch's
operations, no model and no attention function of a host library has to be known or patched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from fastgen.ops.shared_attention import query_key_scores, shared_attention, weighted_values

# The forms in which a model holds its keys on the way into the product with the queries.
PLAIN = "plain"  # [rows, kv_heads, length, head_dim]
TRANSPOSED = "transposed"  # [rows, kv_heads, head_dim, length]
UNSQUEEZED = "unsqueezed"  # [rows, kv_heads, 1, length, head_dim]: repeat_kv, first step
EXPANDED = "expanded"  # [rows, kv_heads, groups, length, head_dim]: repeat_kv, second step


class TwoPartStates(Tensor):
    """Keys or values `[inputs * fan_out, kv_heads, shared_length + own_length, head_dim]` kept in two parts.

    shared: `[inputs, kv_heads, shared_length, head_dim]`, the same for the `fan_out` rows of an input.
    own: `[inputs * fan_out, kv_heads, own_length, head_dim]`, or None where nothing is a row's own.
    by_row: makes the cache keep these states row by row and returns them, `[rows, kv_heads, length, head_dim]`.
    usage: counts which operation worked on the parts, and which asked for the whole tensor (`whole: NAME`).
    """

    shared: Tensor
    own: Tensor | None
    fan_out: int
    usage: Counter[str]
    form: str
    groups: int
    by_row: Callable[[], Tensor] | None

    @staticmethod
    def __new__(
        cls,
        shared: Tensor,
        own: Tensor | None,
        fan_out: int,
        usage: Counter[str],
        form: str = PLAIN,
        groups: int = 1,
        by_row: Callable[[], Tensor] | None = None,
    ) -> TwoPartStates:
        inputs, heads, length, width = shared.shape
        rows, length = inputs * fan_out, length + (0 if own is None else own.shape[2])
        size = {
            PLAIN: (rows, heads * groups, length, width),
            TRANSPOSED: (rows, heads * groups, width, length),
            UNSQUEEZED: (rows, heads, 1, length, width),
            EXPANDED: (rows, heads, groups, length, width),
        }[form]
        self = Tensor._make_wrapper_subclass(cls, size, dtype=shared.dtype, device=shared.device)
        self.shared, self.own, self.fan_out, self.usage = shared, own, fan_out, usage
        self.form, self.groups, self.by_row = form, groups, by_row
        return self

    def with_form(self, form: str, groups: int | None = None) -> TwoPartStates:
        groups = self.groups if groups is None else groups
        return TwoPartStates(self.shared, self.own, self.fan_out, self.usage, form, groups, self.by_row)

    def whole(self) -> Tensor:
        """The tensor in one piece, `[rows, …]` in its form; costs what the parts were meant to save."""
        states = self.shared if self.fan_out == 1 else self.shared.repeat_interleave(self.fan_out, dim=0)
        if self.own is not None:
            states = torch.cat([states, self.own], dim=2)
        if self.form == UNSQUEEZED:
            return states.unsqueeze(2)
        if self.form == EXPANDED:
            return states.unsqueeze(2).expand(-1, -1, self.groups, -1, -1)
        states = states.repeat_interleave(self.groups, dim=1) if self.groups > 1 else states
        return states.transpose(2, 3) if self.form == TRANSPOSED else states

    def become_rows(self) -> None:
        """Stands on the cache's own storage from here on, one part per row, so that views of it and writes are real."""
        if self.fan_out > 1 and self.by_row is not None:
            self.shared, self.own, self.fan_out = self.by_row(), None, 1

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        return _on_whole(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Reached by code that bypasses __torch_function__; there is no storage to read, so it gets the whole tensor.
        return _on_whole(func, args, kwargs or {})


def _on_whole(func: Callable, args: tuple, kwargs: dict) -> Any:
    def whole(states: TwoPartStates) -> Tensor:
        states.usage[f"whole: {getattr(func, '__name__', func)}"] += 1
        states.become_rows()
        return states.whole()

    args, kwargs = tree_map_only(TwoPartStates, whole, (args, kwargs))
    return func(*args, **kwargs)


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
    parts = isinstance(key, TwoPartStates) and isinstance(value, TwoPartStates) and type(query) is not TwoPartStates
    if not parts or dropout_p or is_causal or key.form != PLAIN or value.form != PLAIN:
        return NotImplemented
    if key.fan_out != value.fan_out or key.shared.shape[2] != value.shared.shape[2]:
        return NotImplemented
    heads_fit = enable_gqa or key.shape[1] in (1, query.shape[1])  # a single key head is broadcast
    if not _rows_fit(query, key) or not heads_fit:
        return NotImplemented
    key.usage["scaled_dot_product_attention"] += 1
    return shared_attention(query, (key.shared, key.own), (value.shared, value.own), key.fan_out, attn_mask, scale)


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    if isinstance(left, TwoPartStates) or not _rows_fit(left, right) or left.shape[3] != right.shape[2]:
        return NotImplemented
    if right.shape[1] not in (1, left.shape[1]):
        return NotImplemented
    right.usage["matmul"] += 1
    if right.form == TRANSPOSED:
        return query_key_scores(left, right.shared, right.own, right.fan_out)
    return weighted_values(left, right.shared, right.own, right.fan_out)


def _rows_fit(rows: Tensor, states: TwoPartStates) -> bool:
    """Whether `rows` is `[rows, heads, …, …]` with the rows of `states` and heads that its heads divide."""
    fits = rows.dim() == 4 and states.dim() == 4 and rows.shape[0] == states.shape[0]
    return fits and rows.shape[1] % states.shared.shape[1] == 0 and rows.dtype == states.dtype


def _transpose(states: TwoPartStates, dim0: int, dim1: int) -> Tensor:
    if states.dim() != 4 or {dim0 % 4, dim1 % 4} != {2, 3}:
        return NotImplemented
    return states.with_form(TRANSPOSED if states.form == PLAIN else PLAIN)


def _getitem(states: TwoPartStates, index: Any) -> Tensor:
    everything = slice(None)
    if states.form == PLAIN and states.groups == 1 and isinstance(index, tuple):
        kinds = [item is None or (isinstance(item, slice) and item == everything) for item in index]
        if all(kinds) and len(index) in (3, 5) and index[2] is None and index.count(None) == 1:
            return states.with_form(UNSQUEEZED)
    return NotImplemented


def _expand(states: TwoPartStates, *sizes: Any) -> Tensor:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if states.form != UNSQUEEZED or len(sizes) != 5:
        return NotImplemented
    kept = [wanted in (-1, size) for position, (wanted, size) in enumerate(zip(sizes, states.shape)) if position != 2]
    return states.with_form(EXPANDED, groups=sizes[2]) if all(kept) and sizes[2] > 0 else NotImplemented


def _reshape(states: TwoPartStates, *sizes: Any) -> Tensor:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    plain = states.with_form(PLAIN)
    if states.form not in (PLAIN, EXPANDED) or sizes != tuple(plain.shape):
        return NotImplemented
    return plain


def _repeat_interleave(states: TwoPartStates, repeats: Any, dim: int | None = None, **kwargs: Any) -> Tensor:
    if states.form != PLAIN or dim not in (1, -3) or kwargs or not isinstance(repeats, int):
        return NotImplemented
    return states.with_form(PLAIN, groups=states.groups * repeats)


def _to(states: TwoPartStates, *args: Any, **kwargs: Any) -> Tensor:
    own = None if states.own is None else states.own.to(*args, **kwargs)
    shared = states.shared.to(*args, **kwargs)
    if shared is states.shared:
        return states
    return TwoPartStates(shared, own, states.fan_out, states.usage, states.form, states.groups)


def _same(states: TwoPartStates, *args: Any, **kwargs: Any) -> Tensor:
    return NotImplemented if args or kwargs else states


_HANDLERS: dict[Callable, Callable] = {
    functional.scaled_dot_product_attention: _sdpa,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.transpose: _transpose,
    Tensor.transpose: _transpose,
    Tensor.mT.__get__: lambda states: _transpose(states, 2, 3),
    Tensor.__getitem__: _getitem,
    Tensor.expand: _expand,
    Tensor.reshape: _reshape,
    torch.repeat_interleave: _repeat_interleave,
    Tensor.repeat_interleave: _repeat_interleave,
    Tensor.to: _to,
    Tensor.contiguous: _same,
    Tensor.detach: _same,
}

_METADATA: frozenset[Callable] = frozenset(
    (
        Tensor.shape.__get__,
        Tensor.dtype.__get__,
        Tensor.device.__get__,
        Tensor.ndim.__get__,
        Tensor.requires_grad.__get__,
        Tensor.is_cuda.__get__,
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
    )
)
