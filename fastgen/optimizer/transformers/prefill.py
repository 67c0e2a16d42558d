"""`GenerationMixin._prefill`: the prompt is computed once per input instead of once per beam or sample.

The library repeats every input for its beams or samples before the prefill, and some callers do so themselves. Here one
row of each group of equal rows goes through the model (decoder prompt, masks and encoder outputs alike, so that all
rows inside a forward agree), then the cache and the last logits are given to all rows: what is equal stays stored once
(FastSeq §4.1), the rest is repeated.

Tests: tests/optimizer/transformers/test_repeated_rows.py, tests/optimizer/transformers/test_generate_models.py,
tests/optimizer/transformers/test_static_prefill.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer
from transformers.modeling_outputs import ModelOutput

from fastgen.config import CONFIG
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import GenerateCall, current_call
from fastgen.optimizer.decoding.kv_cache import KV
from fastgen.optimizer.decoding.model_facts import size_of
from fastgen.optimizer.decoding.report import CACHE_NOT_EMPTY, KV_CACHE, PREFILL, PREFIX, USER_CACHE, Decision, Reason
from fastgen.optimizer.transformers import checks, kv_layers, prefixes, row_groups, verification
from fastgen.optimizer.transformers.models import images, latent_attention
from fastgen.optimizer.transformers.prefixes import CommonPrefix
from fastgen.optimizer.transformers.row_groups import RowGroups

STATIC_CACHE = Reason("STATIC_CACHE", "a StaticCache holds keys and values of each row")
ONE_ROW = Decision("ONE_ROW_PER_INPUT", "one row per input")
NAN = Reason("NAN", "logits are NaN behind a common prefix, and may not be without")


def prefill(
    original: Callable,
    self: checks.HostModel,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> ModelOutput:
    call = current_call()
    if call is None:  # a model's own loop, after which nobody would put plain caches back
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    if not call.rows and self.config.is_encoder_decoder:
        call.end_stage("encoder")
    if call.has_callbacks:  # a streamer has seen the prompt
        call.has_changed(self)
    arguments = {"input_ids": input_ids, **model_kwargs}
    limit = max((generation_config.max_length or 0) - input_ids.shape[1], 1)  # of tokens that can be generated
    groups, compared, reasons = groups_of_equal_rows(call, self, arguments, generation_config)
    call.set_rows(groups.inputs, groups.rows)
    each_alone, prefix, given = len(groups) == groups.rows, None, arguments
    if not each_alone and not reasons:
        given = row_groups.take(arguments, groups.rows, groups.firsts)
        if arguments.get(row_groups.IMAGES) is not None:
            given[row_groups.IMAGES], reasons = images.of_first_rows_sync(arguments, self.config, groups)
    if (each_alone or not reasons) and not self.config.is_encoder_decoder:
        prefix = prefixes.common_prefix_sync(call, self, given, generation_config)
    if each_alone and prefix is not None:
        reasons, compared = [], True
    # Looking at all modules of the model comes last: it takes longest.
    reasons = reasons or unsupported_reasons(self, arguments, generation_config, groups, compared, call)
    reasons = reasons or verification.first_use_reasons(self, generation_config, input_ids.shape[1], call)
    if not reasons:
        given_cache = kv_layers.cache_of(arguments)
        empty = None if given_cache is None else kv_layers.undo_of(given_cache)
        facts = call.facts_of(self, checks.KNOWN)
        before = undo = None
        if facts.row_states is None:  # the model may keep states of its rows, from which its next forward goes on
            before, undo = facts.row_tensors(), undo_of_states(facts.modules.values())

        def forward(arguments: dict[str, Any]) -> ModelOutput:
            return original(self, arguments.pop("input_ids"), generation_config, arguments, *args, **kwargs)

        if prefix is not None:
            found = prefixes.model_reasons(facts, forward, prefix, given)
            call.report.add_reasons(PREFIX, found)
            if found:
                if undo is not None:
                    undo()
                prefix, reasons = None, [ONE_ROW] if each_alone else []
        used = dict(given) if prefix is None else prefix.of_rests(given)
        if prefix is not None:
            prefixes.fill_sync(call, self, forward, prefix, given)
            reasons = _done_or_reasons(self, partial(expand_prefix, self, given_cache, prefix, groups, limit, call))
        if not reasons:
            try:
                with filling_all_rows(given_cache, groups) if kv_layers.is_static(given_cache) else nullcontext():
                    outputs = forward(used)
            except Exception:  # the states of another call may be of more rows
                if undo is None or not (reasons := checks.row_state_reasons(call, self, {groups.rows})):
                    raise
                facts.row_states = reasons
        if not reasons:
            if prefix is not None and outputs["logits"].isnan().any():  # torch hides NaN of few keys without a mask
                reasons = [NAN]
            elif len(groups) == 1:
                prefixes.keep_prompt_sync(call, self, given, outputs)
            if before is not None and not reasons:
                reasons = facts.row_states = checks.row_state_reasons(call, self, {len(groups)}, before)
        if not reasons and given_cache is None and arguments.get("use_cache", True):
            made = kv_layers.cache_of(outputs)  # by the model, as all do in transformers 5.0
            found = [Reason("NO_CACHE", "the model returns no cache")] if made is None else []
            reasons = facts.row_states = found or kv_layers.unsupported_types(made)
        reasons = reasons or _done_or_reasons(self, partial(expand, self, outputs, given_cache, groups, limit, call))
        if prefix is not None and not reasons:
            call.report.set_prefix(prefix.length, prefix.length * (len(groups) - 1) + prefix.kept, prefix.kept)
        for restore in (empty, undo) if reasons else ():
            if restore is not None:
                restore()
    if reasons:
        call.report.add_reasons(PREFILL, reasons)
        outputs = original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        if reasons[0].code == "ERROR":  # and the library had none
            PATCH_SET.fail("transformers.shared_caches", reasons[0].text)
        if groups.rows == 1:
            prefixes.keep_prompt_sync(call, self, arguments, outputs)
        return outputs
    for name in model_kwargs.keys() - used.keys():
        del model_kwargs[name]
    for name, value in used.items():  # what the prefill has set for the steps that follow
        if (name not in given or value is not given[name]) and name != row_groups.IMAGES:
            model_kwargs[name] = row_groups.repeat(name, value, groups)
    return outputs


def groups_of_equal_rows(
    call: GenerateCall, model: checks.HostModel, arguments: dict[str, Any], generation_config: Any
) -> tuple[RowGroups, bool, list[Reason]]:
    """Which consecutive rows are equal: those of beams, of samples, or repeated by the caller.

    Also whether they were compared, and why they are too few to gain anything. Repetitions are looked for where they
    would gain something: Whisper's own generate repeats its inputs, and so do callers, who need not repeat all of them
    equally often (a batch of an evaluation may begin in the middle of the samples of a prompt).
    """
    rows_per_input = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    rows = arguments["input_ids"].shape[0]
    each = RowGroups([1] * rows)
    if rows < 2:
        return each, False, [ONE_ROW]
    if rows % rows_per_input:
        text = f"{rows} rows are no multiple of {rows_per_input} beams or samples"
        return each, False, [Reason("ROWS_NOT_MULTIPLE", text)]
    groups = RowGroups([rows_per_input] * (rows // rows_per_input))
    reasons = too_small_reasons(call, model, arguments, 1 if rows_per_input == 1 else len(groups))
    if rows_per_input > 1:
        return groups, False, reasons
    if reasons or checks.untested_reasons(model):
        return each, False, [ONE_ROW, *reasons]
    groups = row_groups.repetitions_sync(arguments, rows)
    return groups, True, [ONE_ROW] if len(groups) == rows else too_small_reasons(call, model, arguments, len(groups))


def too_small_reasons(
    call: GenerateCall, model: checks.HostModel, arguments: dict[str, Any], kept: int
) -> list[Reason]:
    """Why a prefill of `kept` rows instead of all would not save what it costs; empty if it does."""
    row_count, length = arguments["input_ids"].shape
    embeds, encoded = arguments.get("inputs_embeds"), arguments.get("encoder_outputs")
    if embeds is not None:
        length = max(length, embeds.shape[1])
    if encoded is not None and isinstance(encoded[0], Tensor):
        length += encoded[0].shape[1] // 16  # the share of a layer's weights that makes keys and values of them
    size, costs, tokens = size_of(model, checks.KNOWN), call.costs, (row_count - kept) * length
    if costs.should_prefill_once(size, tokens):
        return []
    if costs.shares is False:
        return [Decision("SHARE_NEVER", "FASTGEN_SHARE=never")]
    saved, overhead = size.weights * tokens / 1e6, costs.overhead_of_prefill_once(size) / 1e6
    detail = f"{tokens} tokens fewer save {saved:.1f} million multiply-adds, the overhead is {overhead:.1f} million"
    return [Decision("TOO_SMALL", "the model is too small to gain", detail)]


def _done_or_reasons(model: checks.HostModel, change: Callable[[], None]) -> list[Reason]:
    """Changes caches and outputs in place; returns why that failed, or nothing."""
    try:
        change()
    except torch.cuda.OutOfMemoryError:
        raise  # the original would need more
    except Exception as error:
        if CONFIG.strict:
            raise
        return [Reason("ERROR", f"{type(model).__name__}: {type(error).__name__}: {error}")]
    return []


def adopt(
    model: checks.HostModel,
    cache: Cache,
    inputs: int,
    rows_per_input: int,
    limit: int,
    call: GenerateCall,
    is_prefix: bool = False,
) -> None:
    """As `kv_layers.adopt`; a model's latents in segments are expanded in parts until the call ends."""
    if kv_layers.adopt(cache, inputs, rows_per_input, limit, call, is_prefix):  # the library may compile other forwards
        facts = call.facts_of(model, checks.KNOWN)
        if latent_attention.NAME in facts.code.names:
            call.on_exit.enter_context(latent_attention.expanding_in_parts(facts.modules.values()))


