"""What makes Hugging Face transformers faster, as data; the replacements are imported when they are first called."""

from fastgen.optimizer.tested import TESTED
from fastgen.patching import Patch

SEAMLESS = (("seamless_m4t", "SeamlessM4T"), ("seamless_m4t_v2", "SeamlessM4Tv2"))

PATCHES = (
    Patch(
        "transformers.generate",
        "transformers.generation.utils:GenerationMixin.generate",
        "fastgen.optimizer.transformers.generate:generate",
        tested=TESTED["transformers"],
        parameters=("self",),
        group="transformers.shared_caches",
    ),
    Patch(
        "transformers.prefill",
        "transformers.generation.utils:GenerationMixin._prefill",
        "fastgen.optimizer.transformers.prefill:prefill",
        tested=TESTED["transformers"],
        parameters=("self", "input_ids", "generation_config", "model_kwargs"),
        group="transformers.shared_caches",
    ),
    Patch(
        "transformers.sample",
        "transformers.generation.utils:GenerationMixin._sample",
        "fastgen.optimizer.transformers.greedy:sample",
        tested=TESTED["transformers"],
        parameters=("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config"),
        group="transformers.loops",
    ),
    Patch(
        "transformers.beam_search",
        "transformers.generation.utils:GenerationMixin._beam_search",
        "fastgen.optimizer.transformers.beam_search:beam_search",
        tested=TESTED["transformers"],
        parameters=("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config"),
        group="transformers.loops",
    ),
    Patch(
        "transformers.finished_beams",
        "transformers.generation.utils:GenerationMixin._update_finished_beams",
        "fastgen.optimizer.transformers.beam_search:update_finished_beams",
        tested=TESTED["transformers"],
        parameters=("self", "beam_scores"),
        group="transformers.loops",
    ),
    Patch(
        "transformers.no_repeat_ngram",
        "transformers.generation.logits_process:NoRepeatNGramLogitsProcessor.__call__",
        "fastgen.optimizer.transformers.no_repeat_ngram:no_repeat_ngram",
        tested=TESTED["transformers"],
        parameters=("self", "input_ids", "scores"),
        group="transformers.no_repeat_ngram",
    ),
    Patch(
        "transformers.encoder_ngrams",
        "transformers.generation.logits_process:EncoderNoRepeatNGramLogitsProcessor.__init__",
        "fastgen.optimizer.transformers.no_repeat_ngram:encoder_ngrams",
        tested=TESTED["transformers"],
        parameters=("self", "encoder_ngram_size", "encoder_input_ids"),
        group="transformers.no_repeat_ngram",
    ),
    Patch(
        "transformers.no_repeat_encoder_ngram",
        "transformers.generation.logits_process:EncoderNoRepeatNGramLogitsProcessor.__call__",
        "fastgen.optimizer.transformers.no_repeat_ngram:no_repeat_ngram",
        tested=TESTED["transformers"],
        parameters=("self", "input_ids", "scores"),
        group="transformers.no_repeat_ngram",
    ),
    *(
        Patch(
            f"transformers.stages.{name}{kind}",
            f"transformers.models.{model}.modeling_{model}:{name}{kind}.generate",
            "fastgen.optimizer.transformers.stages:generate",
            tested=TESTED["transformers"],
            parameters=("self",),
            group=f"transformers.stages.{model}",
        )
        for model, name in SEAMLESS
        for kind in ("Model", "ForTextToSpeech", "ForSpeechToSpeech")
    ),
    *(
        Patch(
            f"transformers.stages.{name}.{stage}",
            f"transformers.models.{model}.modeling_{model}:{name}{kind}.forward",
            f"fastgen.optimizer.transformers.stages:{stage}",
            tested=TESTED["transformers"],
            parameters=("self",),
            group=f"transformers.stages.{model}",
        )
        for model, name in SEAMLESS
        for kind, stage in (("TextToUnitForConditionalGeneration", "text_to_unit"), ("CodeHifiGan", "vocoder"))
    ),
    *(
        Patch(
            f"transformers.positions.{model}",
            f"transformers.models.{model}.modeling_{model}:{name}SinusoidalPositionalEmbedding.forward",
            "fastgen.optimizer.transformers.positions:forward",
            tested=TESTED["transformers"],
            parameters=("self", "input_ids", "inputs_embeds", "past_key_values_length"),
            group=f"transformers.positions.{model}",
        )
        for model, name in (("m2m_100", "M2M100"), *SEAMLESS)
    ),
    Patch(
        "transformers.seamless_vocoder",
        "transformers.models.seamless_m4t.modeling_seamless_m4t:SeamlessM4THifiGan.forward",
        "fastgen.optimizer.transformers.vocoder:of_units",
        tested=TESTED["transformers"],
        parameters=("self", "inputs_embeds"),
        group="transformers.seamless_vocoder",
    ),
    Patch(
        "transformers.seamless_v2_vocoder",
        "transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2:SeamlessM4Tv2HifiGan.forward",
        "fastgen.optimizer.transformers.vocoder:of_units",
        tested=TESTED["transformers"],
        parameters=("self", "inputs_embeds"),
        group="transformers.seamless_v2_vocoder",
    ),
    Patch(
        "transformers.speecht5_vocoder",
        "transformers.models.speecht5.modeling_speecht5:SpeechT5HifiGan.forward",
        "fastgen.optimizer.transformers.vocoder:of_spectrogram",
        tested=TESTED["transformers"],
        parameters=("self", "spectrogram"),
        group="transformers.speecht5_vocoder",
    ),
    Patch(
        "transformers.fastspeech2_conformer_vocoder",
        "transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer:FastSpeech2ConformerHifiGan.forward",
        "fastgen.optimizer.transformers.vocoder:of_spectrogram",
        tested=TESTED["transformers"],
        parameters=("self", "spectrogram"),
        group="transformers.fastspeech2_conformer_vocoder",
    ),
    Patch(
        "transformers.vits_vocoder",
        "transformers.models.vits.modeling_vits:VitsHifiGan.forward",
        "fastgen.optimizer.transformers.vocoder:of_latents",
        tested=TESTED["transformers"],
        parameters=("self", "spectrogram", "global_conditioning"),
        group="transformers.vits_vocoder",
    ),
)
