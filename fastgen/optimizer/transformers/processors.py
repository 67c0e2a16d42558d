"""Logits processors of the library: n-gram blocking and prefix tries for all rows together, and which depend on rows.

- `NoRepeatNGramLogitsProcessor` and `EncoderNoRepeatNGramLogitsProcessor` use the op of that name. The library copies
  the scores first. In its own decoding loops nobody else holds the scores that the first processor gets, so there they
  are written in place, which is most of the gain.
- `PrefixConstrainedLogitsProcessor` asks a `PrefixTrie` for all rows together. The library calls the function once per
  row; so it does for any function that is not a `PrefixTrie`. Errors, and inputs without an allowed token, are left to
  the library.
- Finished inputs leave the batch if every processor treats each row alone.

Tests: tests/optimizer/transformers/test_generate_ngrams.py, tests/optimizer/transformers/test_constrained.py,
tests/optimizer/transformers/test_finished_inputs.py, tests/optimizer/transformers/test_replaced_loop.py
"""

from __future__ import annotations

import math
from collections import UserList
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from fastgen.ops import no_repeat_ngram as op
from fastgen.ops.no_repeat_ngram.kernels import kernel_for
from fastgen.ops.prefix_trie import PrefixTrie
from fastgen.ops.tracing import is_watched
from fastgen.optimizer import PATCH_SET, trust
from fastgen.optimizer.decoding.call import add_reasons, count
from fastgen.optimizer.decoding.guards import is_user_code
from fastgen.optimizer.decoding.report import ALLOWED, COMPACTION, NGRAMS, Reason, check, that_hold
from fastgen.optimizer.transformers.row_draws import RowDraws
from fastgen.provenance import PYTHON, comes_with

TRIE_GROUP = "transformers.prefix_constrained"
ALL_ROWS, ALONE = "prefix trie: all rows together", "prefix trie: allowed tokens alone"

# The processors whose calls always reach a patch, and the patch.
_PATCHES: dict[type, str] = {
    NoRepeatNGramLogitsProcessor: "transformers.no_repeat_ngram",
    EncoderNoRepeatNGramLogitsProcessor: "transformers.no_repeat_encoder_ngram",
    PrefixConstrainedLogitsProcessor: "transformers.prefix_constrained",
}

_NGRAMS = (NoRepeatNGramLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor)

# Processors of the library that treat every row independently, by its own tokens.
BY_ROW = frozenset({
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
    "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "ExponentialDecayLengthPenalty", "LogitNormalization",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "WhisperTimeStampLogitsProcessor",
})  # fmt: skip

# Those that return new scores and do not write into the old ones.
RETURN_NEW = frozenset({
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
})  # fmt: skip

# The packages of the library and of the code that it calls.
_LIBRARY = PYTHON | {"transformers", "torch", "fastgen"}

# Attributes that have no entry per row although their size may equal the number of rows (token ids), and those that
# compaction updates itself.
_NOT_OF_ROWS = frozenset({
    "eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "multi_token_biases", "bad_word_ids",
    "prompt_ignore_length",
})  # fmt: skip


def _is_patched(processor: Any, *kinds: type) -> bool:
    """Whether the processor is of one of these classes, and its call reaches the patch."""
    return type(processor) in kinds and PATCH_SET.in_effect(_PATCHES[type(processor)])


