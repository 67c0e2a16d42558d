"""A tokenizer for models with random weights: a word is a token, after three special ones."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}  # 0, 1, 2


def word_tokenizer(vocabulary_size: int, **options: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the words `w0`, `w1`, …; options: of `PreTrainedTokenizerFast`."""
    words = [*SPECIAL_TOKENS.values(), *(f"w{number}" for number in range(vocabulary_size - len(SPECIAL_TOKENS)))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS, **options)
