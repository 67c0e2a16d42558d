"""The forwards of one decoding loop of transformers, and the state between them.

Between two steps, rows can be reordered, and finished inputs can leave. The library keeps these in the batch to the
end, unlike fairseq and CTranslate2.

Tests: tests/optimizer/transformers/test_finished_inputs.py, tests/optimizer/transformers/test_captured_steps.py,
tests/optimizer/transformers/test_refused_calls.py
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from functools import cached_property, partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from fastgen.models.cache_names import CACHE
from fastgen.ops.tracing import NotRepeatable
from fastgen.optimizer.decoding.call import Rollback, undo_of_attributes, undo_of_random_numbers, undo_of_tensors
from fastgen.optimizer.decoding.captures import CannotPad
from fastgen.optimizer.decoding.cost_model import CostModel, ModelSize, size_of
from fastgen.optimizer.decoding.decode_step import DecodeStep
from fastgen.optimizer.decoding.graphs import CapturedGraph
from fastgen.optimizer.decoding.report import COMPACTION, STEPS, LeaveAlone, Reason, check, leave_alone_for
from fastgen.optimizer.decoding.static_kv_cache import KVContent, StaticKVCache
from fastgen.optimizer.transformers import compat, kv_layers, row_groups, state_layers
from fastgen.optimizer.transformers.checks import CallChecks, HostModel
from fastgen.optimizer.transformers.drafts import MASKS, DraftedSteps, inputs_ahead

# Arguments of a forward.
MASK, ENCODED = "attention_mask", "encoder_outputs"


def is_worth_compacting(
    costs: CostModel, size: ModelSize, leaving: int, rows: int, steps_done: int, steps_left: int
) -> bool:
    """Whether a batch should drop its finished rows, `leaving` of `rows`.

    steps_left: the most steps that may follow; their expected number is estimated from `steps_done`.
    """
    if leaving < costs.min_leaving * rows:
        return False
    steps = min(steps_left, max(steps_done, costs.min_steps_expected))
    return costs.pays(size.tokens(leaving * steps), costs.overhead_of_prefill_once(size))


class TransformersDecodeStep(DecodeStep):
    """Runs a model of transformers with its cache; the library prepares arguments and masks.

    arguments: the `model_kwargs` of the library's loops. sources: what drafts are taken from in addition to the text of
    each row, or an empty list; None for a loop without drafts. shows_cache: whether the caller gets the cache: its
    content must be exact.
    """

    host = "transformers"
    model: HostModel

    def __init__(
        self,
        checks: CallChecks,
        processors: Any,
        rows_per_input: int,
        may_capture: bool = False,
        sources: list[list[int]] | None = None,
    ) -> None:
        config, arguments = checks.arguments.generation_config, checks.arguments.model_kwargs
        super().__init__(checks, len(checks.arguments.input_ids), rows_per_input, config.max_length or 0, may_capture)
        self.generation_config, self.processors, self.arguments = config, processors, arguments
        self.shows_cache = bool(self.call.host.user_cache or config.return_dict_in_generate)
        self.is_streamed = checks.arguments.streamer is not None
        self.drafts = None if sources is None else DraftedSteps(self, sources)
        self._dynamic: Any = None  # the cache before a capture, for eager steps afterwards
        self._earlier_states: list[Tensor] = []  # before the last forward
        self._padded: dict[str, tuple[Any, int, Any]] = {}  # by name: an argument, the padding, the padded argument
        self._masks = StepMasks(self.model)
        self.rollback.callback(undo_of_random_numbers(only_torch=True))
        self.rollback.callback(undo_of_attributes(processors))
        if (cache := kv_layers.cache_of(arguments)) is not None:
            self.rollback.callback(kv_layers.undo_of(cache))

    def __exit__(self, *error: Any) -> None:
        if self.drafts is not None and error[0] is None:
            self.drafts.end()
        if self.drafts is not None and self.shows_cache:
            self.drafts.settle()
            kv_layers.make_contiguous(self.own_cache)
        super().__exit__(*error)
        # Releases the cache: if nobody else holds it, it need not be given back when the call ends.
        self.arguments = {}
        self.checks = None  # they hold the arguments of the loop, in which the cache may be
        self._dynamic = None
        self._earlier_states = []
        self.drafts = None
        self.rollback.keep()

    @property
    def stops_late(self) -> bool:
        """Whether the loop reads its end one step late; not if user code could notice the additional step."""
        checks = self.checks
        is_noticed = checks.processors_by_row or checks.arguments.streamer is not None or not checks.stops_by_row
        is_noticed = is_noticed or self.shows_cache
        return self.captures is not None and needs_sync(self.model.device) and not is_noticed

    def logits(self, input_ids: Tensor) -> Tensor:
        """Returns the logits `[rows, vocabulary_size]`, float32, of the token after input_ids `[rows, length]`."""
        if self.drafts is None or self.steps == 0:
            return self.next_logits(input_ids)
        return self.drafts.logits_sync(input_ids)

    def next_logits(self, input_ids: Tensor) -> Tensor:
        """Returns the same from a forward of one token."""
        outputs = self.run(input_ids)
        self._extend_arguments(outputs)
        return outputs.logits[:, -1].to(dtype=torch.float32, device=input_ids.device)

    def _extend_arguments(self, outputs: Any) -> None:
        """Adds the column of the next token to the arguments."""
        update = self.model._update_model_kwargs_for_generation
        self.arguments = update(outputs, self.arguments, is_encoder_decoder=self.model.config.is_encoder_decoder)

    # What drafts ask, in addition to `outputs_of`.

    def advance(self, outputs: Any) -> None:
        """Counts a step whose logits were in the outputs of an earlier one."""
        self.steps += 1
        self.mode.advance()
        self._extend_arguments(outputs)

    def attempt(self, is_trial: bool) -> Rollback:
        """Returns a context that drops the positions of a forward, even of one that failed in some layer.

        is_trial: as in `outputs_of`: the forward may have changed more than the cache.
        """
        rollback = Rollback()
        if (static := self.mode.cache) is not None:
            rollback.callback(static.advance, 0)
        else:
            rollback.callback(setattr, self.mode, "ahead", 0)
            rollback.callback(kv_layers.undo_of(self.arguments[CACHE]))
        if is_trial:
            rollback.callback(undo_of_tensors(self.model.modules()))
            rollback.callback(undo_of_random_numbers(only_torch=True))
        return rollback

    def version(self) -> int:
        """Returns a number that changes if user code changes weights in place."""
        return sum(map(_version, self._tensors)) if self.runs_user_code else 0

    @cached_property
    def _tensors(self) -> list[Tensor]:
        """The parameters, buffers and plain tensors of all modules that count changes in place."""
        spaces = [(module._parameters, module._buffers, vars(module)) for module in self.model.modules()]
        values = [value for of_module in spaces for space in of_module for value in space.values()]
        return [value for value in values if isinstance(value, Tensor) and not value.is_inference()]

    # What the base class asks.

    def prefill(self, tokens: Tensor) -> Any:
        return self.model._prefill(tokens, self.generation_config, self.arguments, is_first_iteration=True)

    def inputs(self, tokens: Tensor, graph: CapturedGraph | None, size: int = 1) -> dict[str, Any]:
        if size > 1:
            column = 0
            if graph is not None:
                column = graph.cache.paddings[0] + graph.cache.prompt_lengths[0] + graph.cache.generated_length + 1
            return inputs_ahead(self.inputs(tokens[:, : 1 - size], graph), tokens[:, 1 - size :], column)
        length = 1 if self.arguments["use_cache"] else None
        if graph is None:
            return self.model.prepare_inputs_for_generation(tokens, next_sequence_length=length, **self.arguments)
        arguments = {**self.arguments, **graph.view}
        is_cross = self.model.config.is_encoder_decoder
        name = MASKS[is_cross]
        masks = self._masks.reveal(graph.cache) if self._masks.is_proven else None
        if masks is not None:  # the library builds none if it gets one of four dimensions
            arguments[name] = self._masks.leaves[0]
        inputs = self.model.prepare_inputs_for_generation(tokens, next_sequence_length=length, **arguments)
        if inputs.pop(*graph.view, None) is None:  # as Phi-3 does, where its rotary positions change
            raise NotRepeatable("the model drops its cache")
        if graph.cache.padding and (masks is None or is_cross):
            inputs = self._pad(inputs, graph.cache)
        if masks is not None:
            inputs[name] = masks
        else:
            self._masks.keep_sync(graph.cache, inputs.get(name))
        return inputs

    @staticmethod
    def forward(model: HostModel, inputs: dict[str, Any], view: Any) -> Any:
        return model(**inputs, **(view or {}), return_dict=True)

    @staticmethod
    def logits_of(outputs: Any) -> Tensor:
        return outputs.logits

    @check(STEPS)
    def content(self, left: int) -> tuple[KVContent, Hashable]:
        if (cache := self.arguments.get(self._cache_name)) is None:
            raise LeaveAlone([Reason("NO_CACHE", "there is no cache")])
        self._dynamic = cache  # later arguments hold a graph's view, which a step returns as its cache
        states, self._earlier_states = self._earlier_states, []
        content = kv_layers.content_of(cache, left, states)
        most = (kv_layers.length_of(cache) or 0) + left
        self._masks.is_possible = self._masks.is_possible and not self.checks.window_reasons(most)
        leave_alone_for(self.checks.row_states({self.rows, self.call.inputs}))
        return content, frozenset(name for name, value in self.arguments.items() if value is not None)

    def view_of(self, static: StaticKVCache) -> dict[str, Cache]:
        return {self._cache_name: kv_layers.view_of(self._dynamic, static)}

    def use(self, static: StaticKVCache) -> None:
        self._masks.forget()
        if self.mode.cache is None:  # the loop's first static cache
            self.call.on_exit.callback(kv_layers.give_back, ref(self._dynamic), from_static=True)
        kv_layers.use(self._dynamic, static)

    def leave(self, static: StaticKVCache) -> None:
        kv_layers.give_back(ref(self._dynamic), from_static=True)
        self.arguments[self._cache_name] = self._dynamic

    def keep_states(self) -> None:
        if (cache := self.arguments.get(self._cache_name)) is not None:
            states = state_layers.states_of(kv_layers.layers_of(cache))
            self._earlier_states = [state.clone() for state in states]

    @property
    def own_cache(self) -> Any:
        """The loop's own cache, which holds all that steps have added once the call ends; None if there is none."""
        return self._dynamic if self.mode.cache is not None else self.arguments.get(self._cache_name)

    @property
    def _cache_name(self) -> str:
        """The name of the cache among the arguments; empty if there is none."""
        return next(filter(self.arguments.__contains__, compat.MOVED_CACHES), "")

    def crop(self, count: int) -> None:
        kv_layers.crop(self.arguments[CACHE], count)

    @property
    def attention(self) -> str | None:
        """The name of the decoder's attention function in the library's registry."""
        return getattr(self.model.config.get_text_config(decoder=True), "_attn_implementation", None)

    @property
    def attends_in_segments(self) -> bool:
        return self.attention == "sdpa"

    @cached_property
    def runs_user_code(self) -> bool:
        return bool(self.checks.runs_user_code)

    def _pad(self, inputs: dict[str, Any], cache: StaticKVCache) -> dict[str, Any]:
        """Returns the arguments of a forward, padded with hidden positions before the first one, as the cache is.

        If there is cross-attention, the positions are among its keys; the model expands its mask `[rows, length]`.
        Otherwise the masks must be those of self-attention, `[rows, 1, 1, length]`, one for all layers or one for each
        kind, which their length tells apart. Arguments that do not change are padded once.
        """
        is_cross = self.model.config.is_encoder_decoder
        masks = tensors_of(inputs.get(MASK))
        encoded = inputs.get(ENCODED)
        if not masks or any(not isinstance(mask, Tensor) or mask.dim() != (2 if is_cross else 4) for mask in masks):
            raise CannotPad
        if not is_cross:
            pad_mask = partial(_padded_like, cache=cache)
            return {**inputs, MASK: tree_map_only(Tensor, pad_mask, inputs[MASK])}
        if encoded is None or masks[0].shape[1] != encoded[0].shape[1]:  # speech encoders downsample
            raise CannotPad
        padding = cache.padding
        zeros = (0, 0, padding, 0)  # for states `[rows, length, width]`
        for name in (MASK, ENCODED):
            value, length, _ = self._padded.get(name, (None, 0, None))
            if value is not inputs[name] or length != padding:
                pad = partial(_hidden_before, padding=padding) if name == MASK else partial(functional.pad, pad=zeros)
                self._padded[name] = inputs[name], padding, tree_map_only(Tensor, pad, inputs[name])
        return {**inputs, **{name: padded for name, (_, _, padded) in self._padded.items()}}

    def reorder(self, beam_idx: Tensor) -> None:
        """Continues row i with the keys of row `beam_idx[i]`. Raises ValueError if the library does."""
        if (static := self.mode.cache) is not None:
            static.reorder(beam_idx)
            return
        if not (name := self._cache_name):
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
        """Returns why fastgen cannot move the rows of the cache; called after the first step, which creates layers."""
        return kv_layers.unsupported_types(kv_layers.cache_of(self.arguments))

    def should_compact(self, leaving: int, steps_left: int) -> bool:
        """Whether `leaving` finished rows should leave the batch now; steps_left: the most steps that may follow."""
        if self.captures is not None and self.model.device.type == "cuda":
            pays = self.captures.should_leave(leaving, steps_left)
        else:
            size = size_of(self.model, self.checks.known_code)
            pays = is_worth_compacting(self.call.costs, size, leaving, self.rows, self.steps, steps_left)
        return bool(self.arguments.get("use_cache")) and pays and not self.compaction_reasons

    @cached_property
    def compaction_reasons(self) -> list[Reason]:
        """Returns why finished inputs must stay in the batch; empty if the rest do not depend on them."""
        cache_reasons = self._cache_reasons if self.mode.cache is None else []
        reasons = self.checks.compaction(self.rows, self.rows_per_input, self.arguments, cache_reasons)
        self.call.report.add_reasons(COMPACTION, reasons)
        if not reasons:
            self.call.report.shared.append("finished inputs: removed from the batch")
        return reasons

    def compact_cache(self, batch_index: Tensor, rows: Tensor) -> None:
        if (cache := kv_layers.cache_of(self.arguments)) is not None:
            kv_layers.compact(cache, batch_index, rows)

    def compact(self, batch_index: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `batch_index`; row i becomes what row `rows[i]` was (int64 both)."""
        if self.drafts is not None:
            self.drafts.compact(rows.tolist())
        self.arguments = row_groups.take(self.arguments, self.rows, rows)
        super().compact(batch_index, rows)
        self.processors = copy.copy(self.processors)
        for index, processor in enumerate(self.processors):  # one stores the length of each row's padding
            if isinstance(lengths := getattr(processor, "prompt_ignore_length", None), Tensor):
                self.processors[index] = copy.copy(processor)
                self.processors[index].prompt_ignore_length = lengths.index_select(0, rows.to(lengths.device))


class StepMasks:
    """The self-attention masks of consecutive steps; each makes one more position visible.

    Building them takes seven launches, and more Python than all other arguments. So the library builds the first two;
    if the second is the first with the new position visible, later steps update it in place.
    """

    def __init__(self, model: HostModel) -> None:
        kind = type(model)
        is_librarys = kind.prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        self.is_possible = is_librarys and not hasattr(model, "create_masks_for_generate")
        self.forget()

    def forget(self) -> None:
        """Drops the masks, because another cache is used; the next two are built."""
        self._masks: Any = None
        self.leaves: list[Any] = []
        self._length, self.is_proven = 0, False

    def keep_sync(self, cache: StaticKVCache, masks: Any) -> None:
        """Keeps masks that were built for the next step over this cache; compares the second ones with the first."""
        leaves = tensors_of(masks) if self.is_possible else []
        if leaves and all(isinstance(mask, Tensor) and mask.dim() == 4 for mask in leaves):
            if self._masks is not None and self._length <= cache.generated_length:  # a later step than theirs
                self.reveal(cache)
                expected = self.leaves
                self.is_proven = len(expected) == len(leaves) and all(map(torch.equal, expected, leaves))
                self.is_possible = self.is_proven
            self._masks = masks
            self.leaves = leaves
            self._length = cache.generated_length + 1

    def reveal(self, cache: StaticKVCache) -> Any:
        """Returns the masks of the next step over this cache."""
        start = cache.paddings[0] + cache.prompt_lengths[0]
        for mask in self.leaves:
            new = mask[..., start + self._length : start + cache.generated_length + 1]
            new.fill_(True if mask.dtype == torch.bool else 0)
        self._length = cache.generated_length + 1
        return self._masks


def tensors_of(masks: Any) -> list[Any]:
    """Returns the masks of all kinds of layers; those of layers with states have none in steps of one token."""
    return [mask for mask in tree_leaves(masks) if mask is not None]


def needs_sync(device: torch.device) -> bool:
    """Whether reading a flag waits for the device."""
    return device.type != "cpu"


_version = attrgetter("_version")  # counts changes in place


def _hidden_before(mask: Tensor, padding: int) -> Tensor:
    """Pads a mask `[…, length]`: of bool or numbers (1 is visible), or, with four dimensions, added to scores."""
    is_added = mask.dim() == 4 and mask.dtype != torch.bool
    return functional.pad(mask, (padding, 0), value=torch.finfo(mask.dtype).min if is_added else 0)


def _padded_like(mask: Tensor, cache: StaticKVCache) -> Tensor:
    """Pads a mask as layers of its length are. Raises CannotPad if such layers have several paddings."""
    lengths = [length + cache.capacity for length in cache.prompt_lengths]
    paddings = {padding for length, padding in zip(lengths, cache.paddings) if length == mask.shape[-1]}
    if len(paddings) != 1:
        raise CannotPad
    return _hidden_before(mask, *paddings)
