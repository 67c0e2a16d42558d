"""ProphetNet ("Predicting Future N-gram for Sequence-to-Sequence Pre-training", Qi et al., 2020), for fairseq."""

import fairseq  # noqa: F401  # first: fairseq imports the modules here when its own are complete, and each of them needs it

from fastgen.models.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "model": ("NgramTransformerProphetModel",),
        "decoder": ("NgramTransformerDecoder",),
        "attention": ("NgramMultiheadAttention",),
        "dictionary": ("BertDictionary",),
        "task": ("TranslationProphetNetTask",),
        "criterion": ("NgramLanguageLoss",),
        "conversion": ("to_fairseq", "to_transformers"),
    },
)
