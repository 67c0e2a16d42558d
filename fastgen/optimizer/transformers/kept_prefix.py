"""`fastgen.reusing_prefix`: keeps keys and values of a prompt's beginning from one call of `generate` to the next.

    call 1   | prefix of all rows | rests |           computed; the keys and values of the prefix are kept
    call 2   | prefix ...   | rests of this call |    the common part is copied, and the rests are computed after it

A call keeps the common prefix of its rows, if it was computed once; a call with one input keeps its whole prompt, which
conversations need. A prefix is reused if the model is unchanged: its facts (see `decoding/model_info.py`), torch's
settings, and every bit of its weights.

Tests: tests/optimizer/transformers/test_kept_prefix.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fastgen.ops.checksums import checksums_sync
from fastgen.optimizer.decoding.call import GenerateCall, settings_of
from fastgen.optimizer.decoding.graphs import torch_settings
from fastgen.optimizer.decoding.model_info import ModelInfo
from fastgen.optimizer.decoding.report import KEPT, Reason
from fastgen.optimizer.decoding.segmented_kv import KV
from fastgen.optimizer.transformers import checks, kv_layers

OUTDATED = Reason("PREFIX_OUTDATED", "the model has changed since its prefix was kept")

# The reason why nothing is kept for models with weights of other kinds.
UNREADABLE = Reason("WEIGHTS_UNREADABLE", "the bits of some weights cannot be read, so changes would go unnoticed")

# Types of options that are compared.
PLAIN = (type(None), bool, int, float, str)


class KeptPrefix(NamedTuple):
    """A prefix and what it depends on.

    columns: arguments of the prefill with a value for each column, `[1, length, …]`. options: the other arguments.
    state: the state of the model and of torch. layers: keys and values `[1, kv_heads, length, head_dim]`.
    """

    columns: dict[str, Tensor]
    options: dict[str, Any]
    state: tuple[Any, ...]
    layers: list[KV]


class PrefixReuse:
    """The prefix that calls of one model keep for each other. check_weights: see `fastgen.reusing_prefix`.

    head: the exact number of tokens of a prompt that are kept and reused; if they were not kept, they are computed in a
    forward of their own. So a call gives the same to the last bit, whatever was called before. None: the largest number
    possible.
    """

    def __init__(self, model: Any, check_weights: bool, head: int | None = None) -> None:
        self.model, self.check_weights, self.head = model, check_weights, head
        self.stored: KeptPrefix | None = None
        self._state: tuple[GenerateCall, tuple[Any, ...] | None] | None = None

    def match_sync(
        self, call: GenerateCall, model: checks.HostModel, columns: dict[str, Tensor], options: dict[str, Any]
    ) -> tuple[int, list[KV]]:
        """Returns how many of a prefill's first columns were kept, and the keys and values.

        A call in another thread may replace the stored prefix meanwhile. Adds to the report if the model has changed.
        """
        stored = self.stored
        if stored is None or stored.columns.keys() != columns.keys() or stored.options != options:
            return 0, []
        length = min(_common_length_sync(stored.columns[name], value) for name, value in columns.items())
        if length and self._state_of(call, model) != stored.state:
            call.report.add_reasons(KEPT, [OUTDATED])
            self.stored, length = None, 0
        return length, stored.layers

    def keep(
        self,
        call: GenerateCall,
        model: checks.HostModel,
        columns: dict[str, Tensor],
        options: dict[str, Any],
        cache: Cache | None,
    ) -> None:
        """Keeps copies of these columns of one row, and of the cache that their forward filled; adds to the report."""
        length = next(iter(columns.values())).shape[1]
        foreign = [name for name, value in options.items() if not isinstance(value, PLAIN)]
        reasons = checks.CallChecks(call, model).rows
        if call.host.user_cache:
            reasons = [Reason("USER_CACHE", "the caller passed a cache")]
        reasons = reasons or [Reason("ARGUMENT_TYPE", f"argument {name} cannot be compared") for name in foreign[:1]]
        reasons = reasons or _cache_reasons(cache, length)
        state = None if reasons else self._state_of(call, model)
        if state is None or cache is None:
            call.report.add_reasons(KEPT, reasons or [UNREADABLE])
            return
        copied = {name: value.clone() for name, value in columns.items()}
        pairs = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        self.stored = KeptPrefix(copied, options, state, pairs)
        call.report.shared.append(f"prefix kept for later calls: {length} tokens")

    def _state_of(self, call: GenerateCall, model: checks.HostModel) -> tuple[Any, ...] | None:
        """Returns what keys and values depend on in addition to the prompt, read once per call; None if unreadable."""
        looked_up = self._state  # stored by this call, or by one in another thread
        if looked_up is None or looked_up[0] is not call:
            facts = call.facts_of(model, checks.KNOWN)
            device = model.device.type
            weights = weights_of(facts) if self.check_weights else []
            sums = None if weights is None else checksums_sync(weights)
            autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            looked_up = self._state = call, None if sums is None else (facts, torch_settings(), autocast, sums)
        return looked_up[1]


def _cache_reasons(cache: Cache | None, length: int) -> list[Reason]:
    """Returns why a cache does not hold exactly `length` positions of one row; empty if it does."""
    layers = getattr(cache, "layers", None)
    if not layers or any(getattr(layer, "keys", None) is None for layer in layers):
        return [Reason("NO_CACHE", "there is no cache with keys in all layers")]
    if foreign := [type(layer).__name__ for layer in layers if type(layer) not in kv_layers.ADOPTED]:
        return [Reason("CACHE_LAYERS", f"the cache has layers of {foreign[0]}")]
    if any({layer.keys.shape[::2], layer.values.shape[::2]} != {(1, length)} for layer in layers):
        return [Reason("SLIDING_WINDOW", f"a layer of the cache does not hold all {length} positions")]
    return []


def _common_length_sync(stored: Tensor, columns: Tensor) -> int:
    """Returns the number of equal columns at the beginning of two values `[1, length, …]`."""
    length = min(stored.shape[1], columns.shape[1])
    if stored.dtype != columns.dtype or stored.device != columns.device or stored.shape[2:] != columns.shape[2:]:
        return 0
    equal = (stored[0, :length] == columns[0, :length]).reshape(length, -1).all(dim=1)
    return int(equal.long().cumprod(dim=0).sum())


def weights_of(facts: ModelInfo) -> list[Tensor] | None:
    """Returns all tensors in the modules; None if the bits of one cannot be read."""
    tensors = [tensor for tensor in facts.row_tensors().values() if type(tensor) is Tensor]
    for module in facts.modules.values():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_meta:
                    return None
                tensors.append(tensor)
    return tensors


def reuse_of(model: checks.HostModel) -> PrefixReuse | None:
    """Returns the innermost `reusing_prefix` of this model or of a wrapper, such as PEFT's, that contains it."""
    innermost_first = settings_of(PrefixReuse)
    return next((reuse for reuse in innermost_first if model is reuse.model or model in reuse.model.modules()), None)
