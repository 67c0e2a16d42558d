"""What fastgen changes in fairseq, as data; the replacements are imported when they are first called."""

from functools import partial

from fastgen.patching import Patch, patch_group

TESTED = ("0.12.2", "0.12.3")  # the lowest and the newest version, by `make matrix`; `generate` of newer is left to it

_group = partial(patch_group, "fairseq", TESTED)
_VOCODER = "models.text_to_speech.vocoder:"

PATCHES = (
    *_group(
        "checkpoints",
        ("checkpoints", "checkpoint_utils:load_checkpoint_to_cpu(path)", "checkpoints:load_checkpoint_to_cpu"),
    ),
    *_group(
        "generation",
        (
            "generate",
            "sequence_generator:SequenceGenerator._generate(self, sample, prefix_tokens, constraints, bos_token)",
            "generate:generate",
        ),
        (
            "attention",
            "modules.multihead_attention:MultiheadAttention.forward"
            "(self, query, key, value, key_padding_mask, incremental_state, need_weights)",
            "modules:multihead_attention",
        ),
        (
            "decoder",
            "models.transformer.transformer_decoder:TransformerDecoderBase.extract_features_scriptable"
            "(self, prev_output_tokens, encoder_out, incremental_state)",
            "modules:extract_features",
        ),
        (
            "learned_positions",
            "modules.learned_positional_embedding:LearnedPositionalEmbedding.forward"
            "(self, input, incremental_state, positions)",
            "modules:positions",
        ),
        (
            "sinusoidal_positions",
            "modules.sinusoidal_positional_embedding:SinusoidalPositionalEmbedding.forward"
            "(self, input, incremental_state, timestep, positions)",
            "modules:positions",
        ),
    ),
    *_group(
        "no_repeat_ngram",
        (
            "no_repeat_ngram",
            "ngram_repeat_block:NGramRepeatBlock.forward(self, tokens, lprobs, bsz, beam_size, step)",
            "modules:no_repeat_ngram",
        ),
    ),
    Patch(
        "fairseq.user_module",
        "fairseq.utils:import_user_module",
        "fastgen.models.prophetnet.names:import_user_module",
        TESTED,
        parameters=("args",),
        group="fairseq.user_module",
    ),
    *_group(
        "vocoder",
        ("vocoder", "models.text_to_speech.hifigan:Generator.forward(self, x)", "modules:vocode"),
        (
            "unit_vocoder",
            f"{_VOCODER}CodeHiFiGANVocoder.forward(self, x, dur_prediction)",
            "modules:vocode_without_gradients",
        ),
        ("spectrogram_vocoder", f"{_VOCODER}HiFiGANVocoder.forward(self, x)", "modules:vocode_without_gradients"),
    ),
)