def expand_prefix(
    model: checks.HostModel, cache: Cache, prefix: CommonPrefix, groups: RowGroups, limit: int, call: GenerateCall
) -> None:
    """Makes a cache with the prefix one of a row for each group, to which what follows can be added."""
    rest = prefix.columns_behind + (limit if groups.rows_per_input == 1 else 0)
    if len(groups) > 1:
        adopt(model, cache, 1, len(groups), rest, call, is_prefix=True)


def expand(
    model: checks.HostModel,
    outputs: ModelOutput,
    given: Cache | None,
    groups: RowGroups,
    limit: int,
    call: GenerateCall,
) -> None:
    """Makes the outputs of a forward of one row per group those of all rows, and adds to the report.

    given: the cache that the forward was given. Some forwards fill it and do not return it (BERT with
    `is_decoder=False`). limit: the number of tokens that can be generated, at least 1.
    """
    report = call.report
    call.is_accelerated = True
    if len(groups) < groups.rows:
        what = "one row per input" if groups.are_inputs else "one of each group of equal rows"
        report.shared.append(f"prefill: {what}")
    caches: list[Cache] = []
    returned: list[Cache] = []
    for value in outputs.values():
        if isinstance(value, Cache):
            caches.append(value)
            returned += value, *kv_layers.parts(value)
    if given is not None and given not in returned:
        caches.append(given)
    for cache in caches:
        if kv_layers.is_static(cache):
            report.add_reasons(KV_CACHE, [STATIC_CACHE])
            continue
        if not groups.are_inputs:
            kv_layers.repeat(cache, groups.of_rows[:: groups.rows_per_input])
        adopt(model, cache, groups.inputs, groups.rows_per_input, limit, call)
    if not groups.are_inputs and groups.rows_per_input == 1:
        sizes = ", ".join(map(str, groups.sizes[:8]))
        text = f"stored for each row: equal rows come in groups of {sizes}, not of one size"
        report.add_reasons(KV_CACHE, [Reason("GROUP_SIZES_DIFFER", text)])
    for name, value in tuple(outputs.items()):
        if not isinstance(value, Cache):
            outputs[name] = row_groups.repeat(name, value[:, -1:] if name == "logits" else value, groups)


