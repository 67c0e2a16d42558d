"""Checks of a call of fairseq: which modules get caches of fastgen, and why a part of it is left to fairseq.

Tests: tests/optimizer/fairseq/test_fairseq_foreign_code.py, tests/optimizer/fairseq/test_fairseq_caches.py,
tests/optimizer/fairseq/test_fairseq_limits.py, tests/optimizer/fairseq/test_fairseq_captured_steps.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

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
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding import graphs
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.model_facts import ModelFacts
from fastgen.optimizer.decoding.report import Reason, that_hold
from fastgen.optimizer.decoding.user_code import KnownCode
from fastgen.provenance import PYTHON, comes_with, packages_of

# What `net_input` may call the source, the first one that it has.
SOURCES = ("src_tokens", "source", "features")

KNOWN_PACKAGES = PYTHON | {"fairseq", "fastgen", "torch"}

# fairseq's own code may call these.
_OTHERS = frozenset({"numpy", "apex", "xformers", "fairscale", "omegaconf", "hydra", "einops", "triton"})

KNOWN = KnownCode(
    packages=KNOWN_PACKAGES | _OTHERS,
    entries=frozenset({"get_normalized_probs", "get_normalized_probs_scriptable"}),
    not_of_a_step=frozenset({"_future_mask"}),  # a prefill may lengthen it
)


class HostEnsemble(Protocol):
    """What is asked of fairseq's `EnsembleModel`."""

    models: Any
    single_model: Any
    training: bool
    has_encoder: Callable[[], bool]
    forward_encoder: Callable[[dict[str, Any]], Any]
    forward_decoder: Callable[[Tensor, Any, Any, float], tuple[Tensor, Any]]


class HostGenerator(Protocol):
    """What is asked of a `SequenceGenerator` or a subclass of it."""

    model: HostEnsemble
    lm_model: Any
    lm_weight: float
    search: Any
    repeat_ngram_blocker: Any
    beam_size: int
    vocab_size: int
    pad: int
    unk: int
    eos: int
    max_len: int
    max_len_a: float
    max_len_b: int
    min_len: int
    match_source_len: bool
    temperature: float
    unk_penalty: float
    should_set_src_lengths: bool
    token_indices_to_suppress: Any
    _prefix_tokens: Callable[..., tuple[Tensor, Tensor, Tensor]]
    finalize_hypos: Callable[..., Any]
    generate: Callable[..., Any]


@dataclass
class ModelPlan:
    """Which modules of a model get caches of fastgen, and what is left to fairseq.

    reasons: why there are none, if so. others: modules that keep states as in fairseq. by_input: whether the decoder
    can be given the encoder's output with one row per input; otherwise it gets all rows. watched: whether somebody may
    see what passes between the layers. user_code: code of the program that a step runs.
    """

    self_attention: list[MultiheadAttention] = field(default_factory=list)
    cross_attention: list[MultiheadAttention] = field(default_factory=list)
    others: list[nn.Module] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    watched: bool = False
    user_code: list[str] = field(default_factory=list)
    by_input: bool = False

    def find_others(self, decoder: nn.Module) -> None:
        """Notes the modules of this decoder that keep states as in fairseq."""
        known = {*self.self_attention, *self.cross_attention}
        self.others = [module for module in decoder.modules() if module not in known and _has_state(module)]


def plan(model: nn.Module, facts: ModelFacts) -> ModelPlan:
    decoder: Any = getattr(model, "decoder", None)
    result = ModelPlan(reasons=decoder_reasons(decoder))
    if any(map(_is_in_decoder, facts.compiled)):
        result.reasons.append(Reason("COMPILED", "layers of the decoder are compiled"))
    for what in facts.code.foreign[:1]:
        result.reasons.append(Reason("USER_CODE", f"{what} is not fairseq's, and may be left out"))
    if result.reasons:
        return result
    attentions, crosses = [layer.self_attn for layer in decoder.layers], _cross_attentions(decoder)
    result.self_attention = [one for one in attentions if not attention_reasons(one) and one.self_attention]
    result.cross_attention = [one for one in crosses if not attention_reasons(one) and one.encoder_decoder_attention]
    if not (result.self_attention or result.cross_attention):
        found = dict.fromkeys(reason for one in attentions for reason in attention_reasons(one))
        result.reasons = [*found] or [Reason("ATTENTION", "the decoder has no self-attention")]
    result.find_others(decoder)
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
    """Whether its class, which is not fairseq's, says of itself that it takes its keys from a `DecodingState`.

    The class has `supports_external_kv_cache = True`; what inherits from it says nothing. A decoder also has `layers`
    of this kind, and reads no more of the encoder's output than to hand it on; a layer has `self_attn`, of this kind or
    fairseq's, and fairseq's `encoder_attn` or None; a self-attention takes its keys and values from `append` of each
    state that `has_self` of it. In a captured step the state has a `position`, which is the token's, and there are
    `limit` keys.
    """
    return vars(type(module)).get("supports_external_kv_cache", False)


