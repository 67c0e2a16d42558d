"""Drafts: the tokens after the last occurrence of the longest suffix, and when they are worth checking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen.optimizer.decoding import drafts, static_kv_cache
from fastgen.optimizer.decoding.drafts import LONGEST_MATCH, Drafts, Text

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def definition(tokens: list[int]) -> tuple[int | None, int]:
    """Returns the start of the draft after the longest match of the suffix (the last of equal ones), and its length."""
    best = None, 0
    for start in range(1, len(tokens)):
        length = 0
        while length < min(start, LONGEST_MATCH) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= 1 and length >= best[1]:
            best = start, length
    return best


@given(TOKENS)
def test_a_text_is_matched_as_defined(tokens):
    text = Text(tokens)
    assert (text.start, text.length) == definition(tokens)


@given(TOKENS, TOKENS)
def test_a_match_that_goes_on_is_followed(first, then):
    text = Text(first)
    for token in then:
        start, length = text.start, text.length
        goes_on = start is not None and text.tokens[start] == token
        text.append(token)
        if goes_on:
            assert (text.start, text.length) == (start + 1, min(length + 1, LONGEST_MATCH))
        else:
            assert (text.start, text.length) == definition(text.tokens)
        if text.start is not None:
            assert text.tokens[text.start - text.length : text.start] == text.tokens[-text.length :]


def test_the_search_is_bounded(monkeypatch):
    monkeypatch.setattr(drafts, "MOST_OCCURRENCES", 2)
    assert Text([9, 1, 2, 5, 1, 2, 6, 1, 2, 7, 9, 1, 2]).start == 9  # the longest match is not among the last two


def test_a_draft_repeats_what_the_text_ends_with():
    assert Text([1, 2, 3, 1, 2]).draft(7) == [3, 1, 2, 3, 1, 2, 3]
    assert Text([4, 7, 7, 7]).draft(3) == [7, 7, 7]
    assert Text([1, 2, 3]).draft(3) == []


def repeating(rows: int = 1) -> list[Text]:
    return [Text([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]) for _ in range(rows)]


def test_the_size_is_the_one_that_makes_most_tokens_in_a_time():
    assert [len(row) for row in Drafts(repeating(2), lambda rows, size: 1.0).propose(8)] == [7, 7]
    assert [len(row) for row in Drafts(repeating(), lambda rows, size: 0.7 + size / 5).propose(8)] == [1]
    assert Drafts(repeating(), lambda rows, size: 2.0 * size).propose(8) == []
    assert Drafts(repeating(), lambda rows, size: 1.0).propose(1) == []
    assert len(Drafts(repeating(), lambda rows, size: 1.0).propose(7)[0]) == 3


def test_a_row_without_match_ends_all_drafts():
    assert Drafts([*repeating(2), Text([1, 2, 3])], lambda rows, size: 1.0).propose(8) == []


def test_matches_that_are_wrong_are_not_checked_for_long():
    looked_at = Drafts([Text([1, 2] * 3)], lambda rows, size: 1.2)
    proposed = []
    for number in range(40):  # the pair has been followed by each token once, and never by the same again
        for token in (100 + number, 1, 2):
            looked_at.append([token])
        proposed.append(bool(looked_at.propose(8)))
    assert proposed[0] and not any(proposed[10:])
    for token in (100 + 39, 1, 2) * 30:  # from now on, each is right
        looked_at.append([token])
    assert looked_at.propose(8) == [[139, 1, 2, 139, 1, 2, 139]]


def test_lengths_that_few_matches_had_are_estimated_from_all():
    learning = Drafts([Text([*range(30), 50, 0])], lambda rows, size: 1 + size / 10)
    proposed = []
    for run in ([1], range(2, 10), [51, *range(12, 20)], [52, 25, 26]):
        for token in run:
            learning.append([token])
        proposed += learning.propose(8)
    assert len(proposed[0]) < len(proposed[-1]) == 7, "both at matches of two tokens"


def test_single_tokens_are_followed_only_where_they_were_right():
    learning = Drafts([Text([*range(40), 0, 1])], lambda rows, size: 1.1)
    for token in (*range(2, 20), 50, 30):  # long matches are right
        learning.append([token])
    assert learning.propose(8) == []
    for token in (31, 51, 10):
        learning.append([token])
    assert learning.propose(8) == [[11, 12, 13, 14, 15, 16, 17]]


def test_rows_are_taken():
    all_rows = Drafts([Text([row, row, 5, row, row]) for row in range(4)], lambda rows, size: 1.0)
    all_rows.compact([3, 1])
    assert all_rows.propose(2) == [[5], [5]] and [text.tokens[0] for text in all_rows.texts] == [3, 1]


@pytest.mark.parametrize("rows", range(1, 9))
def test_sizes_fit_the_static_cache(rows):
    sizes = drafts.sizes_for(rows)
    assert sizes == tuple(sorted(set(sizes))) and sizes[0] > 1 and sizes[-1] <= static_kv_cache.MOST_TOKENS
