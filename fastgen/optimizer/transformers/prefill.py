"""`GenerationMixin._prefill`: the prompt is computed once per input instead of once per beam or sample.

The library repeats every input for its beams or samples before the prefill, and some callers do so themselves. Here one
row of each group of equal rows goes through the model (decoder prompt, masks and encoder outputs alike, so that all
rows inside a forward agree). Then the cache and the last logits are expanded to all rows: equal content stays stored
once (FastSeq §4.1), the rest is repeated.

    prefill                       the patch
      plan_prefill                decides, and changes nothing: row groups, common prefix, all reasons against them
      PrefillPlan.run             changes the cache and the outputs, inside a `Rollback` of cache and modules
      LeaveAlone(reasons)         raised by both; then the library's own prefill runs, with the reasons in the report

Tests: tests/optimizer/transformers/test_repeated_rows.py, tests/optimizer/transformers/test_generate_models.py,
tests/optimizer/transformers/test_static_prefill.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput

from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.cost_model import size_of
from fastgen.optimizer.decoding.model_info import FEWER_ROWS, ModelInfo
from fastgen.optimizer.decoding.report import KV_CACHE, PREFILL, PREFIX, LeaveAlone, Reason, leave_alone_for
from fastgen.optimizer.decoding.segmented_kv import KV
from fastgen.optimizer.transformers import adoption, kv_layers, prefixes, row_groups
from fastgen.optimizer.transformers.checks import KNOWN, CallChecks, HostModel, current_call
from fastgen.optimizer.transformers.models import images
from fastgen.optimizer.transformers.prefixes import CommonPrefix
from fastgen.optimizer.transformers.row_groups import RowGroups

STATIC_CACHE = Reason("STATIC_CACHE", "a StaticCache holds keys and values of each row")
ONE_ROW = Reason("ONE_ROW_PER_INPUT", "one row per input")
NO_CACHE = Reason("NO_CACHE", "the model returns no cache")


def prefill(
    original: Callable,
    self: HostModel,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> ModelOutput:
    """Replaces `GenerationMixin._prefill`; input_ids `[rows, length]`."""
    call = current_call()
    if call is None:  # a model's own loop, after which nobody would restore plain caches
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    if not call.rows and self.config.is_encoder_decoder:
        call.end_stage("encoder")
    if call.host.has_callbacks:  # a streamer has received the prompt
        call.change_of(self)

    def forward(arguments: dict[str, Any]) -> ModelOutput:
        return original(self, arguments.pop("input_ids"), generation_config, arguments, *args, **kwargs)

    arguments = {"input_ids": input_ids, **model_kwargs}
    try:
        return plan_prefill(CallChecks(call, self), arguments, generation_config, forward).run(model_kwargs)
    except LeaveAlone as left_alone:
        call.leave_to_library(PREFILL, left_alone.reasons)
    outputs = original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    if call.rows == 1:
        prefixes.keep_prompt_sync(call, self, arguments, outputs)
    return outputs


def plan_prefill(
    checks: CallChecks,
    arguments: dict[str, Any],
    generation_config: Any,
    forward: Callable[[dict[str, Any]], ModelOutput],
) -> PrefillPlan:
    """Returns how to compute this prefill with fewer rows or columns. Raises LeaveAlone if nothing is gained.

    arguments: `input_ids` and `model_kwargs`. forward: runs the library's prefill with other arguments. Tests once for
    each model whether it can compute a common prefix separately, and restores its state. Reads the device.
    """
    call, model = checks.call, checks.model
    groups, reasons = groups_of_equal_rows(call, model, arguments, generation_config)
    call.set_rows(groups.inputs, groups.rows)
    is_each_alone = len(groups) == groups.rows
    first_rows = arguments
    prefix = None
    if not is_each_alone and not reasons:
        first_rows = row_groups.take(arguments, groups.rows, groups.firsts)
        if arguments.get(row_groups.IMAGES) is not None:
            first_rows[row_groups.IMAGES] = images.of_first_rows_sync(arguments, model.config, groups)
    cache = kv_layers.cache_of(arguments)
    is_filled = kv_layers.is_filled(cache)
    if (is_each_alone or not reasons) and not (model.config.is_encoder_decoder or is_filled):
        prefix = prefixes.common_prefix_sync(checks, first_rows, generation_config)
    if prefix is None:
        leave_alone_for(reasons)
    length = arguments["input_ids"].shape[1]
    leave_alone_for(checks.prefill_sync(arguments, generation_config, groups))  # last, because it visits all modules
    facts = call.facts_of(model, KNOWN)
    if prefix is not None and (reasons := prefixes.model_reasons(facts, forward, prefix, first_rows)):
        call.report.add_reasons(PREFIX, reasons)
        prefix = None
        leave_alone_for([ONE_ROW] if is_each_alone else [])
    limit = max((generation_config.max_length or 0) - length, 1)
    return PrefillPlan(checks, groups, first_rows, prefix, limit, forward)


@dataclass
class PrefillPlan:
    """A forward in place of the library's prefill: one row per group, and only the columns after a common prefix.

    first_rows: the arguments of one row per group. limit: the number of tokens that can be generated, at least 1.
    """

    checks: CallChecks
    groups: RowGroups
    first_rows: dict[str, Any]
    prefix: CommonPrefix | None
    limit: int
    forward: Callable[[dict[str, Any]], ModelOutput]

    def run(self, model_kwargs: dict[str, Any]) -> ModelOutput:
        """Returns the outputs of all rows. Raises LeaveAlone, with the state restored, if they would differ.

        model_kwargs: the arguments of all rows, which are updated for the following steps, as by the library's prefill.
        """
        call, model = self.checks.call, self.checks.model
        cache = kv_layers.cache_of(self.first_rows)
        facts = call.facts_of(model, KNOWN)
        # A model may store states of rows for its next forward.
        modules = () if FEWER_ROWS in facts.proofs else facts.modules.values()
        with kv_layers.rollback_of(cache, modules) as rollback:
            if kv_layers.is_filled(cache):
                kv_layers.select_rows(cache, self.groups.firsts)  # equal in each group
            arguments = self._fill_prefix(cache)
            outputs = self._forward(arguments, cache, facts)
            if len(self.groups) == 1:
                prefixes.keep_prompt_sync(call, model, self.first_rows, outputs)
            with call.fallback(PREFILL):
                self._expand(outputs, cache)
            rollback.keep()
        for name in model_kwargs.keys() - arguments.keys():
            del model_kwargs[name]
        initial = {**self.first_rows, row_groups.IMAGES: arguments.get(row_groups.IMAGES)}
        changed = {name: value for name, value in arguments.items() if value is not initial.get(name, self)}
        model_kwargs |= row_groups.repeat(changed, self.groups)
        return outputs

    def _fill_prefix(self, cache: Any) -> dict[str, Any]:
        """Returns the arguments of the forward; fills the cache with a common prefix, once for all groups."""
        if self.prefix is None:
            return dict(self.first_rows)
        call, model, prefix = self.checks.call, self.checks.model, self.prefix
        prefixes.fill_sync(call, model, self.forward, prefix, self.first_rows)
        if len(self.groups) > 1:
            rest_length = prefixes.prompt_of(self.first_rows).shape[1] - prefix.length
            limit = rest_length + (self.limit if self.groups.rows_per_input == 1 else 0)
            with call.fallback(PREFILL):
                adoption.adopt(model, cache, 1, len(self.groups), limit, call, is_prefix=True)
        return prefix.of_rests(self.first_rows)

    def _forward(self, arguments: dict[str, Any], cache: Cache | None, facts: ModelInfo) -> ModelOutput:
        """Returns the outputs of one row per group. Raises LeaveAlone if those of a forward of all rows differ."""
        tensors = None if FEWER_ROWS in facts.proofs else facts.row_tensors()
        try:
            with filling_all_rows(cache, self.groups) if kv_layers.is_static(cache) else nullcontext():
                outputs = self.forward(arguments)
        except Exception:  # states of another call may have more rows
            if tensors is not None and (reasons := self.checks.row_states({self.groups.rows})):
                facts.proofs[FEWER_ROWS] = reasons
                leave_alone_for(reasons)
            raise
        if self.prefix is not None and outputs["logits"].isnan().any():
            raise LeaveAlone([prefixes.NAN])
        if tensors is not None:
            facts.proofs[FEWER_ROWS] = self.checks.row_states({len(self.groups)}, tensors)
            leave_alone_for(facts.proofs[FEWER_ROWS])
        if cache is None and self.first_rows.get("use_cache", True):
            new_cache = kv_layers.cache_of(outputs)  # created by the model, as in transformers 5.0
            facts.proofs[FEWER_ROWS] = [NO_CACHE] if new_cache is None else kv_layers.unsupported_types(new_cache)
            leave_alone_for(facts.proofs[FEWER_ROWS])
        return outputs

    def _expand(self, outputs: ModelOutput, user_cache: Cache | None) -> None:
        """Expands the outputs of one row per group to all rows, and adds to the report.

        user_cache: the cache passed to the forward. Some models fill it without returning it (BERT with
        `is_decoder=False`).
        """
        call, groups, report = self.checks.call, self.groups, self.checks.call.report
        cache = next((value for value in outputs.values() if isinstance(value, Cache)), user_cache)
        call.is_accelerated = True
        if len(groups) < groups.rows:
            what = "one row per input" if groups.are_inputs else "one of each group of equal rows"
            report.shared.append(f"prefill: {what}")
        if kv_layers.is_static(cache):
            report.add_reasons(KV_CACHE, [STATIC_CACHE])
        elif cache is not None:
            if not groups.are_inputs:
                kv_layers.select_rows(cache, groups.group_of_row[:: groups.rows_per_input])
            adoption.adopt(self.checks.model, cache, groups.inputs, groups.rows_per_input, self.limit, call)
        if not groups.are_inputs and groups.rows_per_input == 1:
            sizes = ", ".join(map(str, groups.sizes[:8]))
            text = f"stored for each row: equal rows come in groups of {sizes}, not of one size"
            report.add_reasons(KV_CACHE, [Reason("GROUP_SIZES_DIFFER", text)])
        if (prefix := self.prefix) is not None:
            report.set_prefix(prefix.length, prefix.length * (len(groups) - 1) + prefix.reused, prefix.reused)
        outputs["logits"] = outputs["logits"][:, -1:]
        for name, value in row_groups.repeat(outputs, groups).items():
            outputs[name] = value


def groups_of_equal_rows(
    call: GenerateCall, model: HostModel, arguments: dict[str, Any], generation_config: Any
) -> tuple[RowGroups, list[Reason]]:
    """Returns groups of consecutive equal rows (beams, samples, or repeated by the caller), or why they gain nothing.

    Repetitions are searched for if they would gain something: Whisper's own generate repeats its inputs, and so do
    callers, possibly not all equally often (a batch of an evaluation may begin in the middle of a prompt's samples).
    """
    rows_per_input = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    rows = arguments["input_ids"].shape[0]
    row_by_row = RowGroups([1] * rows, are_equal=True)
    if rows < 2:
        return row_by_row, [ONE_ROW]
    if rows % rows_per_input:
        text = f"{rows} rows are not a multiple of {rows_per_input} beams or samples"
        return row_by_row, [Reason("ROWS_NOT_MULTIPLE", text)]
    groups = RowGroups([rows_per_input] * (rows // rows_per_input))
    reasons = too_small_reasons(call, model, arguments, 1 if rows_per_input == 1 else len(groups))
    if rows_per_input > 1:
        return groups, reasons
    if reasons:
        return row_by_row, [ONE_ROW, *reasons]
    groups = row_groups.repetitions_sync(arguments, rows)
    return groups, [ONE_ROW] if len(groups) == rows else too_small_reasons(call, model, arguments, len(groups))


def too_small_reasons(call: GenerateCall, model: HostModel, arguments: dict[str, Any], groups: int) -> list[Reason]:
    """Returns why a prefill of `groups` rows instead of all would cost more than it saves; empty if it saves more."""
    row_count, length = arguments["input_ids"].shape
    embeds, encoded = arguments.get("inputs_embeds"), arguments.get("encoder_outputs")
    if embeds is not None:
        length = max(length, embeds.shape[1])
    if encoded is not None and isinstance(encoded[0], Tensor):
        length += encoded[0].shape[1] // 16  # the part of a layer's weights that they are multiplied with
    size = size_of(model, KNOWN)
    costs = call.costs
    tokens = (row_count - groups) * length
    saved, added = size.tokens(tokens), costs.overhead_of_prefill_once(size)
    if costs.pays(saved, added):
        return []
    if costs.shares is False:
        return [Reason("SHARE_NEVER", "FASTGEN_SHARE=never")]
    milliseconds = [costs.seconds(work) * 1e3 for work in (saved, added)]
    detail = "computing {} tokens fewer saves about {:.2f} ms, but costs {:.2f} ms".format(tokens, *milliseconds)
    return [Reason("TOO_SMALL", "the model is too small to gain", detail)]


@contextmanager
def filling_all_rows(cache: object, groups: RowGroups) -> Iterator[None]:
    """A context in which a `StaticCache` takes and returns one row per group, and stores it for all rows of the group.

    Its layers stay the library's, because the library compiles steps for them: their `update` writes into the same
    memory as in a prefill with all rows.
    """

    def fill_all_rows(update: Callable[..., KV], keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> KV:
        group_of, firsts = groups.group_of_row.to(keys.device), groups.firsts.to(keys.device)
        filled = update(keys.index_select(0, group_of), values.index_select(0, group_of), *args, **kwargs)
        return tuple(states.index_select(0, firsts) for states in filled)

    layers = kv_layers.layers_of(cache)
    for layer in layers:
        layer.update = partial(fill_all_rows, layer.update)
    try:
        yield
    finally:
        for layer in layers:
            del layer.update