def decoder_reasons(decoder: Any) -> list[Reason]:
    """Why nothing inside this decoder is known; empty if its layers are fairseq's, or take their keys from us."""
    name, layers = type(decoder).__name__, getattr(decoder, "layers", ())
    methods = ("forward", "extract_features_scriptable", "reorder_incremental_state_scripting")
    if not isinstance(decoder, TransformerDecoderBase) and not supports_external_kv_cache(decoder):
        return [Reason("DECODER", f"decoder {name} (supported: fairseq's Transformer decoders)")]
    if type(layers) is not nn.ModuleList:  # it would draw random numbers whenever it is looked through
        return [Reason("DECODER", f"layers of the decoder in a {type(layers).__name__} (supported: ModuleList)")]
    if found := [method for method in methods if _is_replaced(decoder, TransformerDecoderBase, method)]:
        return [Reason("METHOD_REPLACED", f"decoder {name} has a {found[0]} of its own")]
    kind = TransformerDecoderLayerBase
    others = [layer for layer in layers if not isinstance(layer, kind) and not supports_external_kv_cache(layer)]
    others += [layer for layer in layers if _is_replaced(layer, kind, "forward")]
    return that_hold(
        ("DECODER", "layers of the decoder are used more than once", len(set(layers)) < len(layers)),
        *(
            ("DECODER", f"layer {type(layer).__name__} of the decoder (supported: fairseq's Transformer layer)", True)
            for layer in others
        ),
        ("DECODER", "the decoder is prepared for ONNX", any(getattr(layer, "onnx_trace", False) for layer in layers)),
    )[:1]


