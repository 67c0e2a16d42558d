"""`PrefixConstrainedLogitsProcessor`: a `PrefixTrie` is asked for all rows at once.

The library calls the function for each row, and so it does any other than a `PrefixTrie`. Errors, and inputs that no
allowed token is left for, are the library's own.

Tests: tests/optimizer/transformers/test_constrained.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from fastgen.ops.prefix_trie import PrefixTrie
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import add_reasons, count
from fastgen.optimizer.decoding.report import ALLOWED, Reason, that_hold
from fastgen.optimizer.transformers import compat

NAME = "transformers.prefix_constrained"
ALL_ROWS, ALONE = "prefix trie: all rows at once", "prefix trie: allowed tokens alone"


def prefix_constrained(original: Callable, self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """`__call__`: input_ids `[rows, length]`, scores `[rows, vocabulary_size]`."""
    trie = self._prefix_allowed_tokens_fn
    if type(trie) is not PrefixTrie or not PATCH_SET.replaces_host(NAME):
        return original(self, input_ids, scores)
    if reasons := _reasons(trie, self._num_beams, input_ids, scores):
        add_reasons(ALLOWED, reasons)
        return original(self, input_ids, scores)

    def theirs() -> Tensor:
        return original(self, input_ids, scores)

    def ours() -> Tensor:
        found = _constrained(trie, self._num_beams, input_ids, scores)
        return theirs() if found is None else found

    return compat.verified_if_newer(NAME, type(self), ours, theirs, _difference)


def _constrained(trie: PrefixTrie, num_beams: int, input_ids: Tensor, scores: Tensor) -> Tensor | None:
    """Scores of allowed tokens only; None where the library raises an error, or forces tokens."""
    count(ALL_ROWS)
    rows, tokens = trie.allowed_sync(input_ids)
    if not all_rows_occur(rows, input_ids.shape[0]):
        return None
    found = scores + -math.inf
    found[rows, tokens] = scores[rows, tokens]
    is_out = found.amax(dim=-1).isneginf().view(-1, num_beams).all(dim=-1)
    return None if bool(is_out.any()) else found


def _difference(found: Tensor, expected: Tensor) -> str:
    return "" if torch.equal(found, expected) else "allows other tokens than fastgen"


def _reasons(trie: PrefixTrie, num_beams: int, input_ids: Tensor, scores: Tensor) -> list[Reason]:
    """Why this call is left to transformers."""
    rows, is_apart = input_ids.shape[0], input_ids.device != scores.device
    elsewhere = f"scores are on {scores.device} (supported: {input_ids.device}, as input_ids)"
    is_uneven = rows == 0 or rows % num_beams
    return vocabulary_reasons(trie, scores.shape[1]) + that_hold(
        ("ROWS_NOT_MULTIPLE", f"{rows} rows for {num_beams} beams (supported: a multiple)", is_uneven),
        ("SCORES_ON_OTHER_DEVICE", elsewhere, is_apart),
    )


def vocabulary_reasons(trie: PrefixTrie, vocabulary_size: int) -> list[Reason]:
    """Why the library has to be asked, which raises an error if the trie comes to a token that there is none of."""
    text = f"the trie has token {trie.largest_token} (supported: up to {vocabulary_size - 1})"
    return that_hold(("TRIE_OUTSIDE_VOCABULARY", text, trie.largest_token >= vocabulary_size))


def all_rows_occur(rows: Tensor, row_count: int) -> bool:
    """Whether something is allowed in each row, given the row of each allowed token. Reads the device."""
    return bool(torch.bincount(rows, minlength=row_count).all())


def trie_of(processor: Any) -> PrefixTrie | None:
    """The trie that says what rows may go on with; None for another processor or function."""
    if type(processor) is not PrefixConstrainedLogitsProcessor or not PATCH_SET.in_effect(NAME):
        return None
    function = processor._prefix_allowed_tokens_fn
    return function if type(function) is PrefixTrie else None


def treats_rows_alone(processor: Any) -> bool:
    """Whether inputs may leave the batch: with a trie that allows something everywhere.

    Otherwise the library raises an error for finished inputs, too, by their numbers.
    """
    trie = trie_of(processor)
    return trie is not None and bool(trie.at_dead_ends)


def trie_alone(processors: Any, vocabulary_size: int) -> PrefixTrie | None:
    """The trie of the only processor, where it is all that changes scores; None where they are to be processed."""
    trie = trie_of(processors[0])
    if trie is None or vocabulary_reasons(trie, vocabulary_size) or "transformers" in PATCH_SET.untested_hosts:
        return None
    return trie
