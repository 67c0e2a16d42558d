"""Logits processors of the library: n-gram blocking and prefix tries on all rows at once, and which of them know rows.

- `NoRepeatNGramLogitsProcessor` and `EncoderNoRepeatNGramLogitsProcessor` run through the op of that name. The library
  bans into a copy of the scores. In its own decoding loops these scores are nobody else's when they reach the first
  processor: there they are written in place, which is most of what there is to gain.
- `PrefixConstrainedLogitsProcessor` asks a `PrefixTrie` for all rows at once. The library calls the function for each
  row, and so it does any other than a `PrefixTrie`. Errors, and inputs that no allowed token is left for, are the
  library's own.
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
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import add_reasons, count
from fastgen.optimizer.decoding.report import ALLOWED, NGRAMS, Reason, that_hold
from fastgen.optimizer.decoding.user_code import is_user_code
from fastgen.optimizer.decoding.verify import Difference, is_verified, verify_once
from fastgen.optimizer.transformers.row_draws import RowDraws
from fastgen.patching import disabled
from fastgen.provenance import PYTHON, comes_with

NGRAM_GROUP, TRIE_GROUP = "transformers.no_repeat_ngram", "transformers.prefix_constrained"
ALL_ROWS, ALONE = "prefix trie: all rows at once", "prefix trie: allowed tokens alone"

# The patch that a call of each of these processors is sure to reach.
_PATCHES: dict[type, str] = {
    NoRepeatNGramLogitsProcessor: "transformers.no_repeat_ngram",
    EncoderNoRepeatNGramLogitsProcessor: "transformers.no_repeat_encoder_ngram",
    PrefixConstrainedLogitsProcessor: "transformers.prefix_constrained",
}

_NGRAMS = (NoRepeatNGramLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor)

# Processors of the library that treat every row for itself, from what it holds.
BY_ROW = frozenset({
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
    "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "ExponentialDecayLengthPenalty", "LogitNormalization",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "WhisperTimeStampLogitsProcessor",
})  # fmt: skip

# The library's packages, and those of what it calls.
_LIBRARY = PYTHON | {"transformers", "torch", "fastgen"}

# Attributes that have no entry per row although their size may equal the number of rows: token ids, and what compaction
# takes along itself.
_NOT_OF_ROWS = frozenset({
    "eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "multi_token_biases", "bad_word_ids",
    "prompt_ignore_length",
})  # fmt: skip


def _is_patched(processor: Any, *kinds: type) -> bool:
    """Whether it is of one of these classes, and its call reaches the patch."""
    return type(processor) in kinds and PATCH_SET.in_effect(_PATCHES[type(processor)])


def _verified_if_newer(group: str, kind: type, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> Tensor:
    """Returns scores as `ours` does; where transformers is newer than any version tested, a class is compared first.

    If other tokens are banned, the group of patches is switched off.
    """
    if "transformers" not in PATCH_SET.untested_hosts or is_verified(kind):
        return ours()
    with disabled():
        expected = theirs()

    def difference() -> Difference | None:
        is_equal = torch.equal(ours().isneginf(), expected.isneginf())
        return None if is_equal else Difference("bans other tokens than fastgen")

    verify_once(kind, difference, lambda different: PATCH_SET.fail(group, f"{kind.__name__} {different}"))
    return expected


# N-gram blocking.


def no_repeat_ngram(original: Callable, self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """`__call__` of both processors: input_ids `[rows, length]`, scores `[rows, vocabulary_size]`."""
    if reasons := _ngram_reasons(self, input_ids, scores):
        add_reasons(NGRAMS, reasons)
    if reasons or not _can_ban(self, input_ids):
        return original(self, input_ids, scores)
    ours = partial(_ban, op.no_repeat_ngram, self, input_ids, scores)
    return _verified_if_newer(NGRAM_GROUP, type(self), ours, partial(original, self, input_ids, scores))


def encoder_ngrams(original: Callable, self: Any, encoder_ngram_size: int, encoder_input_ids: Tensor) -> None:
    """`EncoderNoRepeatNGramLogitsProcessor.__init__`: the dictionaries of all n-grams are made when they are read.

    Reads the device: negative tokens are left to the library, which bans those from the vocabulary's end.
    """
    ids = encoder_input_ids
    is_usual = type(encoder_ngram_size) is int and encoder_ngram_size >= 1 and type(ids) is Tensor
    if not is_usual or ids.dim() not in (1, 2) or ids.dtype not in op.TOKEN_DTYPES or bool((ids < 0).any()):
        original(self, encoder_ngram_size, ids)
        return
    original(self, encoder_ngram_size, ids[..., :0])
    self.generated_ngrams = EncoderNGrams(encoder_ngram_size, torch.atleast_2d(ids).detach().clone())


class EncoderNGrams(UserList):
    """The n-grams of the encoder's input: its tokens, and once somebody asks for them, transformers' dictionaries.

    Item i is the dictionary of input i, from the first n - 1 tokens of an n-gram to the list of its last ones.
    encoder_input_ids: `[inputs, source_width]`.
    """

    def __init__(self, ngram_size: int, encoder_input_ids: Tensor) -> None:
        self.ngram_size, self.encoder_input_ids = ngram_size, encoder_input_ids

    @cached_property
    def data(self) -> list[dict]:  # type: ignore[override]
        return logits_process._get_ngrams(self.ngram_size, self.encoder_input_ids, self.encoder_input_ids.shape[0])

    def __reduce__(self) -> tuple:
        """Pickles as a list, which is read without fastgen, too."""
        return list, (self.data,)


def writing_processors(processors: LogitsProcessorList, generation_config: Any) -> LogitsProcessorList:
    """The processors of a decoding loop, of which the first may write into the scores they are given.

    So where nobody else holds the scores that the loop gives to it, as far as is tested.
    """
    is_first = bool(processors) and _is_patched(processors[0], *_NGRAMS) and not generation_config.output_logits
    is_librarys = type(processors) is LogitsProcessorList and comes_with(type(processors).__call__, LogitsProcessorList)
    is_tested = "transformers" not in PATCH_SET.untested_hosts
    return WritingProcessors(processors) if is_first and is_librarys and is_tested else processors


class WritingProcessors(LogitsProcessorList):
    """The processors of one loop, of which n-gram blocking writes in place as long as no other comes before it."""

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
    """Why this call is left to transformers."""
    is_of_encoder, size = isinstance(processor, EncoderNoRepeatNGramLogitsProcessor), processor.ngram_size
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
    tokens, rows = ngrams.encoder_input_ids, input_ids.shape[0]
    inputs, was_read, wanted = tokens.shape[0], "data" in vars(ngrams), f"{input_ids.dtype} on {input_ids.device}"
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
    """Whether the rows are long enough for anything to be banned; transformers copies no scores where they are not."""
    is_of_encoder = isinstance(processor, EncoderNoRepeatNGramLogitsProcessor)
    return is_of_encoder or input_ids.shape[1] >= processor.ngram_size


def _ban(ban: Callable[..., Tensor], processor: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Calls this form of the op, and counts it."""
    count(*kernel_for(scores.device.type).counted_as)
    is_of_encoder = isinstance(processor, EncoderNoRepeatNGramLogitsProcessor)
    tokens = processor.generated_ngrams.encoder_input_ids if is_of_encoder else None
    return ban(input_ids, scores, processor.ngram_size, encoder_tokens=tokens)


