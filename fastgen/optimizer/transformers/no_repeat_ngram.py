"""`NoRepeatNGramLogitsProcessor` and `EncoderNoRepeatNGramLogitsProcessor` through the op of that name.

transformers bans into a copy of the scores. Inside `generate` the scores that reach these processors are often nobody
else's: then they are written in place, which is most of what there is to gain.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import logits_process

from fastgen.ops.no_repeat_ngram import no_repeat_ngram as ban
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_ as ban_in_place
from fastgen.ops.no_repeat_ngram.problem import unsupported_reasons
from fastgen.optimizer import PATCH_SET, report
from fastgen.optimizer.transformers import verification

GROUP = "transformers.no_repeat_ngram"

_LOOPS = ("_sample", "_beam_search", "_assisted_decoding")

# Classes whose first call was compared with the original, where transformers is newer than any tested version.
_verified: set[type] = set()


def logits_processors(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`GenerationMixin._get_logits_processor`: also finds out which of its processors may write in place."""
    processors = original(self, *args, **kwargs)
    record = report.running()
    if record is not None:
        arguments = inspect.signature(GenerationMixin._get_logits_processor).bind(self, *args, **kwargs).arguments
        if not record.user_gave_loop and _loop_forgets_scores(self, arguments["generation_config"]):
            given = arguments.get("logits_processor") or ()
            record.scores_are_ours.update(_before_any_of_the_caller(processors, given))
    return processors


def _loop_forgets_scores(model: Any, generation_config: Any) -> bool:
    """Whether the decoding loop is one that was read, and does not return the scores that it gives to processors."""
    loops = [getattr(type(model), name, None) for name in _LOOPS]
    is_known = all(loop is None or loop.__module__ == GenerationMixin.__module__ for loop in loops)
    return is_known and verification.is_tested(model) and not generation_config.output_logits


def _before_any_of_the_caller(processors: list[Any], given: Sequence[Any]) -> list[Any]:
    """The processors that `generate` made and that come before any other, which might keep what it was given."""
    ours = []
    for processor in processors:
        if type(processor).__module__ != logits_process.__name__ or any(processor is one for one in given):
            break
        ours.append(processor)
    return ours


def no_repeat_ngram(original: Callable, self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """`NoRepeatNGramLogitsProcessor.__call__`: input_ids `[rows, length]`, scores `[rows, vocabulary_size]`."""
    if reasons := unsupported_reasons(input_ids, scores):
        return _leave(original, reasons, self, input_ids, scores)
    if input_ids.shape[1] < self.ngram_size:
        return original(self, input_ids, scores)
    return _ban(original, self, input_ids, scores, self.ngram_size)


def encoder_ngrams(original: Callable, self: Any, encoder_ngram_size: int, encoder_input_ids: Tensor) -> None:
    """`EncoderNoRepeatNGramLogitsProcessor.__init__`: the dictionaries of all n-grams are made when they are read."""
    original(self, encoder_ngram_size, encoder_input_ids[..., :0])
    self.generated_ngrams = EncoderNGrams(encoder_ngram_size, encoder_input_ids)


def no_repeat_encoder_ngram(original: Callable, self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """`EncoderNoRepeatNGramLogitsProcessor.__call__`: shapes as for `no_repeat_ngram`."""
    ngrams = self.generated_ngrams
    if not isinstance(ngrams, EncoderNGrams):
        return original(self, input_ids, scores)
    if reasons := unsupported_reasons(input_ids, scores) or ngrams.unsupported_reasons(input_ids, self.ngram_size):
        return _leave(original, reasons, self, input_ids, scores)
    return _ban(original, self, input_ids, scores, ngrams.ngram_size, encoder_tokens=ngrams.encoder_input_ids)


class EncoderNGrams(Sequence):
    """The n-grams of the encoder's input, `[inputs, source_width]`: tokens, and transformers' dictionaries on demand.

    Item i is the dictionary of input i, from the first n - 1 tokens of an n-gram to the list of its last ones.
    """

    def __init__(self, ngram_size: int, encoder_input_ids: Tensor) -> None:
        self.ngram_size = ngram_size
        self.encoder_input_ids = encoder_input_ids.detach().clone().reshape(-1, encoder_input_ids.shape[-1])

    @functools.cached_property
    def _dictionaries(self) -> list[dict]:
        return logits_process._get_ngrams(self.ngram_size, self.encoder_input_ids, len(self))

    def __getitem__(self, index: Any) -> Any:
        return self._dictionaries[index]

    def __len__(self) -> int:
        return self.encoder_input_ids.shape[0]

    def unsupported_reasons(self, input_ids: Tensor, ngram_size: int) -> list[str]:
        """Why the dictionaries are needed for these rows."""
        reasons = []
        if ngram_size != self.ngram_size:
            reasons.append(f"ngram_size was changed from {self.ngram_size} to {ngram_size}")
        for name in ("dtype", "device"):
            wanted, found = getattr(input_ids, name), getattr(self.encoder_input_ids, name)
            if found != wanted:
                reasons.append(f"encoder_input_ids has {name} {found} (supported: {wanted}, as input_ids)")
        if len(self) == 0 or input_ids.shape[0] % len(self):
            reasons.append(f"{input_ids.shape[0]} rows for {len(self)} inputs (supported: a multiple)")
        return reasons


def _ban(original: Callable, processor: Any, input_ids: Tensor, scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if PATCH_SET.newer_than_tested("transformers") and type(processor) not in _verified:
        expected = original(processor, input_ids, scores)
        if not torch.equal(ban(input_ids, scores, *args, **kwargs).isneginf(), expected.isneginf()):
            PATCH_SET.fail(GROUP, f"{type(processor).__name__} bans other tokens than fastgen")
        else:
            _verified.add(type(processor))
        return expected
    record = report.running()
    form = ban_in_place if record is not None and processor in record.scores_are_ours else ban
    return form(input_ids, scores, *args, **kwargs)


def _leave(original: Callable, reasons: list[str], *args: Any) -> Tensor:
    record = report.running()
    if record is not None:
        record.fell_back([f"n-gram blocking: {reason}" for reason in reasons])
    return original(*args)
