"""`CallChecks`, and `plan` for one model, decide whether a call of fairseq, or a part of it, is left to the library.

Each part of a call has a table of reasons: code, text and condition. fastgen does the part if no condition holds. To
add a reason, add a row. fastgen/reasons.py explains the codes.

Tests: tests/optimizer/fairseq/test_fairseq_foreign_code.py, tests/optimizer/fairseq/test_fairseq_loop.py,
tests/optimizer/fairseq/test_fairseq_captured_steps.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from fairseq.models.fairseq_incremental_decoder import FairseqIncrementalDecoder
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.sequence_generator import EnsembleModel, EnsembleModelWithAlignment, SequenceGenerator
from torch import Tensor, nn

from fastgen.ops.tracing import replaced_functions
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.guards import KnownCode
from fastgen.optimizer.decoding.model_info import ModelInfo
from fastgen.optimizer.decoding.report import LOOP, STEPS, Reason, check, that_hold
from fastgen.provenance import PYTHON, comes_with, packages_of

# The names that the source may have in `net_input`; the first one present counts.
SOURCES = ("src_tokens", "source", "features")

# Methods of the ensemble that fairseq's loop calls, and fastgen's does not.
METHODS = ("reorder_incremental_state", "reorder_encoder_out")

KNOWN_PACKAGES = PYTHON | {"fairseq", "fastgen", "torch"}

# Packages that fairseq's own code may call; transformers adds a method to torch's modules.
_CALLED_PACKAGES = frozenset({
    "numpy", "apex", "xformers", "fairscale", "omegaconf", "hydra", "einops", "triton", "transformers",
})  # fmt: skip

KNOWN = KnownCode(
    packages=KNOWN_PACKAGES | _CALLED_PACKAGES,
    files=("fairseq.utils", "fairseq.incremental_decoding_utils", "torch", "torch.nn.functional"),
    not_of_a_step=frozenset({"_future_mask"}),  # a prefill may lengthen it
)


@dataclass
class ModelPlan:
    """The modules of a model that get caches of fastgen, and what is left to fairseq.

    reasons: why no module gets one, if so. stateful: modules that store states as in fairseq. by_input: whether the
    decoder accepts the encoder's output with one row per input; otherwise it gets all rows. watched: whether hooks see
    what passes between the layers. user_code: user code that a step runs.
    """

    self_attention: list[MultiheadAttention] = field(default_factory=list)
    cross_attention: list[MultiheadAttention] = field(default_factory=list)
    stateful: list[nn.Module] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    watched: bool = False
    user_code: list[str] = field(default_factory=list)
    by_input: bool = False

    def find_stateful(self, decoder: nn.Module) -> None:
        """Stores the modules of this decoder that keep states as in fairseq."""
        base = FairseqIncrementalDecoder.reorder_incremental_state
        replaced = {*self.self_attention, *self.cross_attention}
        candidates = [module for module in decoder.modules() if module not in replaced]
        self.stateful = [module for module in candidates if getattr(type(module), base.__name__, base) is not base]


@check(LOOP)
def plan(model: nn.Module, facts: ModelInfo) -> ModelPlan:
    """Returns which modules of a model get caches of fastgen, or the reasons why none do."""
    decoder: Any = getattr(model, "decoder", None)
    result = ModelPlan()
    result.reasons = that_hold(
        decoder_reasons(decoder),
        ("COMPILED", "layers of the decoder are compiled", any(map(_is_in_decoder, facts.compiled))),
        ("USER_CODE", "{} is not fairseq's, and may be left out", facts.foreign[:1]),
    )
    if result.reasons:
        return result
    attentions = [layer.self_attn for layer in decoder.layers]
    crosses = _cross_attentions(decoder)
    result.self_attention = [a for a in attentions if not attention_reasons(a) and a.self_attention]
    result.cross_attention = [a for a in crosses if not attention_reasons(a) and a.encoder_decoder_attention]
    if not (result.self_attention or result.cross_attention):
        result.reasons = that_hold(*map(attention_reasons, attentions))
        result.reasons = result.reasons or [Reason("ATTENTION", "the decoder has no self-attention")]
    result.find_stateful(decoder)
    result.user_code = [what for name, what in facts.foreign_classes + facts.replaced if _is_in_decoder(name)]
    result.watched = any(name is None or _is_in_decoder(name) for name, _ in facts.hooks)
    reorder = getattr(getattr(model, "encoder", None), "reorder_encoder_out", None)
    result.by_input = not (
        result.watched
        or getattr(decoder, "cross_self_attention", False)
        or len(crosses) > len(result.cross_attention)
        or reorder is None
        or not packages_of(decoder.extract_features) | packages_of(reorder) <= KNOWN_PACKAGES
    )
    return result


def supports_external_kv_cache(module: Any) -> bool:
    """Whether the module's class, which is not fairseq's, declares that it takes its keys from a `DecodingState`.

    The class itself has `supports_external_kv_cache = True`; subclasses do not inherit it. A decoder also has `layers`
    of this kind, and only passes the encoder's output on; a layer has `self_attn`, of this kind or fairseq's, and
    `encoder_attn`, fairseq's or None. A self-attention takes its keys and values from `append` of each state for which
    `has_self` is true. In a captured step the state has the token's `position`, and there are `limit` keys.
    """
    return vars(type(module)).get("supports_external_kv_cache", False)


@check(LOOP)
def decoder_reasons(decoder: Any) -> list[Reason]:
    """Returns why this decoder is not supported; empty if its layers are fairseq's, or take their keys from fastgen."""
    name = type(decoder).__name__
    layers = getattr(decoder, "layers", ())
    methods = ("forward", "extract_features_scriptable", "reorder_incremental_state_scripting")
    if not isinstance(decoder, TransformerDecoderBase) and not supports_external_kv_cache(decoder):
        return [Reason("DECODER", f"decoder {name} (supported: fairseq's Transformer decoders)")]
    if type(layers) is not nn.ModuleList:  # a LayerDropModuleList draws random numbers in each iteration
        return [Reason("DECODER", f"layers of the decoder in a {type(layers).__name__} (supported: ModuleList)")]
    if replaced := [method for method in methods if _is_replaced(decoder, TransformerDecoderBase, method)]:
        return [Reason("METHOD_REPLACED", f"decoder {name} has a {replaced[0]} of its own")]
    unsupported = [
        type(layer).__name__ for layer in layers if _is_replaced(layer, TransformerDecoderLayerBase, "forward")
    ]
    return that_hold(
        ("DECODER", "layers of the decoder are used more than once", len(set(layers)) < len(layers)),
        ("DECODER", "layer {} of the decoder (supported: fairseq's Transformer layer)", unsupported),
        ("DECODER", "the decoder is prepared for ONNX", any(getattr(layer, "onnx_trace", False) for layer in layers)),
    )[:1]


