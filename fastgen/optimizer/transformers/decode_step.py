"""The forwards of one decoding loop of transformers, and what goes from one to the next.

Between two steps rows can change places, and inputs that are finished can leave: the library carries them along to the
end, fairseq and CTranslate2 do not.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import logits_process as processors_of
from transformers.generation import utils
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fastgen.optimizer.decoding import gain, recordable, recorded_steps
from fastgen.optimizer.decoding.call import GenerateCall, add_reasons, current_call
from fastgen.optimizer.decoding.late_flag import reading_waits
from fastgen.optimizer.decoding.model_facts import size_of
from fastgen.optimizer.decoding.reasons import COMPACTION, LOOP, REORDERS_ITSELF, STEPS, USER_CACHE, Reason, with_code
from fastgen.optimizer.transformers import (
    cache_layers,
    eligibility,
    model_state,
    rows,
    verification,
)
from fastgen.optimizer.transformers.constrained import treats_rows_alone
from fastgen.optimizer.transformers.no_repeat_ngram import writing_processors
from fastgen.optimizer.transformers.recorded_steps import NAME, RecordedForwards
from fastgen.origin import comes_with

# Processors that treat every row for itself, from what it holds.
BY_ROW = (
    processors_of.MinLengthLogitsProcessor,
    processors_of.MinNewTokensLengthLogitsProcessor,
    processors_of.TemperatureLogitsWarper,
    processors_of.TopKLogitsWarper,
    processors_of.TopPLogitsWarper,
    processors_of.MinPLogitsWarper,
    processors_of.TypicalLogitsWarper,
    processors_of.EpsilonLogitsWarper,
    processors_of.EtaLogitsWarper,
    processors_of.RepetitionPenaltyLogitsProcessor,
    processors_of.NoRepeatNGramLogitsProcessor,
    processors_of.SequenceBiasLogitsProcessor,
    processors_of.NoBadWordsLogitsProcessor,
    processors_of.ForcedBOSTokenLogitsProcessor,
    processors_of.ForcedEOSTokenLogitsProcessor,
    processors_of.InfNanRemoveLogitsProcessor,
    processors_of.ExponentialDecayLengthPenalty,
    processors_of.LogitNormalization,
    processors_of.SuppressTokensAtBeginLogitsProcessor,
    processors_of.SuppressTokensLogitsProcessor,
    processors_of.WhisperTimeStampLogitsProcessor,
)

# The arguments that a step has had since transformers 5.3.
_STEPS_ARE_KNOWN = (
    "is_first_iteration" in inspect.signature(GenerationMixin._prefill).parameters
    and "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)

# What the library's beam search moves; before transformers 5.13 it forgot the states of Mamba.
_TEXTS = "".join(map(str, inspect.unwrap(GenerationMixin._beam_search).__code__.co_consts))
_MOVED = utils.ALL_CACHE_NAMES if "cannot be reordered" in _TEXTS else ("past_key_values",)

# Steps are looked back upon to guess how many there will be: at least so many.
FEW_STEPS = 8


def loop_reasons(
    model: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool,
    arguments: dict[str, Any],
    methods: tuple[str, ...] = (),
) -> list[Reason]:
    """Why a loop of the library cannot be replaced by one of fastgen, as the report tells; empty if it can.

    arguments: the `model_kwargs` of the loop. methods: those that the library's loop calls, and fastgen's does not.
    """
    reasons: list[Reason] = []
    call = current_call()
    for name in ("_has_unfinished_sequences", *methods):
        if not comes_with(getattr(model, name, None), GenerationMixin):
            reasons.append(Reason("METHOD_REPLACED", f"{name} is not that of GenerationMixin"))
    if (cache := cache_layers.cache_of(arguments)) is not None:
        reasons += with_code("CACHE_TYPE", cache_layers.unsupported_types(cache))
    if call is None or call.user_code or not verification.is_tested(model):
        reasons.append(Reason("UNTESTED", "the model's code, or this version of transformers, was not tested"))
    elif call.user_cache:
        reasons.append(USER_CACHE)
    if not _STEPS_ARE_KNOWN:
        reasons.append(Reason("TRANSFORMERS_VERSION", "transformers before 5.3 prepares its steps in another way"))
    if synced_gpus:
        reasons.append(Reason("SYNCED_GPUS", "synced_gpus is set"))
    if generation_config.return_dict_in_generate:
        reasons.append(Reason("RETURN_DICT", "return_dict_in_generate is set"))
    if getattr(generation_config, "is_assistant", False):
        reasons.append(Reason("ASSISTANT", "the model is the assistant of another"))
    if any(type(criterion) not in (EosTokenCriteria, MaxLengthCriteria) for criterion in stopping_criteria):
        text = "a stopping criterion other than length and end tokens"
        reasons.append(Reason("STOPPING_CRITERION", text))
    add_reasons(LOOP, reasons)
    return reasons


@contextmanager
def undone_after_errors(arguments: dict[str, Any]) -> Iterator[None]:
    """Inside this context a loop that fails leaves the cache empty, for the library's loop to begin anew."""
    cache = cache_layers.cache_of(arguments)
    undo = None if cache is None else cache_layers.undo_of(cache)
    try:
        yield
    except Exception:
        recorded_steps.abandon()
        if undo is not None:
            undo()
        raise


