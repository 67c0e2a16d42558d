"""What fastgen changes in fairseq, as data; the replacements are imported when they are first called."""

from functools import partial

from fastgen.optimizer.tested import TESTED
from fastgen.patching import Patch

_patch = partial(Patch, tested=TESTED["fairseq"])

PATCHES = (
    _patch(
        "fairseq.checkpoints",
        "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "fastgen.optimizer.fairseq.checkpoints:load_checkpoint_to_cpu",
        parameters=("path",),
        group="fairseq.checkpoints",
    ),
    _patch(
        "fairseq.generate",
        "fairseq.sequence_generator:SequenceGenerator._generate",
        "fastgen.optimizer.fairseq.generate:generate",
        parameters=("self", "sample", "prefix_tokens", "constraints", "bos_token"),
        group="fairseq.generation",
    ),
    _patch(
        "fairseq.attention",
        "fairseq.modules.multihead_attention:MultiheadAttention.forward",
        "fastgen.optimizer.fairseq.attention:forward",
        parameters=("self", "query", "key", "value", "key_padding_mask", "incremental_state", "need_weights"),
        group="fairseq.generation",
    ),
    _patch(
        "fairseq.decoder",
        "fairseq.models.transformer.transformer_decoder:TransformerDecoderBase.extract_features_scriptable",
        "fastgen.optimizer.fairseq.modules:extract_features",
        parameters=("self", "prev_output_tokens", "encoder_out", "incremental_state"),
        group="fairseq.generation",
    ),
    *(
        _patch(
            f"fairseq.{name}_positions",
            f"fairseq.modules.{name}_positional_embedding:{name.title()}PositionalEmbedding.forward",
            "fastgen.optimizer.fairseq.modules:positions",
            parameters=("self", "input", "incremental_state", *more, "positions"),
            group="fairseq.generation",
        )
        for name, more in (("learned", ()), ("sinusoidal", ("timestep",)))
    ),
    _patch(
        "fairseq.no_repeat_ngram",
        "fairseq.ngram_repeat_block:NGramRepeatBlock.forward",
        "fastgen.optimizer.fairseq.modules:no_repeat_ngram",
        parameters=("self", "tokens", "lprobs", "bsz", "beam_size", "step"),
        group="fairseq.no_repeat_ngram",
    ),
    _patch(
        "fairseq.user_module",
        "fairseq.utils:import_user_module",
        "fastgen.models.prophetnet.names:import_user_module",
        parameters=("args",),
        group="fairseq.user_module",
    ),
    _patch(
        "fairseq.vocoder",
        "fairseq.models.text_to_speech.hifigan:Generator.forward",
        "fastgen.optimizer.fairseq.vocoder:forward",
        parameters=("self", "x"),
        group="fairseq.vocoder",
    ),
    *(
        _patch(
            f"fairseq.{name}_vocoder",
            f"fairseq.models.text_to_speech.vocoder:{vocoder}.forward",
            "fastgen.optimizer.fairseq.vocoder:without_gradients",
            parameters=("self", *parameters),
            group="fairseq.vocoder",
        )
        for name, vocoder, parameters in (
            ("unit", "CodeHiFiGANVocoder", ("x", "dur_prediction")),
            ("spectrogram", "HiFiGANVocoder", ("x",)),
        )
    ),
)
