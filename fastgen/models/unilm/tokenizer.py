"""AutoTokenizer takes BERT's tokenizer for UniLM."""

from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from fastgen.models.unilm.configuration import UniLMConfig

TOKENIZER_MAPPING_NAMES.setdefault(UniLMConfig.model_type, TOKENIZER_MAPPING_NAMES["bert"])
