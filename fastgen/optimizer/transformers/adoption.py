"""Adoption: how the layers of a transformers cache are stored for all rows, once its prefill ran with one per input.

    cache of one row per input ──plan_adoption──> an `AdoptPlan` for each kind of layer ──apply──> a `KVCache`, or rows
                                                                                                   of the library's

See FastSeq §4.1 and MultiGen §3.3. What a layer of a `KVCache` does is in kv_layers.py.

Tests: tests/optimizer/transformers/test_returned_cache.py, tests/optimizer/decoding/test_cost_model.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fastgen.optimizer.decoding import report
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.kv_cache import KVCache, should_share
from fastgen.optimizer.decoding.report import Reason
from fastgen.optimizer.transformers import state_layers
from fastgen.optimizer.transformers.checks import KNOWN, HostModel
from fastgen.optimizer.transformers.kv_layers import (
    ADOPTED,
    WITH_STATES,
    KVLayer,
    give_back,
    is_plain,
    length_of,
    parts,
    select_rows_of,
    turn_into,
    window_reasons,
)
from fastgen.optimizer.transformers.models import latent_attention

PROMPT_ONCE = "the prompt's keys and values: once per input"
FEW_KEYS = Reason("FEW_KEYS", "layers have too few keys for sharing to save time")


class Storage(Enum):
    """How the keys and values of layers are stored for all rows of the inputs."""

    SHARED = "once per input, in segments of a `KVCache`"
    REPEATED = "for each row, in the buffers of a `KVCache`"
    LIBRARYS = "for each row, in the library's layers"


@dataclass
class AdoptPlan:
    """How layers of equal shape will be stored when each input gets several rows; `plan_adoption` touches none.

    layer_indices: the part of the cache, and the index there, of each layer. grows: whether steps add positions.
    branched: the `KVCache` that holds these layers already, for a common prefix. reason: why they are not shared; its
    text follows their number.
    """

    storage: Storage
    grows: bool
    layer_indices: list[tuple[Cache, int]] = field(default_factory=list)
    branched: KVCache | None = None
    reason: Reason | None = None

    def apply(self, kv: KVCache, limit: int, user_code: bool) -> None:
        """Stores the layers for all rows of `kv`, in it or not. limit: the most positions that a row may get."""
        shares = self.storage is Storage.SHARED
        rows_per_input = kv.rows_per_input
        if self.branched is not None:
            self.branched.branch(rows_per_input, shares, limit)
        elif self.storage is Storage.LIBRARYS:
            rows = _inputs_of_rows(kv)
            for part, index in self.layer_indices:
                layer = part.layers[index]
                if type(layer) in ADOPTED:
                    layer.batch_repeat_interleave(rows_per_input)
                else:
                    select_rows_of(layer, rows)
        else:
            self._move_to(kv, limit if self.grows else None, user_code)

    def _move_to(self, kv: KVCache, limit: int | None, user_code: bool) -> None:
        shares = self.storage is Storage.SHARED
        layers = [part.layers[index] for part, index in self.layer_indices]
        pairs = [(layer.keys.contiguous(), layer.values.contiguous()) for layer in layers]
        if user_code:  # it may hold the tensors, and write into them
            pairs = [(keys.clone(), values.clone()) for keys, values in pairs]
        if limit is not None and not shares:
            limit += layers[0].keys.shape[2]
        numbers = kv.add_layers([(pair,) for pair in pairs], limit)
        rows = _inputs_of_rows(kv)
        for layer, number in zip(layers, numbers):
            if not shares:
                kv.repeat_prompt(number)
            turn_into(WITH_STATES[type(layer)], layer, kv, number, user_code)
            state_layers.move(layer, rows)


def _inputs_of_rows(kv: KVCache) -> Tensor:
    """Returns the input of each row, int64, on the host."""
    return torch.arange(kv.rows, device="cpu") // kv.rows_per_input


def adopt(
    model: HostModel,
    cache: Cache,
    inputs: int,
    rows_per_input: int,
    limit: int,
    call: GenerateCall,
    is_prefix: bool = False,
) -> None:
    """Expands a cache of `inputs` rows to `inputs * rows_per_input` rows, and adds to the report.

    limit: the number of positions that can be added to each row. is_prefix: whether the cache holds a prefix of all
    rows. Until the call ends, a model's latents in segments are expanded segment by segment.
    """
    plans = plan_adoption(cache, rows_per_input, limit, call)
    kv = KVCache(inputs, rows_per_input, usage=call.report.kernels)
    for plan in plans:
        plan.apply(kv, limit, call.host.user_code)
    _report(plans, call, is_prefix)
    if kv.prompts:
        call.on_exit.callback(give_back, ref(cache))
    if kv.prompts or any(plan.branched is not None for plan in plans):  # otherwise the library may compile forwards
        facts = call.facts_of(model, KNOWN)
        if [kind for kind in facts.kinds if hasattr(kind, latent_attention.NAME)]:
            call.on_exit.enter_context(latent_attention.expanding_in_parts(facts.modules.values()))


def plan_adoption(cache: Cache, rows_per_input: int, limit: int, call: GenerateCall) -> list[AdoptPlan]:
    """Returns a plan for each kind of layer, whose shapes are equal; takes the arguments of `adopt`.

    The common content of an input's rows is stored once if that is worthwhile. If no layer gains, all stay the
    library's; so do layers of other classes (linear attention, …), and those that are not shared and that user code may
    read or whose window drops positions.
    """
    may_share = rows_per_input > 1 and not call.host.custom_generate
    plans: dict[Any, AdoptPlan] = {}
    gains = False
    # A static cache needs layers of one kind, and a window drops positions of a prompt that is stored once only.
    must_share = may_share and call.will_capture and bool(window_reasons(cache, (length_of(cache) or 0) + limit))

    def storage_for(keys: Tensor, is_cross: bool) -> Storage:
        shares = may_share and should_share(call.costs, keys, rows_per_input, is_cross, call.will_capture)
        return Storage.SHARED if shares or (must_share and not is_cross) else Storage.REPEATED

    for part, is_cross in zip(parts(cache), (False, True)):
        for index, layer in enumerate(part.layers):
            kind: Any = type(layer)
            if isinstance(layer, KVLayer):
                kind = layer.kv
                keys = layer.kv.segments(layer.index)[-1][0]
                if kind not in plans:
                    plans[kind] = AdoptPlan(storage_for(keys, is_cross=False), True, branched=layer.kv)
            elif not is_plain(layer, WITH_STATES):
                reason = Reason("LAYER_TYPE", f"layers of {kind.__name__} stored for each row")
                plans.setdefault(kind, AdoptPlan(Storage.LIBRARYS, False, reason=reason))
            elif layer.is_initialized and layer.keys.numel():
                keys, values = layer.keys, layer.values
                storage = storage_for(keys, is_cross)
                few = FEW_KEYS if may_share and storage is Storage.REPEATED else None
                window = getattr(layer, "sliding_window", None) if storage is Storage.REPEATED else None
                outgrows = window is not None and window <= keys.shape[2] + limit
                if storage is Storage.REPEATED and (outgrows or call.host.user_code):
                    storage = Storage.LIBRARYS
                writes = storage is Storage.REPEATED and window is None and not is_cross
                gains |= storage is Storage.SHARED
                gains |= writes and _elements(keys, rows_per_input, limit) >= call.costs.min_elements_in_place
                kind = is_cross, storage, keys.shape, values.shape, keys.dtype, keys.device
                plans.setdefault(kind, AdoptPlan(storage, not is_cross, reason=few))
            elif state_layers.states_of([layer]):  # of a layer that has states, but no keys yet
                plans.setdefault(kind, AdoptPlan(Storage.LIBRARYS, False))
            else:
                continue
            plans[kind].layer_indices.append((part, index))
    for plan in plans.values():
        if not gains and plan.branched is None:
            plan.storage = Storage.LIBRARYS
    return [*plans.values()]


def _elements(keys: Tensor, rows_per_input: int, limit: int) -> int:
    """Returns the mean number of elements of all rows' keys while up to `limit` positions are added."""
    inputs, kv_heads, length, width = keys.shape
    return inputs * rows_per_input * kv_heads * (length + limit // 2) * width


def _report(plans: list[AdoptPlan], call: GenerateCall, is_prefix: bool) -> None:
    """Adds to the report how layers are stored, and why they are not shared."""
    counts: Counter[Any] = Counter()
    for plan in plans:
        counts[plan.reason or (plan.storage, plan.grows)] += len(plan.layer_indices)
    if count := counts[Storage.SHARED, False]:
        call.report.shared.append(f"cross-attention keys and values: once per input, {count} layers")
    if count := counts[Storage.SHARED, True]:
        what = "the prefix's keys and values: once for all rows" if is_prefix else PROMPT_ONCE
        call.report.shared.append(f"{what}, {count} layers")
    reasons = sorted((key for key in counts if isinstance(key, Reason)), key=attrgetter("text"))
    counted = [replace(reason, text=f"{counts[reason]} {reason.text}") for reason in reasons]
    call.report.add_reasons(report.KV_CACHE, counted)
