"""What one model remembers while fastgen generates: the incremental state that fairseq hands from module to module.

To modules that fastgen does not know it is the dictionary that they expect. The attention of a standard Transformer
decoder finds its caches here instead: its own keys written in place (FastSeq §2.2), those of the encoder's output once
per input (FastSeq §4.1.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fairseq.models.fairseq_incremental_decoder import FairseqIncrementalDecoder
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fastgen.optimizer.decoding.decoding_cache import DecodingCache
from fastgen.optimizer.decoding.gain import sharing_pays
from fastgen.origin import PYTHON, packages_of
from fastgen.patching import SwitchedOff

_KNOWN_PACKAGES = PYTHON | {"fairseq", "torch"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass
class ModelPlan:
    """Which modules of a model are given caches by fastgen, and what is left to fairseq.

    reasons: why there are none, if so. others: modules that keep a state of their own, as in fairseq.
    by_input: whether the decoder can be given the encoder's output with one row per input; otherwise it gets all rows.
    watched: whether somebody may see what passes between the layers.
    """

    self_attention: list[MultiheadAttention] = field(default_factory=list)
    cross_attention: list[MultiheadAttention] = field(default_factory=list)
    others: list[nn.Module] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    watched: bool = False
    by_input: bool = False


@dataclass(frozen=True)
class CrossStates:
    """Keys and values of the encoder's output in one layer, `[inputs, heads, source_length, head_dim]`, and a mask."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None

    def of_inputs(self, kept: Tensor) -> CrossStates:
        mask = None if self.mask is None else self.mask.index_select(0, kept)
        return CrossStates(self.keys.index_select(0, kept), self.values.index_select(0, kept), mask)


def plan(model: nn.Module) -> ModelPlan:
    decoder = getattr(model, "decoder", None)
    reasons = decoder_reasons(decoder)
    if reasons:
        return ModelPlan(reasons=reasons)
    result = ModelPlan()
    for layer in decoder.layers:
        if not attention_reasons(layer.self_attn) and layer.self_attn.self_attention:
            result.self_attention.append(layer.self_attn)
        cross = layer.encoder_attn
        if cross is not None and not attention_reasons(cross) and cross.encoder_decoder_attention:
            result.cross_attention.append(cross)
    known = {*result.self_attention, *result.cross_attention}
    result.others = [module for module in decoder.modules() if module not in known and _has_state(module)]
    result.watched = _is_watched(decoder)
    crosses = [layer.encoder_attn for layer in decoder.layers if layer.encoder_attn is not None]
    reorder = getattr(getattr(model, "encoder", None), "reorder_encoder_out", None)
    result.by_input = not (
        result.watched
        or decoder.cross_self_attention
        or len(crosses) > len(result.cross_attention)
        or reorder is None
        or not packages_of(decoder.extract_features) | packages_of(reorder) <= _KNOWN_PACKAGES
    )
    if not known:
        names = sorted({reason for layer in decoder.layers for reason in attention_reasons(layer.self_attn)})
        result.reasons = names or ["the decoder has no self-attention of its own"]
    return result


def decoder_reasons(decoder: Any) -> list[str]:
    """Why nothing inside this decoder is known; empty if its layers are those of fairseq's Transformer."""
    if not isinstance(decoder, TransformerDecoderBase):
        return [f"decoder {type(decoder).__name__} (supported: fairseq's Transformer decoders)"]
    if type(decoder.layers) is not nn.ModuleList:  # it would draw random numbers whenever it is looked through
        return [f"layers of the decoder in a {type(decoder.layers).__name__} (supported: ModuleList)"]
    for name in ("forward", "extract_features_scriptable", "reorder_incremental_state_scripting"):
        if _is_own(decoder, TransformerDecoderBase, name):
            return [f"decoder {type(decoder).__name__} has a {name} of its own"]
    if len(set(decoder.layers)) < len(decoder.layers):
        return ["layers of the decoder are used more than once"]
    for layer in decoder.layers:
        if not isinstance(layer, TransformerDecoderLayerBase) or _is_own(layer, TransformerDecoderLayerBase, "forward"):
            return [f"layer {type(layer).__name__} of the decoder (supported: fairseq's Transformer layer)"]
        if layer.onnx_trace:
            return ["the decoder is prepared for ONNX"]
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in layer.modules()):
            return ["layers of the decoder are compiled"]
    return []


def attention_reasons(attention: Any) -> list[str]:
    """Why this attention has to be computed by fairseq; empty if fastgen may."""
    if type(attention) is not MultiheadAttention:
        return [f"attention {type(attention).__name__} (supported: fairseq's MultiheadAttention)"]
    found = {
        "a forward of its own": "forward" in vars(attention),
        "xFormers": attention.use_xformers,
        "add_bias_kv": attention.bias_k is not None or attention.bias_v is not None,
        "add_zero_attn": attention.add_zero_attn,
        "onnx_trace": attention.onnx_trace,
    }
    return [f"attention with {name}" for name, is_so in found.items() if is_so]


def _is_own(module: nn.Module, base: type, name: str) -> bool:
    return name in vars(module) or getattr(type(module), name) is not getattr(base, name)


def _has_state(module: nn.Module) -> bool:
    reorder = getattr(type(module), "reorder_incremental_state", None)
    return reorder not in (None, FairseqIncrementalDecoder.reorder_incremental_state)