class DecodeStep:
    """What a loop of `rows` rows asks the model; rows of an input stand next to each other, `fan_out` of them.

    arguments: the `model_kwargs` of the library's loops. records: the steps are recorded if they turn out to be fit.
    """

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        processors: Any,
        arguments: dict[str, Any],
        rows: int,
        fan_out: int,
        records: bool = False,
    ) -> None:
        self.model, self.generation_config = model, generation_config
        self.processors = writing_processors(processors, generation_config)
        self.arguments, self.rows, self.fan_out = arguments, rows, fan_out
        self.call: GenerateCall = current_call()
        self.steps = 0
        self.records = records
        self.recorded: RecordedForwards | None = None
        self._staying: list[Reason] | None = None

    @property
    def ends_late(self) -> bool:
        """Whether the loop reads its end one step late: not where a processor could tell that there was a step more."""
        return self.records and reading_waits(self.model.device) and self._foreign_processor is None

    @property
    def _foreign_processor(self) -> Any:
        """The first that may know more of the rows than what each holds, or None."""
        others = (processor for processor in self.processors if type(processor) not in BY_ROW)
        return next((processor for processor in others if not treats_rows_alone(processor)), None)

    def logits(self, input_ids: Tensor) -> Tensor:
        """Of the next token after input_ids `[rows, length]`: `[rows, vocabulary_size]` in float32, the model's own."""
        model = self.model
        if self.steps == 0:
            outputs = model._prefill(input_ids, self.generation_config, self.arguments, is_first_iteration=True)
        elif self.recorded is not None:
            outputs = self.recorded.run(self._inputs(input_ids, self.recorded.cache_with_room()))
        else:
            outputs = model(**self._inputs(input_ids, None), return_dict=True)
            if self.records and self.steps in (1, recordable.STEPS_BEFORE):
                self._begin_recording(input_ids, outputs.logits)
        self.steps += 1
        self.arguments = model._update_model_kwargs_for_generation(
            outputs, self.arguments, is_encoder_decoder=model.config.is_encoder_decoder
        )
        return outputs.logits[:, -1].to(dtype=torch.float32, device=input_ids.device)

    def _inputs(self, input_ids: Tensor, cache: Any) -> dict[str, Any]:
        """The arguments of the model's forward, with this cache instead of the loop's own if one is given."""
        arguments = self.arguments if cache is None else {**self.arguments, NAME: cache}
        length = 1 if arguments["use_cache"] else None
        return self.model.prepare_inputs_for_generation(input_ids, next_sequence_length=length, **arguments)

    def _begin_recording(self, input_ids: Tensor, logits: Tensor) -> None:
        """logits: what the model has just given."""
        if self.arguments.get(NAME) is None:
            add_reasons(STEPS, [Reason("NO_CACHE", "there is no cache")])
            return
        recorded = RecordedForwards(self.model, self.arguments, self.rows)
        left = self.generation_config.max_length - input_ids.shape[1]
        if recorded.start(self.rows, self.steps, left, partial(self._inputs, input_ids), logits):
            self.recorded = recorded

    def process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """What the processors make of scores `[rows, vocabulary_size]`, which they may overwrite."""
        return self.processors(input_ids, scores)

    def reorder(self, beam_idx: Tensor) -> None:
        """Row i goes on with the keys of row `beam_idx[i]`; ValueError where the library raises it, too."""
        if self.recorded is not None:
            self.recorded.reorder(beam_idx)
            return
        name = next((name for name in _MOVED if name in self.arguments), None)
        if name is None:
            return
        cache = self.arguments[name]
        if hasattr(self.model, "_reorder_cache"):
            self.arguments[name] = self.model._reorder_cache(cache, beam_idx)
        elif cache is not None and not self._cache_reasons:
            cache_layers.reorder(cache, beam_idx)
        elif hasattr(cache, "reorder_cache"):
            cache.reorder_cache(beam_idx)
        else:
            raise ValueError(f"{name} is a {type(cache).__name__}, whose rows cannot be moved")

    @cached_property
    def _cache_reasons(self) -> list[str]:
        """Why fastgen cannot move the rows of the cache; asked after the first step, when it has its layers."""
        return cache_layers.unsupported_types(cache_layers.cache_of(self.arguments))

    def leaving_pays(self, leaving: int, inputs: int, steps_left: int) -> bool:
        """Whether `leaving` of `inputs` inputs should leave now, with at most `steps_left` steps to come."""
        if leaving * 8 < inputs or not self.arguments.get("use_cache"):
            return False
        steps = min(steps_left, max(self.steps, FEW_STEPS))
        if gain.prefill_reasons(size_of(self.model), leaving * self.fan_out * steps):
            return False
        if self._staying is None:
            self._staying = self._staying_reasons()
            if self._staying:
                self.call.report.add_reasons(COMPACTION, self._staying)
            else:
                self.call.report.shared.append("finished inputs: removed from the batch")
        return not self._staying

    def _staying_reasons(self) -> list[Reason]:
        """Why finished inputs have to stay in the batch; empty if what remains does not depend on them."""
        foreign = self._foreign_processor
        reasons: list[Reason] = []
        if foreign is not None:
            text = f"{type(foreign).__name__} may know the rows by their batch index"
            reasons.append(Reason("PROCESSOR_BY_ROW", text))
        if hasattr(self.model, "_reorder_cache"):
            reasons.append(REORDERS_ITSELF)
        reasons = reasons or with_code("MODEL", eligibility.model_reasons(self.model))
        sizes = {self.rows, self.rows // self.fan_out}
        reasons = reasons or with_code("MODEL_STATE", model_state.rows_reasons(self.model, sizes))
        if self.recorded is None:
            reasons = reasons or with_code("CACHE_TYPE", self._cache_reasons)
        return reasons or rows.unsupported_reasons(self.model.config.model_type, self.arguments, self.rows)

    def keep(self, places: Tensor) -> None:
        """Drops the inputs that are not at `places` (int64) among those that are there."""
        kept = rows_of(places, self.fan_out)
        self.arguments = rows.take(self.arguments, self.rows, kept)
        if self.recorded is not None:
            self.recorded.keep(places, kept)
        else:
            for name in cache_layers.NAMES:
                if self.arguments.get(name) is not None:
                    cache_layers.keep_inputs(self.arguments[name], places, kept)
        self.processors = type(self.processors)(_of_rows(one, kept) for one in self.processors)
        self.rows = kept.shape[0]


def _of_rows(processor: Any, kept: Tensor) -> Any:
    """A processor for these rows only: that of repetitions knows how long the padding of each row is."""
    lengths = getattr(processor, "prompt_ignore_length", None)
    if isinstance(lengths, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = lengths.index_select(0, kept.to(lengths.device))
    return processor


def rows_of(places: Tensor, fan_out: int) -> Tensor:
    """The rows of the inputs at `places`, in their order."""
    return (places[:, None] * fan_out + torch.arange(fan_out, device=places.device)).flatten()
