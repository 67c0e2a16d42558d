"""A trie of allowed outputs for constrained decoding, as in "Autoregressive Entity Retrieval".

The trie is one sorted array. Nodes are numbered level by level from the root, 0. The edge from `node` with `token` has
the key `node * width + token`, where all tokens are below `width`, and edge e leads to node e + 1. So the tokens that
may follow a node are a slice of the array. A binary search finds it for all rows together, from the rows' tokens alone.
The last call's nodes are stored with their tokens: rows that continue these by one token walk one edge, in any order.

Tests: tests/ops/test_prefix_trie.py
"""

from __future__ import annotations

import os
import reprlib
import secrets
import shutil
import sys
import zlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A saved trie: these bytes, the CRC-32 of the array in 8 bytes, and the array in the machine's byte order.
MAGIC = b"fgtrie02"
HEAD = 16
# The array begins with the width and the number of edges.
FIRST_KEY = 2

# Nodes are carried to the next step if this saves a walk of SHORTEST_WALK edges, for at most MOST_COMPARED comparisons
# of tokens.
SHORTEST_WALK = 3
MOST_COMPARED = {"cpu": 1 << 18}  # elsewhere they cost hardly more than the launch
MOST_COMPARED_ELSEWHERE = 1 << 24

# Tokens have 31 bits, so that the keys of any trie that fits into memory have fewer than 63.
LIMIT = 2**31

Paths = str | os.PathLike[str]


