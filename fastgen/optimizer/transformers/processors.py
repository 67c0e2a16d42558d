"""What logits processors know of the rows of a batch, from which finished inputs are to be removed.

Tests: tests/optimizer/transformers/test_finished_inputs.py, tests/optimizer/transformers/test_replaced_loop.py
"""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.generation import logits_process

from fastgen.optimizer.decoding.report import Reason, that_hold
from fastgen.optimizer.decoding.user_code import is_user_code
from fastgen.optimizer.transformers.constrained import treats_rows_alone
from fastgen.provenance import PYTHON

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


def by_batch_index(processors: Iterable[Any]) -> list[Reason]:
    """The processors that may know rows by their batch index, and not only by what each holds."""
    others = [type(one).__name__ for one in processors if not (_is_by_row(one) or treats_rows_alone(one))]
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
