"""Multi-query Transformers ("Fast Transformer Decoding: One Write-Head is All You Need"), for transformers."""

from fastgen.models.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "configuration": ("MQATransformerConfig",),
        "grouped_configuration": ("GroupedBartConfig", "GroupedT5Config"),
        "modeling": (
            "MQATransformerForCausalLM",
            "MQATransformerForConditionalGeneration",
            "MQATransformerModel",
        ),
        "grouped": (
            "GroupedBartForConditionalGeneration",
            "GroupedT5ForConditionalGeneration",
        ),
        "pooling": ("pool_kv_heads",),
    },
)
