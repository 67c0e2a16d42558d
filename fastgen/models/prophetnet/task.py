"""ProphetNet's task: translation or summarization with BERT's vocabulary.

Tests: tests/models/prophetnet/test_prophetnet.py
"""

from __future__ import annotations

from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fastgen.models.prophetnet.dictionary import BertDictionary


@register_task("translation_prophetnet", dataclass=TranslationConfig)
class TranslationProphetNetTask(TranslationTask):
    """fairseq's `translation`, whose dictionaries are BERT vocabularies; arguments and data folders are the same."""

    @classmethod
    def load_dictionary(cls, filename: str) -> BertDictionary:
        return BertDictionary.load(filename)

    @classmethod
    def build_dictionary(cls, filenames: Any, **kwargs: Any) -> BertDictionary:
        raise ValueError("translation_prophetnet: --srcdict FILE with BERT's vocabulary, which is not made from data")