def _ours_or_theirs(processor: Any, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> Tensor:
    """Returns the scores of `ours`; of `theirs` until the first call has shown that both ban the same tokens."""
    name = logits_process.__name__
    kind = type(processor).__qualname__
    return trust.ours_or_theirs(trust.unknown_sources([name]), (kind,), ours, theirs, _bans_otherwise, f"{name}.{kind}")


def _bans_otherwise(ours: Tensor, theirs: Tensor) -> str | None:
    return None if torch.equal(ours.isneginf(), theirs.isneginf()) else "it bans other tokens than fastgen"


# N-gram blocking.


def no_repeat_ngram(original: Callable, self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Replaces `__call__` of both processors; input_ids `[rows, length]`, scores `[rows, vocabulary_size]`."""
    if reasons := _ngram_reasons(self, input_ids, scores):
        add_reasons(NGRAMS, reasons)
    if reasons or not _can_ban(self, input_ids):
        return original(self, input_ids, scores)
    ours = partial(_ban, op.no_repeat_ngram, self, input_ids, scores)
    return _ours_or_theirs(self, ours, partial(original, self, input_ids, scores))


def encoder_ngrams(original: Callable, self: Any, encoder_ngram_size: int, encoder_input_ids: Tensor) -> None:
    """Replaces `EncoderNoRepeatNGramLogitsProcessor.__init__`: dictionaries of n-grams are created when they are read.

    Reads the device: negative tokens are left to the library, which counts them from the vocabulary's end.
    """
    ids = encoder_input_ids
    is_usual = type(encoder_ngram_size) is int and encoder_ngram_size >= 1 and type(ids) is Tensor
    if not is_usual or ids.dim() not in (1, 2) or ids.dtype not in op.TOKEN_DTYPES or bool((ids < 0).any()):
        original(self, encoder_ngram_size, ids)
        return
    original(self, encoder_ngram_size, ids[..., :0])
    self.generated_ngrams = EncoderNGrams(encoder_ngram_size, torch.atleast_2d(ids).detach().clone())


class EncoderNGrams(UserList):
    """The n-grams of the encoder's input: its tokens and, once they are read, transformers' dictionaries.

    Item i is the dictionary of input i, from the first n - 1 tokens of an n-gram to the list of last tokens.
    encoder_input_ids: `[inputs, source_width]`.
    """

    def __init__(self, ngram_size: int, encoder_input_ids: Tensor) -> None:
        self.ngram_size, self.encoder_input_ids = ngram_size, encoder_input_ids

    @cached_property
    def data(self) -> list[dict]:  # type: ignore[override]
        return logits_process._get_ngrams(self.ngram_size, self.encoder_input_ids, self.encoder_input_ids.shape[0])

    def __reduce__(self) -> tuple:
        """Pickles as a list, which can be read without fastgen."""
        return list, (self.data,)


def writing_processors(processors: LogitsProcessorList, generation_config: Any) -> LogitsProcessorList:
    """Returns the processors of a decoding loop, whose first one may write into the scores: nobody else holds them."""
    is_first = bool(processors) and _is_patched(processors[0], *_NGRAMS) and not generation_config.output_logits
    is_librarys = type(processors) is LogitsProcessorList and comes_with(type(processors).__call__, LogitsProcessorList)
    return WritingProcessors(processors) if is_first and is_librarys else processors


class WritingProcessors(LogitsProcessorList):
    """The processors of one loop, in which n-gram blocking writes in place if it comes first."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        done = 0
        for processor in [] if is_watched() else self:
            if not _is_patched(processor, *_NGRAMS) or _ngram_reasons(processor, input_ids, scores):
                break
            if _can_ban(processor, input_ids):
                _ban(op.no_repeat_ngram_, processor, input_ids, scores)
            done += 1
        return LogitsProcessorList(self[done:])(input_ids, scores, **kwargs)


def _ngram_reasons(processor: Any, input_ids: Tensor, scores: Tensor) -> list[Reason]:
    """Returns why this call is left to transformers; empty if it is not."""
    is_of_encoder = isinstance(processor, EncoderNoRepeatNGramLogitsProcessor)
    size = processor.ngram_size
    kind = _NGRAMS[is_of_encoder]
    is_replaced = _PATCHES[kind] not in PATCH_SET.direct
    reasons = that_hold(
        ("METHOD_REPLACED", f"{kind.__name__}.__call__ is not that of transformers", is_replaced),
        ("NGRAM_SIZE", f"ngram_size is {size!r} (supported: int of 1 or more)", type(size) is not int or size < 1),
        ("SHAPES", "{}", op.unsupported_reasons(input_ids, scores)),
    )
    if reasons or not is_of_encoder:
        return reasons
    ngrams = processor.generated_ngrams
    if not isinstance(ngrams, EncoderNGrams):
        return [Reason("PROCESSOR_MADE_ELSEWHERE", "the processor was made without fastgen")]
    tokens = ngrams.encoder_input_ids
    rows = input_ids.shape[0]
    inputs = tokens.shape[0]
    was_read = "data" in vars(ngrams)
    wanted = f"{input_ids.dtype} on {input_ids.device}"
    is_changed = (size, processor.batch_size) != (ngrams.ngram_size, inputs)
    is_other = (tokens.dtype, tokens.device) != (input_ids.dtype, input_ids.device)
    text = f"encoder_input_ids are {tokens.dtype} on {tokens.device} (supported: {wanted}, as input_ids)"
    return that_hold(
        ("NGRAMS_READ", "the dictionaries of the encoder's n-grams were read, and may have been changed", was_read),
        ("PROCESSOR_CHANGED", "ngram_size or batch_size of the processor was changed", is_changed),
        ("SHAPES", text, is_other),
        ("ROWS_NOT_MULTIPLE", f"{rows} rows for {inputs} inputs (supported: a multiple)", inputs == 0 or rows % inputs),
    )


def _can_ban(processor: Any, input_ids: Tensor) -> bool:
    """Whether the rows are long enough for an n-gram to repeat; otherwise transformers does not copy the scores."""
    is_of_encoder = isinstance(processor, EncoderNoRepeatNGramLogitsProcessor)
    return is_of_encoder or input_ids.shape[1] >= processor.ngram_size


def _ban(ban: Callable[..., Tensor], processor: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Calls one form of the op, and counts the call."""
    count(*kernel_for(scores.device.type).counted_as)
    is_of_encoder = isinstance(processor, EncoderNoRepeatNGramLogitsProcessor)
    tokens = processor.generated_ngrams.encoder_input_ids if is_of_encoder else None
    return ban(input_ids, scores, processor.ngram_size, encoder_tokens=tokens)


# Prefix tries.


def prefix_constrained(original: Callable, self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Replaces `__call__`; input_ids `[rows, length]`, scores `[rows, vocabulary_size]`."""
    trie = self._prefix_allowed_tokens_fn
    num_beams = self._num_beams
    rows = input_ids.shape[0]
    theirs = partial(original, self, input_ids, scores)
    if type(trie) is not PrefixTrie or TRIE_GROUP not in PATCH_SET.direct:
        return theirs()
    elsewhere = f"scores are on {scores.device} (supported: {input_ids.device}, as input_ids)"
    is_uneven = not rows or rows % num_beams
    reasons = that_hold(
        vocabulary_reasons(trie, scores.shape[1]),
        ("ROWS_NOT_MULTIPLE", f"{rows} rows for {num_beams} beams (supported: a multiple)", is_uneven),
        ("SCORES_ON_OTHER_DEVICE", elsewhere, input_ids.device != scores.device),
    )
    if reasons:
        add_reasons(ALLOWED, reasons)
        return theirs()

    def ours() -> Tensor:
        constrained = _constrained(trie, num_beams, input_ids, scores)
        return theirs() if constrained is None else constrained

    return _ours_or_theirs(self, ours, theirs)


def _constrained(trie: PrefixTrie, num_beams: int, input_ids: Tensor, scores: Tensor) -> Tensor | None:
    """Returns the scores with only allowed tokens finite; None if the library must raise an error or force tokens."""
    count(ALL_ROWS)
    rows, tokens = trie.allowed_sync(input_ids)
    if not all_rows_occur(rows, input_ids.shape[0]):
        return None
    constrained = scores + -math.inf
    constrained[rows, tokens] = scores[rows, tokens]
    is_out = constrained.amax(dim=-1).isneginf().view(-1, num_beams).all(dim=-1)
    return None if bool(is_out.any()) else constrained


def vocabulary_reasons(trie: PrefixTrie, vocabulary_size: int) -> list[Reason]:
    """Returns why the library must run: it raises an error if the trie allows a token outside the vocabulary."""
    text = f"the trie has token {trie.largest_token} (supported: up to {vocabulary_size - 1})"
    return that_hold(("TRIE_OUTSIDE_VOCABULARY", text, trie.largest_token >= vocabulary_size))


def all_rows_occur(rows: Tensor, row_count: int) -> bool:
    """Whether each row has an allowed token; rows: the row of each allowed token. Reads the device."""
    return bool(torch.bincount(rows, minlength=row_count).all())


def trie_of(processor: Any) -> PrefixTrie | None:
    """Returns the trie of a prefix-constrained processor; None for another processor or function."""
    if not _is_patched(processor, PrefixConstrainedLogitsProcessor):
        return None
    function = processor._prefix_allowed_tokens_fn
    return function if type(function) is PrefixTrie else None


def trie_alone(processors: Any, vocabulary_size: int) -> PrefixTrie | None:
    """Returns the trie of the only processor, if nothing else changes scores; None if processors must run."""
    trie = trie_of(processors[0])
    return None if trie is None or vocabulary_reasons(trie, vocabulary_size) else trie


# Dependence of processors on the rows of a batch, from which finished inputs are removed.


@check(COMPACTION)
def by_batch_index(processors: Iterable[Any]) -> list[Reason]:
    """Returns processors that may depend on the batch index of rows, and not only on their content, as reasons.

    A trie with tokens at dead ends does not depend on it; without them, the library's errors for finished inputs name
    their index.
    """
    names = []
    for processor in processors:
        if not _is_by_row(processor) and type(processor) is not RowDraws:
            trie = trie_of(processor)
            if trie is None or not trie.at_dead_ends:
                names.append(type(processor).__name__)
    return that_hold(("PROCESSOR_BY_ROW", "{} may know the rows by their batch index", names))


@check(COMPACTION)
def parameters_of_rows(processors: Iterable[Any], rows: int) -> list[Reason]:
    """Returns attributes of processors that may have an entry per row, such as a temperature per prompt, as reasons."""
    names = []
    for processor in filter(_is_by_row, processors):
        attributes = [vars(base).items() for base in type(processor).__mro__[:-1]]
        held = {
            name: value for items in attributes for name, value in items if isinstance(value, (Tensor, list, tuple))
        }
        for name, value in (held | vars(processor)).items():
            if name not in _NOT_OF_ROWS and any(_may_be_of_rows(leaf, rows) for leaf in tree_leaves(value)):
                names.append(f"{type(processor).__name__}.{name}")
    return that_hold(("PROCESSOR_BY_ROW", "{} may have an entry for each row", names))


def may_write(processors: Any) -> bool:
    """Whether one of these processors may write into the scores that the first one gets."""
    return bool(processors) and not (type(processors[0]).__name__ in RETURN_NEW and _is_by_row(processors[0]))


def _is_by_row(processor: Any) -> bool:
    kind = type(processor)
    is_listed = kind.__name__ in BY_ROW and kind is getattr(logits_process, kind.__name__, None)
    return is_listed and not is_user_code([processor], _LIBRARY)


def _may_be_of_rows(value: Any, rows: int) -> bool:
    if type(value) is Tensor:
        return value.shape[:1] == (rows,)
    return not isinstance(value, (bool, int, float, str, NoneType))