def _is_watched(decoder: nn.Module) -> bool:
    everywhere = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return bool(everywhere) or any(getattr(module, name) for module in decoder.modules() for name in _HOOKS)


class DecodingState(dict):
    """The incremental state of one model for `inputs * fan_out` rows, with the caches that its plan asks for.

    limit: the number of positions that a row can reach.
    """

    def __init__(self, plan: ModelPlan, fan_out: int, limit: int) -> None:
        super().__init__()
        self.plan = plan
        self.fan_out = fan_out
        self._caches: list[DecodingCache] = []
        self._slots: dict[MultiheadAttention, tuple[DecodingCache, int]] = {}
        self._crosses: dict[MultiheadAttention, CrossStates | None] = dict.fromkeys(plan.cross_attention)
        self._padding: Tensor | None = None
        self._mask: Tensor | None = None
        for attentions in _by_shape(plan.self_attention):
            cache = DecodingCache(len(attentions), fan_out, limit)
            self._caches.append(cache)
            self._slots |= {attention: (cache, layer) for layer, attention in enumerate(attentions)}
        self._keys = {
            attention._get_full_incremental_state_key("attn_state") for attention in (*self._slots, *self._crosses)
        }

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._keys:
            raise SwitchedOff("fastgen was switched off while it generated, so that fairseq misses its caches")
        super().__setitem__(key, value)

    def has_self(self, attention: MultiheadAttention) -> bool:
        return attention in self._slots

    def has_cross(self, attention: MultiheadAttention) -> bool:
        return attention in self._crosses

    def append(self, attention: MultiheadAttention, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds what each row has computed, `[rows, heads, length, head_dim]`, and returns all that is its own."""
        cache, layer = self._slots[attention]
        cache.append(layer, keys, values)
        return cache.own(layer)

    def prompt(self, attention: MultiheadAttention) -> tuple[Tensor, Tensor] | None:
        """Keys and values before the rows' own, `[inputs, heads, length, head_dim]`; None if there are none."""
        cache, layer = self._slots[attention]
        return cache.shared[layer]

    def set_prompt(self, attention: MultiheadAttention, keys: Tensor, values: Tensor) -> None:
        """Takes keys and values of a prompt, `[inputs, heads, length, head_dim]`."""
        cache, layer = self._slots[attention]
        cache.shared[layer] = (keys.contiguous(), values.contiguous())

    @property
    def is_filled(self) -> bool:
        return all(shared is not None for cache in self._caches for shared in cache.shared)

    def forget_prompt(self) -> None:
        for cache in self._caches:
            cache.shared = [None] * len(cache.shared)

    def start_rows(self) -> None:
        """Gives the prompt to all rows; where it is too short for sharing to pay, it becomes the rows' own."""
        for cache, layer in self._slots.values():
            if not sharing_pays(cache.shared[layer][0], self.fan_out):
                cache.repeat_shared(layer)

    def cross(self, attention: MultiheadAttention) -> CrossStates | None:
        """What was kept of the encoder's output for this layer, None before its first step."""
        return self._crosses[attention]

    def set_cross(
        self, attention: MultiheadAttention, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> CrossStates:
        """Keeps keys and values `[inputs, heads, source_length, head_dim]` and their mask, see `mask_sync`."""
        states = self._crosses[attention] = CrossStates(keys, values, mask)
        return states

    def mask_sync(self, padding: Tensor | None, inputs: int) -> Tensor | None:
        """Which positions of the source may be attended to, `[inputs, 1, 1, source_length]`; None if all.

        padding: `[inputs, source_length]` or the same for each row, nonzero where there is nothing. All layers give
        the same tensor, which is read once: attention is faster without a mask than with one that hides nothing.
        """
        if padding is not self._padding:
            by_input = padding[:: padding.shape[0] // inputs].bool()
            self._padding, self._mask = padding, ~by_input[:, None, None, :] if by_input.any() else None
        return self._mask

    def reorder(self, order: Tensor, kept: Tensor | None) -> None:
        """Row i becomes what row `order[i]` was; `kept` are the inputs that remain (int64), None if all do."""
        for cache in self._caches:
            if kept is None:
                cache.reorder(order)
            else:
                cache.keep(kept, order)
        if kept is not None:
            for attention, states in self._crosses.items():
                if states is not None:
                    self._crosses[attention] = states.of_inputs(kept)
        for module in self.plan.others:
            module.reorder_incremental_state(self, order)


# The state that takes the keys of a forward without one; of this thread, and only while that forward runs.
_filling: ContextVar[DecodingState | None] = ContextVar("fastgen_filling", default=None)


@contextmanager
def filling(state: DecodingState) -> Iterator[None]:
    """A forward of the decoder over whole prompts inside this context leaves its keys and values in `state`."""
    token = _filling.set(state)
    try:
        yield
    finally:
        _filling.reset(token)


def being_filled() -> DecodingState | None:
    return _filling.get()


def _by_shape(attentions: list[MultiheadAttention]) -> list[list[MultiheadAttention]]:
    """Pruned heads make layers of different shapes, which cannot lie in one buffer."""
    alike: dict[tuple[int, int], list[MultiheadAttention]] = {}
    for attention in attentions:
        alike.setdefault((attention.num_heads, attention.head_dim), []).append(attention)
    return list(alike.values())
