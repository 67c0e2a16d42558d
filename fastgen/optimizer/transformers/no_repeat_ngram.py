"""`NoRepeatNGramLogitsProcessor` and `EncoderNoRepeatNGramLogitsProcessor` through the op of that name.

transformers bans into a copy of the scores. In its own decoding loops these scores are nobody else's when they reach
the first processor: there they are written in place, which is most of what there is to gain.

Tests: tests/optimizer/transformers/test_generate_ngrams.py
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from fastgen.ops import no_repeat_ngram as op
from fastgen.ops.no_repeat_ngram.kernels import kernel_for
from fastgen.ops.tracing import is_watched
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import add_reasons, count
from fastgen.optimizer.decoding.report import NGRAMS, Reason, that_hold
from fastgen.optimizer.transformers import compat
from fastgen.provenance import comes_with

GROUP = "transformers.no_repeat_ngram"

# The patch that a call of each of these processors is sure to reach.
PATCH_NAMES: dict[type, str] = {
    NoRepeatNGramLogitsProcessor: "transformers.no_repeat_ngram",
    EncoderNoRepeatNGramLogitsProcessor: "transformers.no_repeat_encoder_ngram",
}


def writing_processors(processors: LogitsProcessorList, generation_config: Any) -> LogitsProcessorList:
    """The processors of a decoding loop, of which the first may write into the scores they are given.

    So where nobody else holds the scores that the loop gives to it, as far as is tested.
    """
    if not processors or not _is_patched(processors[0]) or generation_config.output_logits:  # which are returned
        return processors
    is_library = type(processors) is LogitsProcessorList and comes_with(
        LogitsProcessorList.__call__, LogitsProcessorList
    )
    is_tested = is_library and "transformers" not in PATCH_SET.untested_hosts
    return WritingProcessors(processors) if is_tested else processors


class WritingProcessors(LogitsProcessorList):
    """The processors of one loop, of which n-gram blocking writes in place as long as no other comes before it."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        done = 0
        for processor in [] if is_watched() else self:
            if not _is_patched(processor) or _reasons(processor, input_ids, scores):
                break
            if _can_ban(processor, input_ids):
                _ban(op.no_repeat_ngram_, processor, input_ids, scores)
            done += 1
        return LogitsProcessorList(self[done:])(input_ids, scores, **kwargs)


def _is_patched(processor: Any) -> bool:
    name = PATCH_NAMES.get(type(processor))
    return name is not None and PATCH_SET.in_effect(name)


def no_repeat_ngram(original: Callable, self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """`__call__` of both processors: input_ids `[rows, length]`, scores `[rows, vocabulary_size]`."""
    if reasons := _reasons(self, input_ids, scores):
        add_reasons(NGRAMS, reasons)
    if reasons or not _can_ban(self, input_ids):
        return original(self, input_ids, scores)
    return compat.verified_if_newer(
        GROUP,
        type(self),
        lambda: _ban(op.no_repeat_ngram, self, input_ids, scores),
        lambda: original(self, input_ids, scores),
        _difference,
    )


def encoder_ngrams(original: Callable, self: Any, encoder_ngram_size: int, encoder_input_ids: Tensor) -> None:
    """`EncoderNoRepeatNGramLogitsProcessor.__init__`: the dictionaries of all n-grams are made when they are read."""
    if type(encoder_ngram_size) is not int or encoder_ngram_size < 1 or not _is_usual_sync(encoder_input_ids):
        original(self, encoder_ngram_size, encoder_input_ids)
        return
    original(self, encoder_ngram_size, encoder_input_ids[..., :0])
    by_input = encoder_input_ids if encoder_input_ids.dim() == 2 else encoder_input_ids.unsqueeze(0)
    self.generated_ngrams = EncoderNGrams(encoder_ngram_size, by_input.detach().clone())


def _is_usual_sync(encoder_input_ids: Any) -> bool:
    """Whether these are tokens, none of them negative: transformers bans those from the vocabulary's end."""
    if type(encoder_input_ids) is not Tensor or encoder_input_ids.dim() not in (1, 2):
        return False
    return encoder_input_ids.dtype in op.TOKEN_DTYPES and not bool((encoder_input_ids < 0).any())


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

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def copy(self) -> Any:
        return self.data.copy()

    __copy__ = copy

    def __reduce__(self) -> tuple:
        """As a list: what is pickled is read without fastgen, too."""
        return list, (self.data,)


def _reasons(processor: Any, input_ids: Tensor, scores: Tensor) -> list[Reason]:
    """Why this call is left to transformers."""
    is_of_encoder = isinstance(processor, EncoderNoRepeatNGramLogitsProcessor)
    kind = EncoderNoRepeatNGramLogitsProcessor if is_of_encoder else NoRepeatNGramLogitsProcessor
    if not PATCH_SET.replaces_host(PATCH_NAMES[kind]):
        return [Reason("METHOD_REPLACED", f"{kind.__name__}.__call__ is not that of transformers")]
    if type(processor.ngram_size) is not int or processor.ngram_size < 1:
        return [Reason("NGRAM_SIZE", f"ngram_size is {processor.ngram_size!r} (supported: int of 1 or more)")]
    reasons = that_hold(("SHAPES", "{}", op.unsupported_reasons(input_ids, scores)))
    if reasons or not is_of_encoder:
        return reasons
    ngrams = processor.generated_ngrams
    if not isinstance(ngrams, EncoderNGrams):
        return [Reason("PROCESSOR_MADE_ELSEWHERE", "the processor was made without fastgen")]
    tokens, rows = ngrams.encoder_input_ids, input_ids.shape[0]
    inputs, name = tokens.shape[0], "encoder_input_ids"
    is_changed = (processor.ngram_size, processor.batch_size) != (ngrams.ngram_size, inputs)
    others = [
        f"{name} has {attribute} {getattr(tokens, attribute)} (supported: {wanted}, as input_ids)"
        for attribute in ("dtype", "device")
        if getattr(tokens, attribute) != (wanted := getattr(input_ids, attribute))
    ]
    was_read = "data" in vars(ngrams)
    return that_hold(
        ("NGRAMS_READ", "the dictionaries of the encoder's n-grams were read, and may have been changed", was_read),
        ("PROCESSOR_CHANGED", "ngram_size or batch_size of the processor was changed", is_changed),
        ("SHAPES", "{}", others),
        ("ROWS_NOT_MULTIPLE", f"{rows} rows for {inputs} inputs (supported: a multiple)", inputs == 0 or rows % inputs),
    )


def _can_ban(processor: Any, input_ids: Tensor) -> bool:
    """Whether the rows are long enough for anything to be banned; transformers copies no scores where they are not."""
    is_own = isinstance(processor, NoRepeatNGramLogitsProcessor)
    return not is_own or input_ids.shape[1] >= processor.ngram_size


def _ban(ban: Callable[..., Tensor], processor: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Calls this form of the op, and counts it."""
    count(*kernel_for(scores.device.type).counted_as)
    is_of_encoder = isinstance(processor, EncoderNoRepeatNGramLogitsProcessor)
    tokens = processor.generated_ngrams.encoder_input_ids if is_of_encoder else None
    return ban(input_ids, scores, processor.ngram_size, encoder_tokens=tokens)


def _difference(found: Tensor, expected: Tensor) -> str:
    return "" if torch.equal(found.isneginf(), expected.isneginf()) else "bans other tokens than fastgen"
