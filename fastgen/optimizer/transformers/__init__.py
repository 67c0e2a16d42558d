"""What makes Hugging Face transformers faster, as data; the replacements are imported when they are first called."""

from functools import partial

from fastgen.optimizer.tested import TESTED
from fastgen.patching import Patch

SEAMLESS = (("seamless_m4t", "SeamlessM4T"), ("seamless_m4t_v2", "SeamlessM4Tv2"))

_patch = partial(Patch, tested=TESTED["transformers"])

PATCHES = (
    _patch(
        "transformers.generate",
        "transformers.generation.utils:GenerationMixin.generate",
        "fastgen.optimizer.transformers.generate:generate",
        parameters=("self",),
        group="transformers.shared_caches",
    ),
    _patch(
        "transformers.prefill",
        "transformers.generation.utils:GenerationMixin._prefill",
        "fastgen.optimizer.transformers.prefill:prefill",
        parameters=("self", "input_ids", "generation_config", "model_kwargs"),
        group="transformers.shared_caches",
    ),
    _patch(
        "transformers.sample",
        "transformers.generation.utils:GenerationMixin._sample",
        "fastgen.optimizer.transformers.token_loop:sample",
        parameters=("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config"),
        group="transformers.loops",
    ),
    _patch(
        "transformers.beam_search",
        "transformers.generation.utils:GenerationMixin._beam_search",
        "fastgen.optimizer.transformers.beam_search:beam_search",
        parameters=("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config"),
        group="transformers.loops",
    ),
    _patch(
        "transformers.finished_beams",
        "transformers.generation.utils:GenerationMixin._update_finished_beams",
        "fastgen.optimizer.transformers.beam_search:update_finished_beams",
        parameters=("self", "beam_scores"),
        group="transformers.loops",
    ),
    _patch(
        "transformers.no_repeat_ngram",
        "transformers.generation.logits_process:NoRepeatNGramLogitsProcessor.__call__",
        "fastgen.optimizer.transformers.no_repeat_ngram:no_repeat_ngram",
        parameters=("self", "input_ids", "scores"),
        group="transformers.no_repeat_ngram",
    ),
    _patch(
        "transformers.encoder_ngrams",
        "transformers.generation.logits_process:EncoderNoRepeatNGramLogitsProcessor.__init__",
        "fastgen.optimizer.transformers.no_repeat_ngram:encoder_ngrams",
        parameters=("self", "encoder_ngram_size", "encoder_input_ids"),
        group="transformers.no_repeat_ngram",
    ),
    _patch(
        "transformers.no_repeat_encoder_ngram",
        "transformers.generation.logits_process:EncoderNoRepeatNGramLogitsProcessor.__call__",
        "fastgen.optimizer.transformers.no_repeat_ngram:no_repeat_ngram",
        parameters=("self", "input_ids", "scores"),
        group="transformers.no_repeat_ngram",
    ),
    _patch(
        "transformers.prefix_constrained",
        "transformers.generation.logits_process:PrefixConstrainedLogitsProcessor.__call__",
        "fastgen.optimizer.transformers.constrained:prefix_constrained",
        parameters=("self", "input_ids", "scores"),
        group="transformers.prefix_constrained",
    ),
    *(
        _patch(
            f"transformers.stages.{name}{kind}",
            f"transformers.models.{model}.modeling_{model}:{name}{kind}.generate",
            "fastgen.optimizer.transformers.models.seamless:generate",
            parameters=("self",),
            group=f"transformers.stages.{model}",
        )
        for model, name in SEAMLESS
        for kind in ("Model", "ForTextToSpeech", "ForSpeechToSpeech")
    ),
    *(
        _patch(
            f"transformers.stages.{name}.{stage}",
            f"transformers.models.{model}.modeling_{model}:{name}{kind}.forward",
            f"fastgen.optimizer.transformers.models.seamless:{stage}",
            parameters=("self",),
            group=f"transformers.stages.{model}",
        )
        for model, name in SEAMLESS
        for kind, stage in (
            ("SpeechEncoder", "speech_encoder"),
            ("TextToUnitForConditionalGeneration", "text_to_unit"),
            ("CodeHifiGan", "vocoder"),
        )
    ),
    *(
        _patch(
            f"transformers.positions.{model}",
            f"transformers.models.{model}.modeling_{model}:{name}SinusoidalPositionalEmbedding.forward",
            "fastgen.optimizer.transformers.models.seamless:positions",
            parameters=("self", "input_ids", "inputs_embeds", "past_key_values_length"),
            group=f"transformers.positions.{model}",
        )
        for model, name in (("m2m_100", "M2M100"), *SEAMLESS)
    ),
    *(
        _patch(
            f"transformers.{name}_vocoder",
            f"transformers.models.{model}.modeling_{model}:{generator}.forward",
            f"fastgen.optimizer.transformers.models.vocoders:{forward}",
            parameters=("self", *parameters),
            group=f"transformers.{name}_vocoder",
        )
        for name, model, generator, forward, parameters in (
            ("seamless", "seamless_m4t", "SeamlessM4THifiGan", "vocode_units", ("inputs_embeds",)),
            ("seamless_v2", "seamless_m4t_v2", "SeamlessM4Tv2HifiGan", "vocode_units", ("inputs_embeds",)),
            ("speecht5", "speecht5", "SpeechT5HifiGan", "vocode_spectrogram", ("spectrogram",)),
            (
                "fastspeech2_conformer",
                "fastspeech2_conformer",
                "FastSpeech2ConformerHifiGan",
                "vocode_spectrogram",
                ("spectrogram",),
            ),
            ("vits", "vits", "VitsHifiGan", "decode_latents", ("spectrogram", "global_conditioning")),
        )
    ),
    *(
        _patch(
            f"transformers.{model}_decoder",
            f"transformers.models.{model}.modeling_{model}:{decoder}.forward",
            "fastgen.optimizer.transformers.models.vocoders:decode_codes",
            parameters=("self", "hidden_states"),
            group=f"transformers.{model}_decoder",
        )
        for model, decoder in (("encodec", "EncodecDecoder"), ("mimi", "MimiDecoder"))
    ),
    *(
        _patch(
            f"transformers.prophetnet.{replacement}",
            f"transformers.models.prophetnet.modeling_prophetnet:ProphetNet{name}.forward",
            f"fastgen.optimizer.transformers.models.prophetnet:{replacement}",
            parameters=("self", *parameters),
            group="transformers.prophetnet",
        )
        for name, replacement, parameters in (
            (
                "ForConditionalGeneration",
                "conditional_generation",
                ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs", "past_key_values"),
            ),
            ("ForCausalLM", "causal_lm", ("input_ids", "attention_mask", "encoder_hidden_states", "past_key_values")),
            (
                "NgramSelfAttention",
                "self_attention",
                ("hidden_states", "past_key_values", "main_relative_position_buckets"),
            ),
            ("Attention", "cross_attention", ("hidden_states", "attention_mask", "past_key_values")),
        )
    ),
)
