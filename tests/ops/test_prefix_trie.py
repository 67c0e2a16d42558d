"""`PrefixTrie` allows what a trie of dictionaries allows; built, saved and mapped; its errors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastgen
from fastgen.ops.prefix_trie import PrefixTrie

TOKENS = st.sampled_from([0, 1, 2, 3, 40, 2**31 - 1])
ANY_TOKENS = st.one_of(TOKENS, st.sampled_from([-1, 2**40]))
SEQUENCES = st.lists(st.lists(TOKENS, max_size=5), max_size=30).filter(any)


def by_dictionaries(sequences: list[list[int]], prefix: list[int], at_dead_ends: list[int]) -> list[int]:
    root: dict = {}
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.setdefault(token, {})
    node = root
    for token in prefix:
        node = node.get(token, {})
    return sorted(node) or at_dead_ends


@settings(max_examples=200, deadline=None)
@given(
    sequences=SEQUENCES,
    rows=st.lists(st.lists(ANY_TOKENS, min_size=4, max_size=4), min_size=1),
    ignored=st.integers(0, 4),
    at_dead_ends=st.sampled_from([[], [1], [5, 90]]),
)
def test_any_rows_at_once_and_one_by_one(sequences, rows, ignored, at_dead_ends):
    trie = PrefixTrie(sequences, at_dead_ends).after(ignored)
    expected = [by_dictionaries(sequences, row[ignored:], at_dead_ends) for row in rows]
    assert [trie(0, torch.tensor(row)) for row in rows] == expected
    found_rows, tokens = trie.allowed_sync(torch.tensor(rows))
    assert found_rows.tolist() == [row for row, allowed in enumerate(expected) for _ in allowed]
    assert tokens.tolist() == [token for allowed in expected for token in allowed]


@pytest.mark.parametrize("make", [np.array, torch.tensor, iter, lambda rows: (iter(row) for row in rows)])
def test_outputs_come_in_many_forms(make):
    trie = PrefixTrie(make([[5, 6], [5, 7], [8, 9]]))
    assert trie(0, []) == [5, 8] and trie(0, [5]) == [6, 7] and trie(0, [5, 6]) == []
    assert trie.largest_token == 9 and trie.at_dead_ends == []


def test_a_saved_trie_is_mapped_and_the_same(tmp_path):
    trie = PrefixTrie([[5, 6], [5, 7, 8]], at_dead_ends=[3, 1, 3])
    trie.save(tmp_path / "names.trie")
    loaded = PrefixTrie.load(tmp_path / "names.trie")
    assert isinstance(loaded._array, np.memmap)
    for other in (loaded, pickle.loads(pickle.dumps(trie))):
        assert [other(0, prefix) for prefix in ([], [5], [5, 7], [9])] == [[5], [6, 7], [8], [1, 3]]


def test_what_is_on_a_device_is_there_once():
    trie = PrefixTrie([[5, 6]])
    later = trie.after(3)
    later(0, [1, 2, 3])
    assert trie._table(torch.device("cpu")) is later.after(1)._table(torch.device("cpu"))


def test_files_of_tokens(tmp_path):
    text, array = tmp_path / "names.txt", tmp_path / "names.npy"
    text.write_text("5 6\n\n5  7 8\n")
    np.save(array, np.array([[5, 6], [5, 7]], np.int32))
    assert PrefixTrie.from_file(text)(0, [5]) == PrefixTrie.from_file(str(array), at_dead_ends=[1])(0, [5]) == [6, 7]
    assert PrefixTrie.from_file(array, at_dead_ends=[1])(0, [6]) == [1]


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "names.txt").write_text("5 6\n5 x\n")
    with pytest.raises(ValueError, match=r"names.txt, line 2: .*'x' \(supported: tokens divided by spaces\)"):
        PrefixTrie.from_file(tmp_path / "names.txt")


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "sequences: holds no tokens"),
        ([[], []], "sequences: holds no tokens"),
        ([[5, -1]], r"sequences: token -1 \(supported: integers from 0 to 2147483647\)"),
        ([[5, 2**31]], "sequences: token 2147483648"),
        ([[5, 0.5]], "sequences: of type float64"),
        (["names"], "sequences: of type <U1, for example 'n'"),
        ([5, 6], "sequences: 'int' object is not iterable"),
        (np.zeros((2, 2, 2), int), r"sequences: an array of shape \(2, 2, 2\) \(supported: \[outputs, length\]\)"),
        (np.zeros((2, 2)), "sequences: of type float64"),
    ],
)
def test_what_is_no_set_of_outputs_is_refused_by_name(sequences, message):
    with pytest.raises(ValueError, match=message):
        PrefixTrie(sequences)


def test_other_errors_name_the_argument(tmp_path):
    with pytest.raises(ValueError, match="at_dead_ends: token -1"):
        PrefixTrie([[5]], at_dead_ends=[-1])
    with pytest.raises(ValueError, match=r"ignored is -2 \(supported: 0 or more\)"):
        PrefixTrie([[5]]).after(-2)
    np.save(tmp_path / "other.npy", np.arange(9))
    with pytest.raises(ValueError, match=r"other\.npy: no saved trie"):
        PrefixTrie.load(tmp_path / "other.npy")


def test_a_trie_of_many_outputs_allows_what_they_hold():
    random = np.random.default_rng(0)
    lengths = random.integers(3, 13, 200_000)
    tokens = (32000 * random.random(lengths.sum()) ** 3).astype(int).tolist()
    ends = lengths.cumsum().tolist()
    sequences = [tokens[begin:end] for begin, end in zip([0, *ends], ends)]
    trie = PrefixTrie(sequences)
    for sequence in sequences[::20_000]:
        rows, allowed = trie.allowed_sync(torch.tensor([sequence[:2]]))
        assert sequence[2] in allowed.tolist() and not rows.any()


def test_the_package_has_it_by_name():
    assert fastgen.PrefixTrie is PrefixTrie
    with pytest.raises(AttributeError, match="module 'fastgen' has no attribute 'SuffixTrie'"):
        fastgen.SuffixTrie  # noqa: B018
