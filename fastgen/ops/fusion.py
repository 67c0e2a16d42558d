"""Fusion: finds patterns among the recorded calls of torch, and replaces each by one call of a kernel.

    Op(mul, (Op(rsqrt, …), Name("weight")), commutes=True)      arguments of a call are patterns again

A match is replaced if nothing outside uses its intermediate results, no call writes between its first and its last
one, and none of its calls is part of an earlier match. A pattern says what is computed; its `Fusion.replace` says
whether the kernel supports these tensors.

Tests: tests/ops/test_rms_norm.py, tests/ops/test_layer_norm.py, tests/ops/test_cpu_graph.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgen.ops.tracing import TracedCall

Values = dict[str, Any]


class Name(str):
    """A pattern of any argument, which is the same one wherever the name occurs."""


@dataclass(frozen=True)
class Op:
    """A pattern of a call of one of these operations.

    arguments: patterns of its first arguments; what is neither `Op` nor `Name` must be equal. commutes: whether the
    first two may be swapped. is_optional: whether its first argument may be there instead, as for conversions. name:
    of its result.
    """

    operations: tuple[torch._ops.OpOverload, ...]
    arguments: tuple[Any, ...]
    commutes: bool = False
    is_optional: bool = False
    name: str = ""


class Fusion(NamedTuple):
    """replace: gets the named values and the last call; returns the call instead of all, None if unsupported.

    The call may have only the first outputs of the last one.
    """

    pattern: Op
    replace: Callable[[Values, TracedCall], TracedCall | None]


class Match(NamedTuple):
    """values: by their names. parts: the numbers of the calls."""

    values: Values
    parts: frozenset[int]


def fused(calls: list[TracedCall], output: Any, fusions: Sequence[Fusion]) -> list[TracedCall]:
    """Returns the calls with each match replaced by one call; output: the return value of the recorded function."""
    matcher = Matcher(calls, output)
    replacements: dict[int, TracedCall] = {}
    removed: set[int] = set()
    for number, call in enumerate(calls):
        for fusion in fusions:
            if call.operation in fusion.pattern.operations:
                match, replacement = matcher.replacement_of(number, fusion)
                if match is not None and replacement is not None and not match.parts & (replacements.keys() | removed):
                    replacements[number] = replacement
                    removed |= match.parts - {number}
                    break
    return [replacements.get(number, call) for number, call in enumerate(calls) if number not in removed]


class Matcher:
    """Recorded calls, by the tensors that they compute.

    uses: how often calls read each tensor and the recorded function returns it, by the tensor's `id`.
    """

    def __init__(self, calls: list[TracedCall], output: Any) -> None:
        self.calls = calls
        numbered = [(number, call) for number, call in enumerate(calls) if not call.returns_argument]
        self.uses = Counter(id(tensor) for _, call in numbered for tensor in call.read)
        self.uses.update(map(id, tree_leaves(output)))
        self.producer_of = {id(tensor): number for number, call in numbered for tensor in call.outputs}

    def replacement_of(self, number: int, fusion: Fusion) -> tuple[Match | None, TracedCall | None]:
        """Returns the first match that ends with this call and can be replaced, and the call instead of it."""
        for match in self._of_call(fusion.pattern, number, Match({}, frozenset())):
            replacement = fusion.replace(match.values, self.calls[number]) if self._is_alone(match, number) else None
            if replacement is not None and not self._computes(match.parts - {number}, replacement.read):
                lost = self.calls[number].outputs[len(replacement.outputs) :]
                if not any(self.uses[id(tensor)] for tensor in lost):
                    return match, replacement
        return None, None

    def _computes(self, parts: Collection[int], tensors: list[Tensor]) -> bool:
        """Whether one of these calls computes one of the tensors, as in the sum of a product with itself."""
        return any(self.producer_of.get(id(tensor)) in parts for tensor in tensors)

    def _is_alone(self, match: Match, last: int) -> bool:
        """Whether nothing outside uses intermediate results, and nothing is written in between."""
        inside = Counter(id(tensor) for part in match.parts for tensor in self.calls[part].read)
        results = [tensor for part in match.parts - {last} for tensor in self.calls[part].outputs]
        is_written = any(call.writes for call in self.calls[min(match.parts) : last])
        return not is_written and all(inside[id(tensor)] == self.uses[id(tensor)] for tensor in results)

    def _of_value(self, pattern: Any, value: Any, match: Match) -> Iterator[Match]:
        if isinstance(pattern, Name):
            if match.values.get(pattern, value) is value:
                yield match._replace(values={**match.values, pattern: value})
        elif not isinstance(pattern, Op):
            if type(value) is type(pattern) and value == pattern:
                yield match
        else:
            if pattern.is_optional:
                yield from self._of_value(pattern.arguments[0], value, match)
            number = self.producer_of.get(id(value), -1)
            if number >= 0 and self.calls[number].operation in pattern.operations:
                yield from self._of_call(pattern, number, match)

    def _of_call(self, pattern: Op, number: int, match: Match) -> Iterator[Match]:
        call = self.calls[number]
        named = {pattern.name: self.calls[number].result} if pattern.name else {}
        if call.kwargs and not pattern.is_optional:
            return
        match = Match({**match.values, **named}, match.parts | {number})
        first, second, *rest = (*call.args, None, None)
        for arguments in [call.args, (second, first, *rest)] if pattern.commutes else [call.args]:
            if len(call.args) >= len(pattern.arguments):
                yield from self._of_values(pattern.arguments, arguments, match)

    def _of_values(self, patterns: Sequence[Any], values: Sequence[Any], match: Match) -> Iterator[Match]:
        if not patterns:
            yield match
            return
        for bound in self._of_value(patterns[0], values[0], match):
            yield from self._of_values(patterns[1:], values[1:], bound)
