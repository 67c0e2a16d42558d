"""Contexts that begin alike, in groups: what `log_likelihoods` computes once, and in which batches.

Tests: tests/optimizer/transformers/test_log_likelihoods.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy

Tokens = tuple[int, ...]
Pair = tuple[Tokens, Tokens]

# How deep groups are looked for within groups of contexts that begin alike.
MOST_GROUPS_WITHIN = 16


class Context(NamedTuple):
    """A context, and its different continuations, all with at least one token."""

    tokens: Tokens
    continuations: list[Tokens]

    @property
    def rows(self) -> list[Tokens]:
        """What a model gets to see of each continuation: all but its last token, whose successor nobody asks for."""
        return [self.tokens + continuation[:-1] for continuation in self.continuations]

    @property
    def behind(self) -> list[Tokens]:
        """What follows the context in a forward: the different continuations without their last tokens."""
        return list(dict.fromkeys(one[:-1] for one in self.continuations if len(one) > 1))

    def shape(self, prefix: int) -> tuple[int, int, int]:
        """The number of tokens after the prefix, of different `behind`, and of tokens of the longest of these."""
        return len(self.tokens) - prefix, len(self.behind), max(map(len, self.behind), default=0)

    def parts(self, tokens: int) -> Iterator[Context]:
        """Yields the context with some of its continuations at a time: at most this many tokens, or one continuation.

        Continuations of one token, which need no forward of their own, come with the first.
        """
        short = [one for one in self.continuations if len(one) == 1]
        longer = [one for one in self.continuations if len(one) > 1]
        count = max(1, tokens // max(map(len, longer), default=1))
        for start in range(0, max(len(longer), 1), count):
            yield Context(self.tokens, [*(() if start else short), *longer[start : start + count]])


# Contexts, each with as many continuations as fit into a batch, and how many tokens all of them begin with.
Group = tuple[list[Context], int]


def contexts_of(pairs: Iterable[Pair]) -> list[Context]:
    by_context: dict[Tokens, dict[Tokens, None]] = {}
    for context, continuation in pairs:
        by_context.setdefault(context, {})[continuation] = None
    return [Context(tokens, list(found)) for tokens, found in by_context.items()]


def groups_of(contexts: list[Context], gains: Callable[[int], bool], tokens_per_batch: int) -> list[Group]:
    """The contexts in groups that begin alike, and how many tokens those of each begin with.

    gains: whether so many tokens that need not be computed are worth a forward more.
    """
    arrays = [numpy.array(context.tokens, dtype=">u4") for context in contexts]
    order = sorted(range(len(contexts)), key=lambda number: arrays[number].tobytes())  # of words: most in common
    ordered = [contexts[number] for number in order]
    common = [_common(arrays[one], arrays[other]) for one, other in pairwise(order)]
    groups: list[Group] = []

    def rest_of(start: int, end: int, depth: int = 0) -> Group:
        """Adds groups of `ordered[start:end]`; returns what is in none, and how many tokens that has in common."""
        found, between = ordered[start:end], common[start : end - 1]
        length = min([*between, *(len(context.tokens) - 1 for context in found)])  # each has one more at least
        if not between or depth == MOST_GROUPS_WITHIN:
            return found, length
        found, least = [], min(between)
        cuts = [number for number, count in enumerate(between, start + 1) if count == least]
        for first, last in zip([start, *cuts], [*cuts, end]):
            rest, own = rest_of(first, last, depth + 1)
            saved = (own - length) * (len(rest) - 1) - length  # a group computes its prefix from the first token on
            if saved > 0 and gains(saved):
                groups.append((rest, own))
            else:
                found += rest
        return found, length

    rest, length = rest_of(0, len(ordered))
    groups += [(rest, length)] if rest else []

    def parts(group: list[Context]) -> list[Context]:
        return [part for context in group for part in context.parts(tokens_per_batch)]

    return [(parts(group), length if len(group) > 1 and length > 1 else 0) for group, length in groups]


def _common(one: numpy.ndarray, other: numpy.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def batches(items: list[Any], shape_of: Callable[[Any], tuple[int, int, int]], tokens: int) -> Iterator[list[Any]]:
    """Yields these items, in their order, in batches of so many tokens, padding included; at least one item each.

    shape_of: returns of an item the length of its first forward, and rows and length of its second; in a batch the
    largest of each counts.
    """
    batch: list[Any] = []
    largest = (0, 0, 0)
    for item in items:
        shape = shape_of(item)
        length, rows, longest = map(max, largest, shape)
        if batch and (len(batch) + 1) * max(length, rows * longest) > tokens:
            yield batch
            batch, (length, rows, longest) = [], shape
        batch.append(item)
        largest = length, rows, longest
    yield batch