class PrefixTrie:
    """Allows the tokens that may follow a prefix; pass it to `generate` as transformers' `prefix_allowed_tokens_fn`.

    `trie.after(n)` ignores the first n tokens of each row: the prompt of a causal model with its padding, or the start
    token of a decoder (n = 1). Without it, each row must begin as an output does, or calls raise ValueError. Threads
    and calls can share one trie.
    """

    def __init__(self, sequences: Iterable[Iterable[int]] | np.ndarray | Tensor, at_dead_ends: Iterable[int] = ()):
        """Builds the trie of some outputs.

        sequences: the tokens of each output, of any lengths; or an array or tensor of integers, one output per row.
        Outputs may occur twice, and one may be a prefix of another. End tokens are tokens like any other: add them
        where outputs end. at_dead_ends: the tokens allowed where nothing follows, because an output is complete or the
        row is not in the trie. By default nothing is allowed there, and transformers raises ValueError. Its beam search
        continues complete outputs, too, so outputs of different lengths need the end token here.

        Raises ValueError if there are no tokens, or one is negative, not an integer or above 2^31 - 1.
        """
        tokens, lengths = _flat(sequences)
        try:
            ends = np.unique(_checked(list(at_dead_ends), "at_dead_ends"))
        except TypeError as error:
            raise ValueError(f"at_dead_ends: {at_dead_ends!r} (supported: an iterable of tokens, as [2])") from error
        if not tokens.size:
            raise ValueError("sequences: holds no tokens (supported: at least one)")
        width = int(max(tokens.max(), ends.max(initial=0))) + 1
        keys = _keys(tokens, lengths, width)
        self._set(np.concatenate([[width, len(keys)], keys, ends]))

    @classmethod
    def from_file(cls, path: Paths, at_dead_ends: Iterable[int] = ()) -> PrefixTrie:
        """Reads a text file with the tokens of one output per line, separated by spaces, or a saved array (`.npy`)."""
        path = Path(path)
        return cls(np.load(path) if path.suffix == ".npy" else _lines(path), at_dead_ends)

    def save(self, path: Paths) -> None:
        """Writes the trie for `load`. The file appears under its name complete or not at all.

        Processes that have mapped a previous file of that name continue to use that one.
        """
        path = Path(os.path.realpath(path))
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: no regular file (supported: the path of a file)")
        data = np.ascontiguousarray(self._array)
        new = path.with_name(f".{secrets.token_hex(8)}.new")  # short, because `path.name` may have the greatest length
        try:
            with open(new, "xb") as file:
                if path.exists():
                    shutil.copymode(path, new)
                file.write(MAGIC + _checksum(data))
                file.write(data.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Paths) -> PrefixTrie:
        """Maps a saved trie into memory: pages are read when they are needed, and processes share them.

        Raises ValueError for a file of another kind or version, and if contents and checksum differ.
        """
        path = Path(path)
        supported = "(supported: a file that PrefixTrie.save of this version has written)"
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: no regular file {supported}")
        # Copy-on-write, although nothing writes: torch does not accept read-only arrays.
        data = np.memmap(path, np.uint8, mode="c") if path.stat().st_size > HEAD + FIRST_KEY * 8 else None
        if data is None or data[: len(MAGIC)].tobytes() != MAGIC:
            raise ValueError(f"{path}: no saved trie {supported}")
        if data[len(MAGIC) : HEAD].tobytes() != _checksum(data[HEAD:]):
            raise ValueError(f"{path}: damaged, contents and checksum differ {supported}")
        trie = cls.__new__(cls)
        trie._set(data[HEAD:].view(np.int64))
        return trie

    def _set(self, array: np.ndarray) -> None:
        """Sets the attributes from an int64 array: width, number of edges, their keys, the tokens at dead ends."""
        self.ignored = 0
        self._array = array
        self._width, self._edges = int(array[0]), int(array[1])
        self._on_devices: dict[torch.device, Tensor] = {}
        self._walked: tuple[Tensor, Tensor] | None = None  # the last call's tokens, and the node of each row

    def __repr__(self) -> str:
        return (
            f"PrefixTrie({self._edges:,} edges, {self._array.nbytes:,} bytes, tokens up to {self.largest_token}, "
            f"at_dead_ends={reprlib.repr(self.at_dead_ends)}, after {self.ignored} tokens)"
        )

    @property
    def at_dead_ends(self) -> list[int]:
        """The tokens allowed where nothing follows, sorted."""
        tokens: list[int] = self._array[FIRST_KEY + self._edges :].tolist()
        return tokens

    @property
    def largest_token(self) -> int:
        """The largest token that may be allowed."""
        return self._width - 1

    def after(self, ignored: int) -> PrefixTrie:
        """Returns a trie of the same outputs that ignores the first `ignored` tokens of each row."""
        if not isinstance(ignored, int) or ignored < 0:
            raise ValueError(f"ignored is {ignored!r} (supported: an integer, 0 or more)")
        trie = type(self).__new__(type(self))
        vars(trie).update(vars(self), ignored=ignored, _walked=None)  # with the copies on other devices
        return trie

    def __call__(self, batch_id: int, input_ids: Tensor) -> list[int]:
        """Returns the tokens that may follow input_ids `[length]`, sorted; transformers calls this for each row."""
        tokens: list[int] = self.allowed_sync(torch.as_tensor(input_ids).view(1, -1))[1].tolist()
        return tokens

    def allowed_sync(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows and tokens, both int64 `[count]`: the tokens that may follow each row of input_ids.

        input_ids: `[rows, length]`. The result is sorted by row, then by token, and omits rows that allow no token.
        """
        table = self._table(input_ids.device)
        keys = table[: self._edges]
        nodes = self._nodes_sync(input_ids, keys)
        first = torch.searchsorted(keys, nodes * self._width)
        end = torch.searchsorted(keys, (nodes + 1) * self._width)
        is_dead = first == end
        first = first.masked_fill(is_dead, self._edges)  # where the tokens at dead ends begin
        counts = end.masked_fill(is_dead, len(table)) - first
        rows = torch.arange(len(nodes), device=table.device).repeat_interleave(counts)
        starts = (counts.cumsum(0) - counts)[rows]
        return rows, table[first[rows] + torch.arange(len(rows), device=table.device) - starts] % self._width

    def _nodes_sync(self, input_ids: Tensor, keys: Tensor) -> Tensor:
        """Returns the node that each row has reached, `[rows]`; -1, which has no children, for rows not in the trie."""
        tokens = input_ids[:, self.ignored :]
        nodes = self._carried_sync(tokens)
        if nodes is None:
            self._check_beginnings_sync(input_ids, keys)
            nodes = self._walk(tokens.new_zeros(len(tokens), dtype=torch.int64), tokens, keys)
        else:
            nodes = self._walk(nodes, tokens[:, -1:], keys)
        self._walked = tokens.clone(), nodes
        return nodes

    def _carried_sync(self, tokens: Tensor) -> Tensor | None:
        """Returns the node of each row before its last token, `[rows]`, if all are rows of the last call; else None."""
        if (last := self._walked) is None:  # read once: another thread may replace it
            return None
        prefixes = tokens[:, :-1]
        walked, nodes = last
        most = MOST_COMPARED.get(prefixes.device.type, MOST_COMPARED_ELSEWHERE)
        if prefixes.shape[1] < SHORTEST_WALK or len(walked) * prefixes.numel() > most:
            return None
        if prefixes.shape[1] != walked.shape[1] or prefixes.device != walked.device:
            return None
        is_walked, row = (prefixes[:, None] == walked).all(dim=2).max(dim=1)
        return nodes[row] if bool(is_walked.all()) else None

    def _walk(self, nodes: Tensor, tokens: Tensor, keys: Tensor) -> Tensor:
        """Returns the nodes that are reached from `nodes`, `[rows]`, with tokens `[rows, count]`."""
        for next_tokens in tokens.unbind(1):
            wanted = nodes * self._width + next_tokens
            edges = torch.searchsorted(keys, wanted).clamp_(max=self._edges - 1)
            # An invalid token, or a row without a node, could make the key of another edge.
            is_token = (next_tokens >= 0) & (next_tokens < self._width)
            nodes = torch.where((keys[edges] == wanted) & (nodes >= 0) & is_token, edges + 1, -1)
        return nodes

    def _check_beginnings_sync(self, input_ids: Tensor, keys: Tensor) -> None:
        """Raises ValueError if a row begins with a token that begins no output: its outputs would be empty."""
        if self.ignored or not input_ids.shape[1]:
            return
        is_out = self._walk(torch.zeros_like(input_ids[:, 0]), input_ids[:, :1], keys) < 0
        if is_out.any():
            raise ValueError(
                f"PrefixTrie: no output begins with token {int(input_ids[is_out, 0][0])}, as a row does (supported: "
                "rows that begin as outputs do, or .after(n), with n tokens before the outputs: trie.after(1) for the "
                "start token of a decoder, trie.after(input_ids.shape[1]) for a prompt)"
            )

    def _table(self, device: torch.device) -> Tensor:
        """Returns the keys, followed by the tokens at dead ends: the array itself on a CPU, a cached copy elsewhere."""
        if device not in self._on_devices:
            self._on_devices[device] = torch.from_numpy(np.asarray(self._array[FIRST_KEY:])).to(device)
        return self._on_devices[device]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_on_devices": {}, "_walked": None}


def _checksum(array: np.ndarray) -> bytes:
    return zlib.crc32(array.data).to_bytes(HEAD - len(MAGIC), sys.byteorder)


def _keys(tokens: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Returns the sorted keys of all edges. tokens: all sequences, concatenated; lengths: the length of each."""
    starts = np.cumsum(lengths) - lengths
    nodes = np.zeros_like(starts)  # the node that each sequence has reached
    levels = []
    edges = 0
    for depth in range(int(lengths.max())):
        is_longer = lengths > depth
        starts, lengths, nodes = starts[is_longer], lengths[is_longer], nodes[is_longer]
        keys, inverse = np.unique(nodes * width + tokens[starts + depth], return_inverse=True)
        nodes = edges + 1 + inverse
        levels.append(keys)
        edges += len(keys)
    return np.concatenate(levels)


def _flat(sequences: Iterable[Iterable[int]] | np.ndarray | Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of all sequences, concatenated, and the length of each; both int64."""
    if isinstance(sequences, Tensor):
        sequences = sequences.numpy(force=True)
    if isinstance(sequences, np.ndarray):
        if sequences.ndim != 2:
            raise ValueError(f"sequences: an array of shape {sequences.shape} (supported: [outputs, length])")
        return _checked(sequences.reshape(-1), "sequences"), np.full(len(sequences), sequences.shape[1], np.int64)
    try:
        lists: list[Any] = [sequence if hasattr(sequence, "__len__") else list(sequence) for sequence in sequences]
        tokens = list(chain.from_iterable(lists))
    except TypeError as error:
        raise ValueError(f"sequences: {error} (supported: an iterable of iterables of tokens)") from error
    return _checked(tokens, "sequences"), np.array([len(sequence) for sequence in lists])


def _checked(tokens: list[int] | np.ndarray, name: str) -> np.ndarray:
    """Returns these tokens as int64. Raises ValueError if one is not a token."""
    if not len(tokens):
        return np.zeros(0, np.int64)
    supported = f"(supported: integers from 0 to {LIMIT - 1})"
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error} {supported}") from error
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"{name}: of type {array.dtype}, for example {tokens[0]!r} {supported}")
    if (worst := int(array.min())) < 0 or (worst := int(array.max())) >= LIMIT:
        raise ValueError(f"{name}: token {worst} {supported}")
    return array.astype(np.int64)


def _lines(path: Path) -> list[np.ndarray]:
    """Returns the tokens of each line."""
    sequences = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                sequences.append([*map(int, line.split())])
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error} (supported: tokens separated by spaces)") from error
    return sequences