def attention_reasons(attention: Any) -> list[Reason]:
    """Why this attention has to be computed by fairseq; empty if fastgen may."""
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
    """Whether fastgen may compute this attention without an incremental state, for all positions at once."""
    return not (
        attention_reasons(attention)
        or attention.skip_embed_dim_check  # pruned heads
        or attention.training
        or attention.dropout_module.apply_during_inference
        or any(projection.bias is None for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
    )


def computes_prompt_at_once(generator: HostGenerator, plans: list[ModelPlan]) -> bool:
    """Whether tokens that outputs have to begin with may be computed at once; otherwise they are fed one by one."""
    return (
        not generator.model.has_encoder()
        and generator.lm_model is None
        and comes_with(generator._prefix_tokens, SequenceGenerator)
        and not any(one.others or one.user_code or one.watched for one in plans)
        and all(computes_whole(attention) for one in plans for attention in one.self_attention)
    )


def loop_reasons_sync(
    call: GenerateCall,
    generator: HostGenerator,
    plans: list[ModelPlan],
    max_len: int | None,
    first_token: int,
    prefixes: Tensor | None,
    constraints: Tensor | None,
) -> list[Reason]:
    """Why this call is left to fairseq; empty if fastgen's loop gives the same.

    max_len: None where the sample has no source.
    """
    ensemble, facts = generator.model, [call.facts_of(model, KNOWN) for model in generator.model.models]
    dropouts = [one for found in facts for one in found.modules.values() if isinstance(one, FairseqDropout)]
    is_in_training = ensemble.training or any(found.in_training for found in facts)
    is_short = max_len is not None and max_len < generator.min_len
    is_unknown = type(ensemble) not in (EnsembleModel, EnsembleModelWithAlignment)
    keeps_dropout = any(one.p > 0 and one.apply_during_inference for one in dropouts)
    cannot_constrain = constraints is not None and not generator.search.supports_constraints
    replaced = [
        f"{name} of the ensemble is not that of fairseq"
        for name in ("reorder_incremental_state", "reorder_encoder_out")
        if not comes_with(getattr(ensemble, name), SequenceGenerator)
    ]
    if not comes_with(generator.finalize_hypos, SequenceGenerator):
        replaced.append(f"{type(generator).__name__}.finalize_hypos is not that of SequenceGenerator")
    # fairseq brings beams back that had ended where a prefix ends its sentence; their caches hold padding.
    functions = replaced_functions()
    has_end = prefixes is not None and bool(prefixes.eq(generator.eos).any())
    reasons = that_hold(
        *(("METHOD_REPLACED", text, True) for text in replaced),
        *(("FUNCTION_REPLACED", f"{name} is not that of torch", True) for name in functions),
        ("UNTESTED", "this version of fairseq is newer than any tested", "fairseq" in PATCH_SET.untested_hosts),
        ("ENSEMBLE_TYPE", f"models in a {type(ensemble).__name__} (supported: EnsembleModel)", is_unknown),
        ("GRADIENTS", "autograd records, but caches are written in place", torch.is_grad_enabled()),
        ("STARTS_WITH_PADDING", "the first token is padding", first_token == generator.pad),
        ("TRAINING", "dropout stays on during inference", keeps_dropout),
        ("TRAINING", "a model, or a module of one, is in training mode", is_in_training),
        ("NO_SOURCE", f"net_input without a source (accepted: {', '.join(SOURCES)})", max_len is None),
        ("MIN_LEN", f"min_len {generator.min_len} is above the longest output", is_short),
        ("CONSTRAINTS", f"constraints, which {type(generator.search).__name__} does not support", cannot_constrain),
        ("PREFIX_ENDS", "a prefix holds the end of the sentence", has_end),
    )
    return [*dict.fromkeys(reasons + [reason for one in plans for reason in one.reasons])]


def can_capture(call: GenerateCall, generator: HostGenerator, plans: list[ModelPlan], rows: int, max_len: int) -> bool:
    """Whether a loop of up to `max_len` steps should try to; adds to the report why not."""
    model, user_code = generator.model.single_model, plans[0].user_code[:1]
    called = [Reason("USER_CODE", f"user code is called in each step: {what}") for what in user_code]

    def reasons() -> list[Reason]:
        return _step_reasons(generator, plans, max_len)

    return graphs.can_capture(call, model, model.decoder, rows, max_len, KNOWN, reasons, lambda: called)


def _step_reasons(generator: HostGenerator, plans: list[ModelPlan], max_len: int) -> list[Reason]:
    """Why steps of this generator are not captured, as far as its models tell."""
    if len(plans) > 1:
        return [Reason("ENSEMBLE", f"an ensemble of {len(plans)} models")]
    plan, ensemble, decoder = plans[0], generator.model, generator.model.single_model.decoder
    known, crosses = {*plan.self_attention, *plan.cross_attention}, _cross_attentions(decoder)
    is_ours = comes_with(ensemble.forward_decoder, EnsembleModel)
    keeps_states = bool(plan.others) or len(known) != len(decoder.layers) + len(crosses)
    gets_all_rows = bool(crosses) and not plan.by_input
    return that_hold(
        ("METHOD_REPLACED", "forward_decoder of the ensemble is not that of fairseq", not is_ours),
        ("HOOKS", "the decoder has forward hooks", plan.watched),
        ("MODEL_STATE", "attention of the decoder has states of its own, or is used more than once", keeps_states),
        ("ENCODER_ROWS", "the decoder gets the encoder's output for each row", gets_all_rows),
    ) + _position_reasons(decoder.embed_positions, max_len)


def _position_reasons(positions: Any, max_len: int) -> list[Reason]:
    """Why positions cannot be looked up by a number on the device, see `modules.positions`; empty if they can."""
    if positions is None:
        return []
    if type(positions) is SinusoidalPositionalEmbedding:
        most = positions.weights.shape[0]
    elif type(positions) is LearnedPositionalEmbedding and positions.max_norm is None:
        most = positions.num_embeddings
    else:
        return [Reason("POSITIONS", f"positions of a {type(positions).__name__}")]
    needed = (positions.padding_idx or 0) + max_len + 2
    text = f"positions up to {needed} in a table of {most}"
    return [Reason("POSITIONS", text)] if needed > most else []


def _cross_attentions(decoder: Any) -> list[Any]:
    """Those of all layers that have one, whether fastgen knows them or not."""
    return [layer.encoder_attn for layer in decoder.layers if layer.encoder_attn is not None]


def _has_state(module: nn.Module) -> bool:
    reorder = getattr(type(module), "reorder_incremental_state", None)
    return reorder not in (None, FairseqIncrementalDecoder.reorder_incremental_state)


def _is_in_decoder(name: str) -> bool:
    """Whether the module of this name is run in each step."""
    return name.partition(".")[0] == "decoder"


def _is_replaced(module: nn.Module, base: type, name: str) -> bool:
    """Whether this method is another than that of `base`, or of a class that takes its keys from us."""
    is_other = not supports_external_kv_cache(module) and getattr(type(module), name, None) is not getattr(base, name)
    return is_other or name in vars(module)
