"""Registers BERT's tokenizer for UniLM with AutoTokenizer."""

from transformers import AutoTokenizer, BertTokenizerFast

from fastgen.models.unilm.configuration import UniLMConfig

AutoTokenizer.register(UniLMConfig, fast_tokenizer_class=BertTokenizerFast, exist_ok=True)
