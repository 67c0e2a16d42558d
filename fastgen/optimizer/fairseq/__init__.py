"""What fastgen changes in fairseq, as data; the replacements are imported when they are first called."""

from fastgen.optimizer.tested import TESTED
from fastgen.patching import Patch

PATCHES = (
    Patch(
        "fairseq.checkpoints",
        "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "fastgen.optimizer.fairseq.checkpoints:load_checkpoint_to_cpu",
        tested=TESTED["fairseq"],
        parameters=("path",),
        group="fairseq.checkpoints",
    ),
    Patch(
        "fairseq.generate",
        "fairseq.sequence_generator:SequenceGenerator._generate",
        "fastgen.optimizer.fairseq.generate:generate",
        tested=TESTED["fairseq"],
        parameters=("self", "sample", "prefix_tokens", "constraints", "bos_token"),
        group="fairseq.generation",
    ),
    Patch(
        "fairseq.attention",
        "fairseq.modules.multihead_attention:MultiheadAttention.forward",
        "fastgen.optimizer.fairseq.attention:forward",
        tested=TESTED["fairseq"],
        parameters=("self", "query", "key", "value", "key_padding_mask", "incremental_state", "need_weights"),
        group="fairseq.generation",
    ),
    Patch(
        "fairseq.decoder",
        "fairseq.models.transformer.transformer_decoder:TransformerDecoderBase.extract_features_scriptable",
        "fastgen.optimizer.fairseq.decoder:extract_features",
        tested=TESTED["fairseq"],
        parameters=("self", "prev_output_tokens", "encoder_out", "incremental_state"),
        group="fairseq.generation",
    ),
    Patch(
        "fairseq.learned_positions",
        "fairseq.modules.learned_positional_embedding:LearnedPositionalEmbedding.forward",
        "fastgen.optimizer.fairseq.positions:forward",
        tested=TESTED["fairseq"],
        parameters=("self", "input", "incremental_state", "positions"),
        group="fairseq.generation",
    ),
    Patch(
        "fairseq.sinusoidal_positions",
        "fairseq.modules.sinusoidal_positional_embedding:SinusoidalPositionalEmbedding.forward",
        "fastgen.optimizer.fairseq.positions:forward",
        tested=TESTED["fairseq"],
        parameters=("self", "input", "incremental_state", "timestep", "positions"),
        group="fairseq.generation",
    ),
    Patch(
        "fairseq.no_repeat_ngram",
        "fairseq.ngram_repeat_block:NGramRepeatBlock.forward",
        "fastgen.optimizer.fairseq.no_repeat_ngram:no_repeat_ngram",
        tested=TESTED["fairseq"],
        parameters=("self", "tokens", "lprobs", "bsz", "beam_size", "step"),
        group="fairseq.no_repeat_ngram",
    ),
    Patch(
        "fairseq.vocoder",
        "fairseq.models.text_to_speech.hifigan:Generator.forward",
        "fastgen.optimizer.fairseq.vocoder:forward",
        tested=TESTED["fairseq"],
        parameters=("self", "x"),
        group="fairseq.vocoder",
    ),
    Patch(
        "fairseq.unit_vocoder",
        "fairseq.models.text_to_speech.vocoder:CodeHiFiGANVocoder.forward",
        "fastgen.optimizer.fairseq.vocoder:without_gradients",
        tested=TESTED["fairseq"],
        parameters=("self", "x", "dur_prediction"),
        group="fairseq.vocoder",
    ),
    Patch(
        "fairseq.spectrogram_vocoder",
        "fairseq.models.text_to_speech.vocoder:HiFiGANVocoder.forward",
        "fastgen.optimizer.fairseq.vocoder:without_gradients",
        tested=TESTED["fairseq"],
        parameters=("self", "x"),
        group="fairseq.vocoder",
    ),
)
