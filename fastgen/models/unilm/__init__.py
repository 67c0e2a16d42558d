"""UniLM (Dong et al. 2019, "Unified Language Model Pre-training", arXiv:1905.03197), for transformers."""

from fastgen.models.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "configuration": ("UniLMConfig",),
        "masks": ("KINDS", "attention_masks"),
        "modeling": ("UniLMForConditionalGeneration",),
        "published": ("Published", "load_published"),
        "training": ("masked_target_batch",),
    },
)
