"""`PrefixTrie` allows the tokens that a trie of dictionaries allows; built, saved and mapped; its errors."""

import os
import pickle
import subprocess
import sys
from unittest import mock

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
def test_rows_together_and_one_by_one_allow_the_same(sequences, rows, ignored, at_dead_ends):
    trie = PrefixTrie(sequences, at_dead_ends).after(ignored)
    begin = {sequence[0] for sequence in sequences if sequence}
    rows = [row for row in rows if ignored or row[0] in begin] or [[min(begin), 1, 1, 1]]
    expected = [by_dictionaries(sequences, row[ignored:], at_dead_ends) for row in rows]
    assert [trie(0, torch.tensor(row)) for row in rows] == expected
    found_rows, tokens = trie.allowed_sync(torch.tensor(rows))
    assert found_rows.tolist() == [row for row, allowed in enumerate(expected) for _ in allowed]
    assert tokens.tolist() == [token for allowed in expected for token in allowed]


@settings(max_examples=100, deadline=None)
@given(
    sequences=SEQUENCES,
    steps=st.lists(st.lists(st.tuples(st.integers(0, 3), ANY_TOKENS), min_size=1, max_size=4), min_size=5, max_size=8),
    stranger=st.integers(0, 8),
    ignored=st.integers(1, 2),
)
def test_rows_that_change_places_allow_what_a_fresh_trie_allows(sequences, steps, stranger, ignored):
    trie = PrefixTrie(sequences).after(ignored)
    rows = torch.tensor([[7], [8]])
    for number, chosen in enumerate(steps):  # the row that each continues, and its next token
        if number == stranger:
            rows = torch.randint(0, 4, rows.shape)
        parents = torch.tensor([parent % len(rows) for parent, _ in chosen])
        rows = torch.cat([rows[parents], torch.tensor([[token] for _, token in chosen])], dim=1)
        expected = PrefixTrie(sequences).after(ignored).allowed_sync(rows)
        assert all(map(torch.equal, trie.allowed_sync(rows), expected))


def test_rows_that_continue_the_last_call_walk_one_edge():
    sequences = torch.randint(0, 5, (50, 9), generator=torch.Generator().manual_seed(0))
    trie = PrefixTrie(sequences)
    walk, walked = trie._walk, []
    with mock.patch.object(trie, "_walk", lambda *args: walked.append(args[1].shape[1]) or walk(*args)):
        for length in range(1, 9):
            sequences = sequences[torch.randperm(len(sequences))][:20]
            trie.allowed_sync(sequences[:, :length])
    assert walked == [1, 1, 1, 2, 1, 3, 1, 1, 1, 1, 1]  # the shortest walks, each with a look at the first token


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
    for other in (loaded, pickle.loads(pickle.dumps(trie)), pickle.loads(pickle.dumps(loaded))):
        assert [other(0, prefix) for prefix in ([], [5], [5, 7], [5, 9])] == [[5], [6, 7], [8], [1, 3]]


READER = """
import sys
from fastgen.ops.prefix_trie import PrefixTrie
trie = PrefixTrie.load(sys.argv[1])
print("mapped", flush=True)
sys.stdin.readline()
print(sum(trie(0, [number])[0] for number in range(5000)))
"""


def test_a_process_reads_on_in_a_mapped_file_once_replaced(tmp_path):
    path = tmp_path / "names.trie"
    PrefixTrie([[number, 7] for number in range(5000)]).save(path)
    here = PrefixTrie.load(path)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with reader:
        assert reader.stdout.readline() == "mapped\n"
        PrefixTrie([[1, 2]]).save(path)
        assert reader.communicate("\n")[0] == f"{7 * 5000}\n"
    assert reader.returncode == 0
    assert here(0, [4999]) == [7] and PrefixTrie.load(path)(0, [1]) == [2]
    here.save(path)  # to the file from which it was loaded
    assert PrefixTrie.load(path)(0, [4999]) == [7]
    assert os.listdir(tmp_path) == ["names.trie"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, failing):
    path = tmp_path / "names.trie"
    PrefixTrie([[5, 6]]).save(path)
    before = path.read_bytes()
    with (
        mock.patch.object(os, failing, side_effect=OSError(28, "No space left")),
        pytest.raises(OSError, match="space"),
    ):
        PrefixTrie([[1, 2]]).save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["names.trie"]


def test_saving_keeps_a_link_and_permissions(tmp_path):
    path, link = tmp_path / "names.trie", tmp_path / "link.trie"
    PrefixTrie([[5, 6]]).save(path)
    path.chmod(0o640)
    link.symlink_to(path)
    PrefixTrie([[1, 2]]).save(link)
    assert link.is_symlink() and PrefixTrie.load(path)(0, [1]) == [2] and path.stat().st_mode & 0o777 == 0o640


