"""Which modules of a model of fairseq are given caches by fastgen, and what is left to fairseq.

Tests: tests/optimizer/fairseq/test_fairseq_foreign_code.py, tests/optimizer/fairseq/test_fairseq_caches.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fairseq.models.fairseq_incremental_decoder import FairseqIncrementalDecoder
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import nn

from fastgen.optimizer.decoding.model_facts import KnownCode, ModelFacts
from fastgen.optimizer.decoding.reasons import Reason
from fastgen.origin import PYTHON, packages_of

KNOWN_PACKAGES = PYTHON | {"fairseq", "fastgen", "torch"}

# fairseq's own code may call these.
_OTHERS = frozenset({"numpy", "apex", "xformers", "fairscale", "omegaconf", "hydra", "einops", "triton"})

KNOWN = KnownCode(
    packages=KNOWN_PACKAGES | _OTHERS,
    entries=frozenset({"get_normalized_probs", "get_normalized_probs_scriptable"}),
)


@dataclass
class ModelPlan:
    """Which modules of a model are given caches by fastgen, and what is left to fairseq.

    reasons: why there are none, if so. others: modules that keep a state of their own, as in fairseq.
    by_input: whether the decoder can be given the encoder's output with one row per input; otherwise it gets all rows.
    watched: whether somebody may see what passes between the layers. user_code: code of the program that a step runs.
    """

    self_attention: list[MultiheadAttention] = field(default_factory=list)
    cross_attention: list[MultiheadAttention] = field(default_factory=list)
    others: list[nn.Module] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    watched: bool = False
    user_code: list[str] = field(default_factory=list)
    by_input: bool = False

    def look_again(self, model: nn.Module) -> None:
        """After the program has changed the model while it generates: somebody may see what passes between layers."""
        self.watched = True
        known = {*self.self_attention, *self.cross_attention}
        self.others = [module for module in model.decoder.modules() if module not in known and _has_state(module)]


def goes_by_states(module: Any) -> bool:
    """Whether its class, which is not fairseq's, says of itself that it goes by a `DecodingState`.

    The class has `goes_by_states = True`; what inherits from it says nothing. A decoder also has `layers` of this kind,
    and reads no more of the encoder's output than to hand it on; a layer has `self_attn`, of this kind or fairseq's,
    and fairseq's `encoder_attn` or None; a self-attention takes its keys and values from `append` of each state that
    `has_self` of it. In a captured step the state has a
    `position`, which is the token's, and there are `limit` keys.
    """
    return vars(type(module)).get("goes_by_states", False)


def decoder_code_of_program(facts: ModelFacts) -> list[str]:
    """Modules, methods and functions of the program's own that a step of the decoder runs."""
    return [what for name, what in facts.foreign_classes + facts.replaced if is_in_decoder(name)]


def is_in_decoder(name: str) -> bool:
    """Whether the module of this name is run in each step."""
    return name.partition(".")[0] == "decoder"


def plan(model: nn.Module, facts: ModelFacts) -> ModelPlan:
    decoder = getattr(model, "decoder", None)
    reasons = decoder_reasons(decoder)
    if any(map(is_in_decoder, facts.compiled)):
        reasons.append(Reason("COMPILED", "layers of the decoder are compiled"))
    for what in facts.code.foreign[:1]:
        reasons.append(Reason("USER_CODE", f"{what} is not fairseq's, and may be left out"))
    if reasons:
        return ModelPlan(reasons=reasons)
    result = ModelPlan(user_code=decoder_code_of_program(facts))
    for layer in decoder.layers:
        if not attention_reasons(layer.self_attn) and layer.self_attn.self_attention:
            result.self_attention.append(layer.self_attn)
        cross = layer.encoder_attn
        if cross is not None and not attention_reasons(cross) and cross.encoder_decoder_attention:
            result.cross_attention.append(cross)
    known = {*result.self_attention, *result.cross_attention}
    result.others = [module for module in decoder.modules() if module not in known and _has_state(module)]
    result.watched = any(name is None or is_in_decoder(name) for name, _ in facts.hooks)
    crosses = cross_attentions(decoder)
    reorder = getattr(getattr(model, "encoder", None), "reorder_encoder_out", None)
    result.by_input = not (
        result.watched
        or getattr(decoder, "cross_self_attention", False)
        or len(crosses) > len(result.cross_attention)
        or reorder is None
        or not packages_of(decoder.extract_features) | packages_of(reorder) <= KNOWN_PACKAGES
    )
    if not known:
        found = dict.fromkeys(reason for layer in decoder.layers for reason in attention_reasons(layer.self_attn))
        result.reasons = [*found] or [Reason("ATTENTION", "the decoder has no self-attention")]
    return result


def cross_attentions(decoder: Any) -> list[Any]:
    """Those of all layers that have one, whether fastgen knows them or not."""
    return [layer.encoder_attn for layer in decoder.layers if layer.encoder_attn is not None]


def decoder_reasons(decoder: Any) -> list[Reason]:
    """Why nothing inside this decoder is known; empty if its layers are fairseq's Transformer's, or go by states."""
    if not isinstance(decoder, TransformerDecoderBase) and not goes_by_states(decoder):
        text = f"decoder {type(decoder).__name__} (supported: fairseq's Transformer decoders)"
        return [Reason("DECODER", text)]
    if type(decoder.layers) is not nn.ModuleList:  # it would draw random numbers whenever it is looked through
        text = f"layers of the decoder in a {type(decoder.layers).__name__} (supported: ModuleList)"
        return [Reason("DECODER", text)]
    for name in ("forward", "extract_features_scriptable", "reorder_incremental_state_scripting"):
        if _is_own(decoder, TransformerDecoderBase, name):
            return [Reason("METHOD_REPLACED", f"decoder {type(decoder).__name__} has a {name} of its own")]
    if len(set(decoder.layers)) < len(decoder.layers):
        return [Reason("DECODER", "layers of the decoder are used more than once")]
    for layer in decoder.layers:
        is_known = isinstance(layer, TransformerDecoderLayerBase) or goes_by_states(layer)
        if not is_known or _is_own(layer, TransformerDecoderLayerBase, "forward"):
            text = f"layer {type(layer).__name__} of the decoder (supported: fairseq's Transformer layer)"
            return [Reason("DECODER", text)]
        if getattr(layer, "onnx_trace", False):
            return [Reason("DECODER", "the decoder is prepared for ONNX")]
    return []


def attention_reasons(attention: Any) -> list[Reason]:
    """Why this attention has to be computed by fairseq; empty if fastgen may."""
    if type(attention) is not MultiheadAttention and not goes_by_states(attention):
        text = f"attention {type(attention).__name__} (supported: fairseq's MultiheadAttention)"
        return [Reason("ATTENTION", text)]
    found = {
        "code of its own": any(map(callable, vars(attention).values())),
        "xFormers": attention.use_xformers,
        "add_bias_kv": attention.bias_k is not None or attention.bias_v is not None,
        "add_zero_attn": attention.add_zero_attn,
        "onnx_trace": attention.onnx_trace,
    }
    return [Reason("ATTENTION", f"attention with {name}") for name, is_so in found.items() if is_so]


def _is_own(module: nn.Module, base: type, name: str) -> bool:
    """Whether this method is another than that of `base`, or of the class that goes by states."""
    given = not goes_by_states(module) and getattr(type(module), name) is not getattr(base, name)
    return given or name in vars(module)


def _has_state(module: nn.Module) -> bool:
    reorder = getattr(type(module), "reorder_incremental_state", None)
    return reorder not in (None, FairseqIncrementalDecoder.reorder_incremental_state)
