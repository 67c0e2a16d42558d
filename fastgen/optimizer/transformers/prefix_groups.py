"""Groups of token sequences with a common prefix: what scoring computes once, and in which forwards.

`log_likelihoods` scores contexts with their continuations, in groups of contexts (`groups_of`) and `batches` of these.
`token_log_probs` scores rows, in groups of rows that take their forwards together (`Bucket`): they may be in any order,
and a beginning may end in the prompt or in the completions. Padding on the left belongs to a row: rows that begin in
different columns have nothing in common.

Tests: tests/optimizer/transformers/test_log_likelihoods.py, tests/optimizer/transformers/test_prefix_groups.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy
from torch import Tensor

from fastgen.optimizer.decoding.report import PREFILL, LeaveAlone, Reason, check

Tokens = tuple[int, ...]
Pair = tuple[Tokens, Tokens]

# How deep groups within groups are searched for.
MOST_GROUPS_WITHIN = 16


class Context(NamedTuple):
    """A context and its different continuations, all with at least one token."""

    tokens: Tokens
    continuations: list[Tokens]

    @property
    def rows(self) -> list[Tokens]:
        """The context and each continuation without its last token, which no model needs to see."""
        return [self.tokens + continuation[:-1] for continuation in self.continuations]

    @property
    def suffixes(self) -> list[Tokens]:
        """What follows the context in a forward: the different continuations without their last tokens."""
        return list(dict.fromkeys(tokens[:-1] for tokens in self.continuations if len(tokens) > 1))

    def shape(self, prefix: int) -> tuple[int, int, int]:
        """Returns the number of tokens after a prefix, the number of suffixes, and the longest suffix's length."""
        return len(self.tokens) - prefix, len(self.suffixes), max(map(len, self.suffixes), default=0)

    def parts(self, tokens: int) -> Iterator[Context]:
        """Yields parts of the context with some of its continuations: at most `tokens` tokens, or one continuation.

        Continuations of one token, which need no forward of their own, are in the first part.
        """
        short = [continuation for continuation in self.continuations if len(continuation) == 1]
        longer = [continuation for continuation in self.continuations if len(continuation) > 1]
        count = max(1, tokens // max(map(len, longer), default=1))
        for start in range(0, max(len(longer), 1), count):
            yield Context(self.tokens, [*(() if start else short), *longer[start : start + count]])


# Contexts, each with continuations that fit into a batch, and the length of their common prefix.
Group = tuple[list[Context], int]


def contexts_of(pairs: Iterable[Pair]) -> list[Context]:
    """Returns the different contexts, each with its different continuations."""
    by_context: dict[Tokens, dict[Tokens, None]] = {}
    for context, continuation in pairs:
        by_context.setdefault(context, {})[continuation] = None
    return [Context(tokens, list(found)) for tokens, found in by_context.items()]


def groups_of(contexts: list[Context], gains: Callable[[int], bool], tokens_per_batch: int) -> list[Group]:
    """Returns the contexts in groups with a common prefix, and the length of each group's prefix.

    gains: returns whether saving a number of tokens is worth an additional forward.
    """
    groups = prefix_groups([context.tokens for context in contexts], gains)

    def parts(numbers: list[int]) -> list[Context]:
        return [part for number in numbers for part in contexts[number].parts(tokens_per_batch)]

    return [(parts(group), length if len(group) > 1 and length > 1 else 0) for group, length in groups]


def prefix_groups(rows: Sequence[Sequence[int]], gains: Callable[[int], bool]) -> list[tuple[list[int], int]]:
    """Returns the numbers of rows in groups with a common prefix, and its length; at least one token follows it.

    The last group has the rows that are in no other, and is missing if there are none. gains: as in `groups_of`.
    """
    arrays = [numpy.array(row, dtype=">u4") for row in rows]
    # Sorted by words, so that adjacent rows have the most in common.
    order = sorted(range(len(rows)), key=lambda number: arrays[number].tobytes())
    common = [_common(arrays[row], arrays[next_row]) for row, next_row in pairwise(order)]
    groups: list[tuple[list[int], int]] = []

    def rest_of(start: int, end: int, depth: int = 0) -> tuple[list[int], int]:
        """Adds groups of `order[start:end]`; returns the rows in no group, and the length of their prefix."""
        alone = order[start:end]
        between = common[start : end - 1]
        length = min([*between, *(len(rows[number]) - 1 for number in alone)])
        if not between or depth == MOST_GROUPS_WITHIN:
            return alone, length
        alone = []
        least = min(between)
        cuts = [number for number, count in enumerate(between, start + 1) if count == least]
        for first, last in zip([start, *cuts], [*cuts, end]):
            rest, rest_length = rest_of(first, last, depth + 1)
            saved = (rest_length - length) * (len(rest) - 1) - length  # a group computes its whole prefix
            if saved > 0 and gains(saved):
                groups.append((rest, rest_length))
            else:
                alone += rest
        return alone, length

    rest, length = rest_of(0, len(order))
    return groups + ([(rest, length)] if rest else [])


def _common(first: numpy.ndarray, second: numpy.ndarray) -> int:
    """Returns the number of tokens that both begin with."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def batches(items: list[Any], shape_of: Callable[[Any], tuple[int, int, int]], tokens: int) -> Iterator[list[Any]]:
    """Yields these items, in order, in batches of at most `tokens` tokens with padding, or of one item.

    shape_of: returns the length of an item's first forward, and the rows and length of its second; in a batch the
    largest of each counts.
    """
    batch: list[Any] = []
    largest = (0, 0, 0)
    for item in items:
        shape = shape_of(item)
        length, rows, longest = map(max, largest, shape)
        if batch and (len(batch) + 1) * max(length, rows * longest) > tokens:
            yield batch
            batch = []
            length, rows, longest = shape
        batch.append(item)
        largest = length, rows, longest
    yield batch


# Rows of a trainer.


class Bucket(NamedTuple):
    """Rows of groups of one size, those of a group adjacent.

    split: the number of first columns that are computed once for each group; 0 for rows in no group. The column after
    them has the same token in all rows of a group, so that each token of a beginning predicts a common one. end: the
    number of columns up to the last visible one.
    """

    rows: list[int]
    groups: int
    split: int
    end: int

    @property
    def rows_per_group(self) -> int:
        return len(self.rows) // self.groups

    @property
    def saved(self) -> int:
        """The number of columns that need not be computed."""
        return (len(self.rows) - self.groups) * self.split


@check(PREFILL)
def buckets_sync(input_ids: Tensor, mask: Tensor, gains: Callable[[int], bool]) -> list[Bucket]:
    """Returns buckets that hold all rows of `[rows, length]`. Raises LeaveAlone if nothing is gained.

    gains: returns whether saving a number of tokens is worth an additional forward.
    """
    tokens = input_ids.cpu().numpy()
    visible = (mask != 0).cpu().numpy()
    starts = visible.argmax(axis=1)
    ends = visible.shape[1] - visible[:, ::-1].argmax(axis=1)
    if (visible.sum(axis=1) != ends - starts).any():
        raise LeaveAlone([Reason("PADDING_INSIDE", "the mask hides tokens between visible ones, or all of a row")])
    # The first item keeps rows apart that begin in different columns.
    rows = [[start, *row[start:end]] for row, start, end in zip(tokens, starts, ends)]
    groups, alone = [], []
    for numbers, length in prefix_groups(rows, gains):
        group = Bucket(numbers, 1, int(starts[numbers[0]]) + length - 2, int(ends[numbers].max()))
        if len(numbers) > 1 and length > 2 and gains((length - 2) * (len(numbers) - 1)):
            groups.append(group)
        else:
            alone += numbers
    if not groups:
        raise LeaveAlone([Reason("PREFIX_SHORT", "no rows begin with enough equal tokens to be worth sharing")])
    buckets = _merged(groups, gains)
    if alone:
        buckets.append(Bucket(alone, len(alone), 0, int(ends[alone].max())))
    return buckets


def _merged(groups: list[Bucket], gains: Callable[[int], bool]) -> list[Bucket]:
    """Merges groups of one size if what they have in common beyond the shortest beginning is worth no forward."""
    buckets: list[Bucket] = []
    lost = 0
    for group in sorted(groups, key=attrgetter("rows_per_group", "split")):
        merged = buckets[-1] if buckets else group
        lost += (group.split - merged.split) * (len(group.rows) - 1)
        is_alike = merged is not group and merged.rows_per_group == group.rows_per_group
        if not is_alike or (lost and gains(lost)):
            buckets.append(group)
            lost = 0
        else:
            rows = merged.rows + group.rows
            end = max(merged.end, group.end)
            buckets[-1] = Bucket(rows, merged.groups + 1, merged.split, end)
    return buckets