def test_a_changed_byte_in_a_saved_trie_is_an_error(tmp_path):
    path = tmp_path / "names.trie"
    PrefixTrie([[5, 6], [5, 7, 8]], at_dead_ends=[3]).save(path)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"names\.trie: (no saved trie|damaged, contents and checksum differ) "):
            PrefixTrie.load(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no saved trie"),
        (b"5 6\n5 7\n" * 20, "no saved trie"),
        (b"fgtrie02", "no saved trie"),
        (b"fgtrie02" + bytes(29), "damaged"),
    ],
)
def test_a_file_that_is_no_saved_trie_is_refused(tmp_path, data, message):
    (tmp_path / "names.trie").write_bytes(data)
    with pytest.raises(
        ValueError, match=rf"names\.trie: {message}.* \(supported: a file that PrefixTrie\.save of this"
    ):
        PrefixTrie.load(tmp_path / "names.trie")


def test_only_regular_files_are_read_or_replaced(tmp_path):
    os.mkfifo(tmp_path / "names.fifo")
    for path in (tmp_path, tmp_path / "names.fifo"):
        for call in (PrefixTrie.load, PrefixTrie([[5, 6]]).save):
            with pytest.raises(ValueError, match="no regular file"):
                call(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.trie"):
        PrefixTrie.load(tmp_path / "missing.trie")
    assert os.listdir(tmp_path) == ["names.fifo"]


def test_a_trie_is_stored_once_on_a_device():
    trie = PrefixTrie([[5, 6]])
    later = trie.after(3)
    later(0, [1, 2, 3])
    assert trie._table(torch.device("cpu")) is later.after(1)._table(torch.device("cpu"))


def test_files_of_tokens_are_read_and_a_broken_line_is_named(tmp_path):
    text, array = tmp_path / "names.txt", tmp_path / "names.npy"
    text.write_text("5 6\n\n5  7 8\n")
    np.save(array, np.array([[5, 6], [5, 7]], np.int32))
    assert PrefixTrie.from_file(text)(0, [5]) == PrefixTrie.from_file(str(array), at_dead_ends=[1])(0, [5]) == [6, 7]
    assert PrefixTrie.from_file(array, at_dead_ends=[1])(0, [5, 8]) == [1]
    text.write_text("5 6\n5 x\n")
    with pytest.raises(ValueError, match=r"names.txt, line 2: .*'x' \(supported: tokens separated by spaces\)"):
        PrefixTrie.from_file(text)


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
def test_sequences_that_are_no_outputs_are_refused_by_name(sequences, message):
    with pytest.raises(ValueError, match=message):
        PrefixTrie(sequences)


def test_other_errors_name_the_argument():
    with pytest.raises(ValueError, match="at_dead_ends: token -1"):
        PrefixTrie([[5]], at_dead_ends=[-1])
    with pytest.raises(ValueError, match=r"at_dead_ends: 2 \(supported: an iterable of tokens, as \[2\]\)"):
        PrefixTrie([[5]], at_dead_ends=2)
    with pytest.raises(ValueError, match=r"ignored is -2 \(supported: an integer, 0 or more\)"):
        PrefixTrie([[5]]).after(-2)


def test_rows_that_begin_like_no_output_are_refused():
    trie = PrefixTrie([[5, 6], [7]], at_dead_ends=[1])
    message = r"no output begins with token 9, as a row does .*\.after\(1\) for the start token of a decoder"
    for call in (lambda: trie(0, torch.tensor([9, 5])), lambda: trie.allowed_sync(torch.tensor([[5, 6], [9, 5]]))):
        with pytest.raises(ValueError, match=message):
            call()
    assert trie(0, [5, 9]) == [1] and trie.after(1)(0, [9, 9]) == [1]


def test_sizes_are_in_the_repr():
    trie = PrefixTrie([[5, 6], [5, 7]], at_dead_ends=[2]).after(1)
    assert repr(trie) == "PrefixTrie(3 edges, 48 bytes, tokens up to 7, at_dead_ends=[2], after 1 tokens)"
    assert len(repr(PrefixTrie([[5]], at_dead_ends=range(10_000)))) < 120


def test_a_trie_of_many_outputs_allows_their_tokens():
    random = np.random.default_rng(0)
    lengths = random.integers(3, 13, 200_000)
    tokens = (32000 * random.random(lengths.sum()) ** 3).astype(int).tolist()
    ends = lengths.cumsum().tolist()
    sequences = [tokens[begin:end] for begin, end in zip([0, *ends], ends)]
    trie = PrefixTrie(sequences)
    for sequence in sequences[::20_000]:
        rows, allowed = trie.allowed_sync(torch.tensor([sequence[:2]]))
        assert sequence[2] in allowed.tolist() and not rows.any()


def test_the_package_exports_the_trie_by_name():
    assert fastgen.PrefixTrie is PrefixTrie
    with pytest.raises(AttributeError, match="module 'fastgen' has no attribute 'SuffixTrie'"):
        fastgen.SuffixTrie  # noqa: B018