def unsupported_reasons(
    model: checks.HostModel,
    arguments: dict[str, Any],
    generation_config: Any,
    groups: RowGroups,
    compared: bool,
    call: GenerateCall,
) -> list[Reason]:
    """Why this prefill has to run with all rows; empty if one row per group gives the same. May read the device.

    compared: whether the rows of a group are known to be equal.
    """
    reasons = checks.row_reasons(call, model)
    if call.user_cache:
        reasons.append(USER_CACHE)
    elif kv_layers.is_static(cache := kv_layers.cache_of(arguments)):
        reasons += static_prefill_reasons(cache, generation_config)
    elif cache is not None:
        reasons += kv_layers.unsupported_reasons(cache)
    elif arguments.get("use_cache", True) and not getattr(model, "_supports_default_dynamic_cache", bool)():
        reasons.append(Reason("MODEL_CACHE", "the model makes its own cache"))
    reasons += row_groups.unsupported_reasons(model.config.model_type, arguments, groups.rows)
    if not reasons and not compared and not row_groups.groups_are_equal_sync(arguments, groups):
        reasons.append(Reason("ROWS_DIFFER", "the rows of an input differ from each other"))
    return reasons


def undo_of_states(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """A function that gives modules the tensors again that they hold now as plain attributes.

    What a forward writes in place stays: states of another number of rows it has to make anew. Other attributes, too:
    the library notes there where it has put hooks.
    """
    before = [(module, dict(vars(module))) for module in modules]

    def undo() -> None:
        for module, attributes in before:
            for name, value in tuple(vars(module).items()):
                if isinstance(value, Tensor) or isinstance(attributes.get(name), Tensor):
                    vars(module)[name] = attributes.get(name)

    return undo


# The library's own static caches, which a prefill with one row per group fills for all rows. Their layers stay the
# library's, for which it compiles its steps: keys and values are written by its `update` to where a prefill with all
# rows writes them.


def static_prefill_reasons(cache: Cache, generation_config: Any) -> list[Reason]:
    """Why a prefill with one row per input cannot fill this static cache; empty if it can."""
    if generation_config.prefill_chunk_size is not None:
        text = "the cache is a StaticCache, for which the library may compile a prefill in chunks"
        return [Reason("CHUNKED_PREFILL", text)]
    kinds = set(map(type, kv_layers.layers_of(cache)))
    if foreign := sorted(kind.__name__ for kind in kinds - {StaticLayer, StaticSlidingWindowLayer}):
        text = f"the cache is a StaticCache with layers of other kinds ({', '.join(foreign)})"
        return [Reason("CACHE_LAYERS", text)]
    return [CACHE_NOT_EMPTY] if cache.get_seq_length() > 0 else []


@contextmanager
def filling_all_rows(cache: object, groups: RowGroups) -> Iterator[None]:
    """Inside this context a static cache takes and returns one row per group, and keeps it for all of its rows."""

    def fill_all_rows(update: Callable[..., KV], keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> KV:
        of_rows, firsts = groups.of_rows.to(keys.device), groups.firsts.to(keys.device)
        filled = update(keys.index_select(0, of_rows), values.index_select(0, of_rows), *args, **kwargs)
        return tuple(states.index_select(0, firsts) for states in filled)

    layers = kv_layers.layers_of(cache)
    for layer in layers:
        layer.update = partial(fill_all_rows, layer.update)
    try:
        yield
    finally:
        for layer in layers:
            del layer.update
