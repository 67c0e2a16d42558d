"""The forwards of one decoding loop of transformers, and what goes from one to the next.

Between two steps rows can change places, and inputs that are finished can leave: the library carries them along to the
end, fairseq and CTranslate2 do not.

Tests: tests/optimizer/transformers/test_finished_inputs.py, tests/optimizer/transformers/test_recorded_step.py
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation import logits_process as processors_of
from transformers.generation import utils
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fastgen.optimizer.decoding.call import add_reasons, current_call
from fastgen.optimizer.decoding.decode_step import CannotPad, DecodeStep
from fastgen.optimizer.decoding.kv_cache import KVCache
from fastgen.optimizer.decoding.late_flag import reading_waits
from fastgen.optimizer.decoding.model_facts import size_of
from fastgen.optimizer.decoding.reasons import COMPACTION, LOOP, REORDERS_ITSELF, USER_CACHE, Reason
from fastgen.optimizer.decoding.user_code import is_user_code
from fastgen.optimizer.transformers import kv_layers, model_reasons, row_groups, verification
from fastgen.optimizer.transformers.constrained import treats_rows_alone
from fastgen.optimizer.transformers.no_repeat_ngram import writing_processors
from fastgen.origin import comes_with

# Arguments of a forward.
NAME, MASK, ENCODED = "past_key_values", "attention_mask", "encoder_outputs"

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
    if (cache := kv_layers.cache_of(arguments)) is not None:
        reasons += kv_layers.unsupported_types(cache)
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


class TransformersDecodeStep(DecodeStep):
    """Forwards of a model of transformers, with its cache; arguments and masks are prepared by the library.

    arguments: the `model_kwargs` of the library's loops.
    """

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        processors: Any,
        arguments: dict[str, Any],
        rows: int,
        rows_per_input: int,
        captures: bool = False,
    ) -> None:
        length, known = generation_config.max_length or 0, model_reasons.KNOWN
        super().__init__(current_call(), model, model, rows, rows_per_input, length, captures, known)
        self.generation_config = generation_config
        self.processors = writing_processors(processors, generation_config)
        self.arguments = arguments
        self._staying: list[Reason] | None = None
        self._kept: Any = None  # the call's own cache, for steps after those that are captured
        self._padded: dict[str, tuple[Any, int, Any]] = {}  # by name: what was given, the padding, and what it gave
        cache = kv_layers.cache_of(arguments)
        self._undo = None if cache is None else kv_layers.undo_of(cache)

    def abandon(self) -> None:
        """The loop has failed: the cache is empty again, for the library's loop to begin anew."""
        super().abandon()
        if self._undo is not None:
            self._undo()

    @property
    def ends_late(self) -> bool:
        """Whether the loop reads its end one step late: not where a processor could tell that there was a step more."""
        return self.captures and reading_waits(self.model.device) and self._foreign_processor is None

    @property
    def _foreign_processor(self) -> Any:
        """The first that may know more of the rows than what each holds, or None."""
        others = (processor for processor in self.processors if type(processor) not in BY_ROW)
        return next((processor for processor in others if not treats_rows_alone(processor)), None)

    def logits(self, input_ids: Tensor) -> Tensor:
        """Of the next token after input_ids `[rows, length]`: `[rows, vocabulary_size]` in float32, the model's own."""
        outputs = self.run(input_ids)
        self.arguments = self.model._update_model_kwargs_for_generation(
            outputs, self.arguments, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        return outputs.logits[:, -1].to(dtype=torch.float32, device=input_ids.device)

    def prefill(self, tokens: Tensor) -> Any:
        return self.model._prefill(tokens, self.generation_config, self.arguments, is_first_iteration=True)

    def inputs(self, tokens: Tensor, view: Any) -> dict[str, Any]:
        arguments = self.arguments if view is None else {**self.arguments, NAME: view}
        length = 1 if arguments["use_cache"] else None
        inputs = self.model.prepare_inputs_for_generation(tokens, next_sequence_length=length, **arguments)
        if view is None:
            return inputs
        del inputs[NAME]
        padding = self.graph.cache.padding
        return self._pad(inputs, padding) if padding else inputs

    @staticmethod
    def forward(model: Any, inputs: dict[str, Any], view: Any) -> Any:
        cache = {} if view is None else {NAME: view}
        return model(**inputs, **cache, return_dict=True)

    @staticmethod
    def logits_of(outputs: Any) -> Tensor:
        return outputs.logits

    def kv_cache(self, left: int) -> tuple[KVCache | None, Sequence[Reason]]:
        if (cache := self.arguments.get(NAME)) is None:
            return None, [Reason("NO_CACHE", "there is no cache")]
        self._kept = cache if self.runs_user_code else None
        self._cache = ref(cache)  # a step returns the view of its graph, which is the cache of the next arguments
        self.variant = frozenset(name for name, value in self.arguments.items() if value is not None)
        kv, reasons = kv_layers.kv_cache_of(cache, cache.get_seq_length() + left)
        return kv, reasons or model_reasons.row_state_reasons(self.model, {self.rows, self.call.inputs})

    def view_of(self, static: KVCache) -> Cache:
        return kv_layers.view_of(self.arguments[NAME] if self.graph is None else self.graph.view, static)

    def use(self, static: KVCache) -> None:
        if (cache := self._cache()) is not None:
            kv_layers.use(cache, static, self.call)

    def leave(self, static: KVCache) -> None:
        kv_layers.give_back(self._cache)
        self.arguments[NAME] = self._kept

    def model_reasons(self) -> list[Reason]:
        return model_reasons.model_reasons(self.model)

    @cached_property
    def runs_user_code(self) -> bool:
        return any(is_user_code(processor, self.known.packages) for processor in self.processors)

    def _pad(self, inputs: dict[str, Any], padding: int) -> dict[str, Any]:
        """These arguments of a forward, with so many hidden positions before the first one.

        In the keys of the cross-attention where there is one: its mask `[rows, length]` the model makes larger. What
        stays the same is padded once. Otherwise the masks have to be those of the attention, `[rows, 1, 1, length]`,
        one for all layers or one for each kind.
        """
        is_cross = self.model.config.is_encoder_decoder
        masks, encoded = tree_leaves(inputs.get(MASK)), inputs.get(ENCODED)
        dims = 2 if is_cross else 4
        fits = bool(masks) and all(isinstance(mask, Tensor) and mask.dim() == dims for mask in masks)
        if fits and is_cross:  # of sound, a mask may count the frames before the encoder joined some
            fits = encoded is not None and masks[0].shape[1] == encoded[0].shape[1]
        if not fits:
            raise CannotPad
        if is_cross:
            return {**inputs, **{name: self._pad_once(name, inputs[name], padding) for name in (MASK, ENCODED)}}
        return {**inputs, MASK: tree_map_only(Tensor, lambda mask: _hidden_before(mask, padding), inputs[MASK])}

    def _pad_once(self, name: str, value: Any, padding: int) -> Any:
        known, of, padded = self._padded.get(name, (None, 0, None))
        if known is not value or of != padding:
            pad = _hidden_before if name == MASK else _zeros_before
            padded = tree_map_only(Tensor, lambda tensor: pad(tensor, padding), value)
            self._padded[name] = value, padding, padded
        return padded

    def process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """What the processors make of scores `[rows, vocabulary_size]`, which they may overwrite."""
        return self.processors(input_ids, scores)

    def reorder(self, beam_idx: Tensor) -> None:
        """Row i goes on with the keys of row `beam_idx[i]`; ValueError where the library raises it, too."""
        if self.graph is not None:
            super().reorder(beam_idx)
            return
        name = next((name for name in _MOVED if name in self.arguments), None)
        if name is None:
            return
        cache = self.arguments[name]
        if hasattr(self.model, "_reorder_cache"):
            self.arguments[name] = self.model._reorder_cache(cache, beam_idx)
        elif cache is not None and not self._cache_reasons:
            kv_layers.reorder(cache, beam_idx)
        elif hasattr(cache, "reorder_cache"):
            cache.reorder_cache(beam_idx)
        else:
            raise ValueError(f"{name} is a {type(cache).__name__}, whose rows cannot be moved")

    @cached_property
    def _cache_reasons(self) -> list[Reason]:
        """Why fastgen cannot move the rows of the cache; asked after the first step, when it has its layers."""
        return kv_layers.unsupported_types(kv_layers.cache_of(self.arguments))

    def leaving_pays(self, leaving: int, inputs: int, steps_left: int) -> bool:
        """Whether `leaving` of `inputs` inputs should leave now, with at most `steps_left` steps to come."""
        costs, size = self.call.costs, size_of(self.model)
        if not self.arguments.get("use_cache"):
            return False
        if not costs.should_compact(size, leaving, inputs, self.rows_per_input, self.steps, steps_left):
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
        reasons = reasons or model_reasons.model_reasons(self.model)
        sizes = {self.rows, self.rows // self.rows_per_input}
        reasons = reasons or model_reasons.row_state_reasons(self.model, sizes)
        if self.graph is None:
            reasons = reasons or self._cache_reasons
        return reasons or row_groups.unsupported_reasons(self.model.config.model_type, self.arguments, self.rows)

    def compact(self, batch_index: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `batch_index` (int64) among those that are there; `rows` are theirs."""
        self.arguments = row_groups.take(self.arguments, self.rows, rows)
        if self.graph is None:
            for name in kv_layers.NAMES:
                if self.arguments.get(name) is not None:
                    kv_layers.compact(self.arguments[name], batch_index, rows)
        super().compact(batch_index, rows)
        self.processors = type(self.processors)(_of_rows(one, rows) for one in self.processors)


def _of_rows(processor: Any, kept: Tensor) -> Any:
    """A processor for these rows only: that of repetitions knows how long the padding of each row is."""
    lengths = getattr(processor, "prompt_ignore_length", None)
    if isinstance(lengths, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = lengths.index_select(0, kept.to(lengths.device))
    return processor


def rows_of(batch_index: Tensor, rows_per_input: int) -> Tensor:
    """The rows of the inputs at `batch_index`, in their order."""
    return (batch_index[:, None] * rows_per_input + torch.arange(rows_per_input, device=batch_index.device)).flatten()


def _hidden_before(mask: Tensor, padding: int) -> Tensor:
    """A mask `[…, length]` of bool or numbers (1 is seen), or of what is added to scores if it has four dimensions."""
    is_added = mask.dim() == 4 and mask.dtype != torch.bool
    return functional.pad(mask, (padding, 0), value=torch.finfo(mask.dtype).min if is_added else 0)


def _zeros_before(states: Tensor, padding: int) -> Tensor:
    """States of an encoder `[rows, length, width]`."""
    return functional.pad(states, (0, 0, padding, 0))
