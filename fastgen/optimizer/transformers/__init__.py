"""What makes Hugging Face transformers faster, as data; the replacements are imported when they are first called."""

from fastgen.optimizer.tested import TESTED
from fastgen.patching import Patch

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
)