@check(LOOP)
def attention_reasons(attention: Any) -> list[Reason]:
    """Returns why fairseq must compute this attention; empty if fastgen may."""
    if type(attention) is not MultiheadAttention and not supports_external_kv_cache(attention):
        text = f"attention {type(attention).__name__} (supported: fairseq's MultiheadAttention)"
        return [Reason("ATTENTION", text)]
    has_bias = attention.bias_k is not None or attention.bias_v is not None
    return that_hold(
        ("ATTENTION", "attention with code of its own", any(map(callable, vars(attention).values()))),
        ("ATTENTION", "attention with xFormers", attention.use_xformers),
        ("ATTENTION", "attention with add_bias_kv", has_bias),
        ("ATTENTION", "attention with add_zero_attn", attention.add_zero_attn),
        ("ATTENTION", "attention with onnx_trace", attention.onnx_trace),
    )


def computes_whole(attention: Any) -> bool:
    """Whether fastgen may compute this attention without an incremental state, for all positions together."""
    return not (
        attention_reasons(attention)
        or attention.skip_embed_dim_check  # pruned heads
        or attention.training
        or attention.dropout_module.apply_during_inference
        or any(projection.bias is None for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
    )


def computes_prompt_in_one_pass(generator: SequenceGenerator, plans: list[ModelPlan]) -> bool:
    """Whether tokens that outputs must begin with may be computed in one pass; otherwise they are fed one by one."""
    return (
        not generator.model.has_encoder()
        and generator.lm_model is None
        and comes_with(generator._prefix_tokens, SequenceGenerator)
        and not any(plan.stateful or plan.user_code or plan.watched for plan in plans)
        and all(computes_whole(attention) for plan in plans for attention in plan.self_attention)
    )


class CallChecks:
    """The reasons why parts of a call are left to fairseq: a table for each part, in which no reason may hold.

    max_len: the number of steps after the first; None if the sample has no source. plans: the plan of each model of
    the ensemble.
    """

    known_code = KNOWN

    def __init__(
        self,
        call: GenerateCall,
        generator: SequenceGenerator,
        max_len: int | None,
        first_token: int,
        prefixes: Tensor | None,
        constraints: Tensor | None,
    ) -> None:
        self.call = call
        self.generator = generator
        self.model = generator.model.single_model
        self.decoder: Any = getattr(self.model, "decoder", None)
        self.max_len: Any = max_len
        self.first_token, self.prefixes, self.constraints = first_token, prefixes, constraints
        self.facts = [call.facts_of(model, KNOWN) for model in generator.model.models]
        self.plans = [*map(plan, generator.model.models, self.facts)]

    @cached_property
    @check(LOOP)
    def loop(self) -> list[Reason]:
        """The reasons why the whole call is left to fairseq. Reads the prefixes on the device."""
        generator = self.generator
        ensemble = self.generator.model
        search = self.generator.search
        modules = [module for facts in self.facts for module in facts.modules.values()]
        dropouts = [module for module in modules if isinstance(module, FairseqDropout)]
        keeps_dropout = any(module.p > 0 and module.apply_during_inference for module in dropouts)
        is_in_training = ensemble.training or any(facts.in_training for facts in self.facts)
        methods = [name for name in METHODS if not comes_with(getattr(ensemble, name), SequenceGenerator)]
        finalizes = not comes_with(generator.finalize_hypos, SequenceGenerator)
        text = f"{type(generator).__name__}.finalize_hypos is not that of SequenceGenerator"
        is_unknown = type(ensemble) not in (EnsembleModel, EnsembleModelWithAlignment)
        cannot_constrain = self.constraints is not None and not search.supports_constraints
        is_short = self.max_len is not None and self.max_len < generator.min_len
        # If a prefix ends its sentence, fairseq revives beams that had ended, and whose caches hold padding.
        has_end = self.prefixes is not None and bool(self.prefixes.eq(generator.eos).any())
        return that_hold(
            ("METHOD_REPLACED", "{} of the ensemble is not that of fairseq", methods),
            ("METHOD_REPLACED", text, finalizes),
            ("FUNCTION_REPLACED", "{} is not that of torch", replaced_functions()),
            ("ENSEMBLE_TYPE", f"models in a {type(ensemble).__name__} (supported: EnsembleModel)", is_unknown),
            ("GRADIENTS", "autograd records, but caches are written in place", torch.is_grad_enabled()),
            ("STARTS_WITH_PADDING", "the first token is padding", self.first_token == generator.pad),
            ("TRAINING", "dropout stays on during inference", keeps_dropout),
            ("TRAINING", "a model, or a module of one, is in training mode", is_in_training),
            ("NO_SOURCE", f"net_input without a source (accepted: {', '.join(SOURCES)})", self.max_len is None),
            ("MIN_LEN", f"min_len {generator.min_len} is above the longest output", is_short),
            ("CONSTRAINTS", f"constraints, which {type(search).__name__} does not support", cannot_constrain),
            ("PREFIX_ENDS", "a prefix holds the end of the sentence", has_end),
            *(plan.reasons for plan in self.plans),
        )

    @cached_property
    @check(STEPS)
    def capture(self) -> list[Reason]:
        """The reasons in the models' layers why steps are not captured; `captures.can_capture` adds more."""
        if len(self.plans) > 1:
            return [Reason("ENSEMBLE", f"an ensemble of {len(self.plans)} models")]
        plan = self.plans[0]
        ensemble = self.generator.model
        decoder = self.decoder
        positions = decoder.embed_positions
        attentions = {*plan.self_attention, *plan.cross_attention}
        crosses = _cross_attentions(decoder)
        is_replaced = not comes_with(ensemble.forward_decoder, EnsembleModel)
        keeps_states = bool(plan.stateful) or len(attentions) != len(decoder.layers) + len(crosses)
        gets_all_rows = bool(crosses) and not plan.by_input
        size = _table_size(positions)
        needed = (getattr(positions, "padding_idx", None) or 0) + (self.max_len or 0) + 2
        is_short = size is not None and needed > size
        return that_hold(
            ("METHOD_REPLACED", "forward_decoder of the ensemble is not that of fairseq", is_replaced),
            ("HOOKS", "the decoder has forward hooks", plan.watched),
            ("MODEL_STATE", "attention of the decoder has states of its own, or is used more than once", keeps_states),
            ("ENCODER_ROWS", "the decoder gets the encoder's output for each row", gets_all_rows),
            ("POSITIONS", f"positions of a {type(positions).__name__}", size is None),
            ("POSITIONS", f"positions up to {needed} in a table of {size}", is_short),
        )

    @property
    @check(STEPS)
    def rows(self) -> list[Reason]:
        return that_hold(("USER_CODE", "user code is called in each step: {}", self.plans[0].user_code[:1]))


def _table_size(positions: Any) -> float | None:
    """Returns how many positions a number on the device can look up, see `modules.positions`; None if none."""
    if positions is None:
        return math.inf
    if type(positions) is SinusoidalPositionalEmbedding:
        return len(positions.weights)
    is_known = type(positions) is LearnedPositionalEmbedding and positions.max_norm is None
    return positions.num_embeddings if is_known else None


def _cross_attentions(decoder: Any) -> list[Any]:
    """Returns the cross-attention of each layer that has one, supported or not."""
    return [layer.encoder_attn for layer in decoder.layers if layer.encoder_attn is not None]


def _is_in_decoder(name: str) -> bool:
    """Whether the module of this name runs in each step."""
    return name.partition(".")[0] == "decoder"


def _is_replaced(module: nn.Module, base: type, name: str) -> bool:
    """Whether a method is neither that of `base` nor of a class that takes its keys from a `DecodingState`."""
    is_other = not isinstance(module, base) or getattr(type(module), name) is not getattr(base, name)
    return name in vars(module) or (is_other and not supports_external_kv_cache(module))
