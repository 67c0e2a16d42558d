"""The patches of Hugging Face transformers, as data; replacements are imported when they are first called.

Tests: tests/test_package.py, tests/patching/test_patching.py
"""

from functools import partial

from fastgen.models import LOWEST
from fastgen.patching import Patch, patch_group

_group = partial(patch_group, "transformers", LOWEST["transformers"])


def _of_model(group: str, model: str, *patches: tuple[str, str, str]) -> list[Patch]:
    """Returns patches of targets in a model's file, with replacements in models/."""
    file = f"models.{model}.modeling_{model}:"
    return _group(group, *((name, file + target, f"models.{ours}") for name, target, ours in patches))


def _of_seamless(model: str, name: str) -> list[Patch]:
    stages = (
        ("SpeechEncoder", "speech_encoder"),
        ("TextToUnitForConditionalGeneration", "text_to_unit"),
        ("CodeHifiGan", "vocoder"),
    )
    return _of_model(
        f"stages.{model}",
        model,
        *(
            (f"stages.{name}{kind}", f"{name}{kind}.generate(self)", "seamless:generate")
            for kind in ("Model", "ForTextToSpeech", "ForSpeechToSpeech")
        ),
        *((f"stages.{name}.{stage}", f"{name}{kind}.forward(self)", f"seamless:{stage}") for kind, stage in stages),
    )


_MIXIN = "generation.utils:GenerationMixin"
_NGRAMS, _ENCODER_NGRAMS, _TRIE = (
    f"generation.logits_process:{name}LogitsProcessor"
    for name in ("NoRepeatNGram", "EncoderNoRepeatNGram", "PrefixConstrained")
)
_LOOP = "(self, input_ids, logits_processor, stopping_criteria, generation_config)"
_SCORES, _ENCODER = "__call__(self, input_ids, scores)", "(self, encoder_ngram_size, encoder_input_ids)"
_POSITIONS = (
    "SinusoidalPositionalEmbedding.forward(self, input_ids, inputs_embeds, cache_length|past_key_values_length)"
)
_HIFI_GAN = "HifiGan.forward(self, inputs_embeds|input_embeds)"

# Groups of a single patch: name, model, target, replacement.
_ALONE = (
    ("positions.m2m_100", "m2m_100", f"M2M100{_POSITIONS}", "seamless:positions"),
    ("positions.seamless_m4t", "seamless_m4t", f"SeamlessM4T{_POSITIONS}", "seamless:positions"),
    ("positions.seamless_m4t_v2", "seamless_m4t_v2", f"SeamlessM4Tv2{_POSITIONS}", "seamless:positions"),
    ("seamless_vocoder", "seamless_m4t", f"SeamlessM4T{_HIFI_GAN}", "seamless:vocode_units"),
    ("seamless_v2_vocoder", "seamless_m4t_v2", f"SeamlessM4Tv2{_HIFI_GAN}", "seamless:vocode_units"),
)

PATCHES = (
    *_group(
        "shared_caches",
        ("generate", f"{_MIXIN}.generate(self)", "call:generate"),
        ("prefill", f"{_MIXIN}._prefill(self, input_ids, generation_config, model_kwargs)", "prefill:prefill"),
    ),
    *_group(
        "loops",
        ("sample", f"{_MIXIN}._sample{_LOOP}", "token_loop:sample"),
        ("beam_search", f"{_MIXIN}._beam_search{_LOOP}", "beam_search:beam_search"),
        ("finished_beams", f"{_MIXIN}._update_finished_beams(self, beam_scores)", "beam_search:update_finished_beams"),
    ),
    *_group(
        "no_repeat_ngram",
        ("no_repeat_ngram", f"{_NGRAMS}.{_SCORES}", "processors:no_repeat_ngram"),
        ("no_repeat_encoder_ngram", f"{_ENCODER_NGRAMS}.{_SCORES}", "processors:no_repeat_ngram"),
        ("encoder_ngrams", f"{_ENCODER_NGRAMS}.__init__{_ENCODER}", "processors:encoder_ngrams"),
    ),
    *_group("prefix_constrained", ("prefix_constrained", f"{_TRIE}.{_SCORES}", "processors:prefix_constrained")),
    *_of_seamless("seamless_m4t", "SeamlessM4T"),
    *_of_seamless("seamless_m4t_v2", "SeamlessM4Tv2"),
    *(patch for name, model, target, ours in _ALONE for patch in _of_model(name, model, (name, target, ours))),
    *_of_model(
        "prophetnet",
        "prophetnet",
        (
            "prophetnet.conditional_generation",
            "ProphetNetForConditionalGeneration.forward"
            "(self, decoder_input_ids, decoder_attention_mask, encoder_outputs, cache|past_key_values)",
            "prophetnet:conditional_generation",
        ),
        (
            "prophetnet.causal_lm",
            "ProphetNetForCausalLM.forward"
            "(self, input_ids, attention_mask, encoder_hidden_states, cache|past_key_values)",
            "prophetnet:causal_lm",
        ),
    ),
)