# Prefix tries.


def prefix_constrained(original: Callable, self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """`__call__`: input_ids `[rows, length]`, scores `[rows, vocabulary_size]`."""
    trie, num_beams, rows = self._prefix_allowed_tokens_fn, self._num_beams, input_ids.shape[0]
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

    return _verified_if_newer(TRIE_GROUP, type(self), ours, theirs)


def _constrained(trie: PrefixTrie, num_beams: int, input_ids: Tensor, scores: Tensor) -> Tensor | None:
    """Scores of allowed tokens only; None where the library raises an error, or forces tokens."""
    count(ALL_ROWS)
    rows, tokens = trie.allowed_sync(input_ids)
    if not all_rows_occur(rows, input_ids.shape[0]):
        return None
    constrained = scores + -math.inf
    constrained[rows, tokens] = scores[rows, tokens]
    is_out = constrained.amax(dim=-1).isneginf().view(-1, num_beams).all(dim=-1)
    return None if bool(is_out.any()) else constrained


def vocabulary_reasons(trie: PrefixTrie, vocabulary_size: int) -> list[Reason]:
    """Why the library has to be asked, which raises an error if the trie comes to a token that there is none of."""
    text = f"the trie has token {trie.largest_token} (supported: up to {vocabulary_size - 1})"
    return that_hold(("TRIE_OUTSIDE_VOCABULARY", text, trie.largest_token >= vocabulary_size))


def all_rows_occur(rows: Tensor, row_count: int) -> bool:
    """Whether something is allowed in each row, given the row of each allowed token. Reads the device."""
    return bool(torch.bincount(rows, minlength=row_count).all())


def trie_of(processor: Any) -> PrefixTrie | None:
    """The trie that says what rows may go on with; None for another processor or function."""
    if not _is_patched(processor, PrefixConstrainedLogitsProcessor):
        return None
    function = processor._prefix_allowed_tokens_fn
    return function if type(function) is PrefixTrie else None


def trie_alone(processors: Any, vocabulary_size: int) -> PrefixTrie | None:
    """The trie of the only processor, where it is all that changes scores; None where they are to be processed."""
    trie = trie_of(processors[0])
    if trie is None or vocabulary_reasons(trie, vocabulary_size) or "transformers" in PATCH_SET.untested_hosts:
        return None
    return trie


# Processors and the rows of a batch, from which finished inputs are to be removed.


def by_batch_index(processors: Iterable[Any]) -> list[Reason]:
    """The processors that may know rows by their batch index, and not only by what each holds.

    A trie that allows something everywhere does not; otherwise the library raises an error for finished inputs, too,
    by their numbers.
    """
    others = []
    for processor in processors:
        trie = trie_of(processor)
        if (
            not _is_by_row(processor)
            and type(processor) is not RowDraws
            and not (trie is not None and bool(trie.at_dead_ends))
        ):
            others.append(type(processor).__name__)
    return that_hold(("PROCESSOR_BY_ROW", "{} may know the rows by their batch index", others))


def parameters_of_rows(processors: Iterable[Any], rows: int) -> list[Reason]:
    """What processors hold that may have an entry for each of these rows: a temperature for each prompt."""
    names = []
    for processor in filter(_is_by_row, processors):
        of_classes = [vars(base).items() for base in type(processor).__mro__[:-1]]
        held = {
            name: value for items in of_classes for name, value in items if isinstance(value, (Tensor, list, tuple))
        }
        for name, value in (held | vars(processor)).items():
            if name not in _NOT_OF_ROWS and any(_may_be_of_rows(leaf, rows) for leaf in tree_leaves(value)):
                names.append(f"{type(processor).__name__}.{name}")
    return that_hold(("PROCESSOR_BY_ROW", "{} may have an entry for each row", names))


def _is_by_row(processor: Any) -> bool:
    kind = type(processor)
    is_listed = kind.__name__ in BY_ROW and kind is getattr(logits_process, kind.__name__, None)
    return is_listed and not is_user_code(processor, _LIBRARY)


def _may_be_of_rows(value: Any, rows: int) -> bool:
    if type(value) is Tensor:
        return value.shape[:1] == (rows,)
    return not isinstance(value, (bool, int, float, str, NoneType))
