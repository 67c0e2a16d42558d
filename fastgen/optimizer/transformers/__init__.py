"""What makes Hugging Face transformers faster, as data; the replacements are imported when they are first called."""

from fastgen.patching import Patch

_TESTED = ("5.0.0", "5.23.0")

PATCHES = (
    Patch(
        "transformers.generate",
        "transformers.generation.utils:GenerationMixin.generate",
        "fastgen.optimizer.transformers.generate:generate",
        tested=_TESTED,
        parameters=("self",),
        group="transformers.shared_caches",
    ),
    Patch(
        "transformers.prefill",
        "transformers.generation.utils:GenerationMixin._prefill",
        "fastgen.optimizer.transformers.prefill:prefill",
        tested=_TESTED,
        parameters=("self", "input_ids", "generation_config", "model_kwargs"),
        group="transformers.shared_caches",
    ),
    Patch(
        "transformers.new_gelu",
        "transformers.activations:NewGELUActivation.forward",
        "fastgen.optimizer.transformers.activations:new_gelu",
        tested=_TESTED,
        parameters=("self", "input"),
        group="transformers.activations",
    ),
)
