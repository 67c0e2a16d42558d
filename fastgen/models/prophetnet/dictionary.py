"""BERT's vocabulary as a dictionary of fairseq.

Tests: tests/models/prophetnet/test_prophetnet.py
"""

from __future__ import annotations

from typing import Any

from fairseq.data import Dictionary

SPECIAL = {"pad": "[PAD]", "eos": "[SEP]", "unk": "[UNK]", "bos": "[CLS]"}


class BertDictionary(Dictionary):
    """The words of a file in order, including `[PAD]`, `[SEP]`, `[UNK]` and `[CLS]`, like in the authors' code.

    Sentences end with `[SEP]`. `<s>` and the other special words that fairseq adds to the front of dictionaries are
    omitted, so that numbers are BERT's.
    """

    @classmethod
    def load(cls, f: Any, add_special_symbols: bool = True) -> BertDictionary:
        """Reads a UTF-8 file with one word per line, or a word and its count (`vocab.txt`, `dict.txt`).

        Raises ValueError for an empty line, a repeated word, and a missing special word.
        """
        dictionary = cls()
        dictionary.symbols = []
        dictionary.count = []
        dictionary.indices = {}
        with open(f, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                word, count = (*line.split(), "1", "")[:2] if line.strip() else ("", "")
                if not word or word in dictionary.indices:
                    raise ValueError(f"{f}: line {number}: {word!r}: one word a line, each once")
                dictionary.add_symbol(word, int(count) if count.isdecimal() else 1)
        for name, word in SPECIAL.items():
            if word not in dictionary.indices:
                raise ValueError(f"{f}: no {word} (special words: {', '.join(SPECIAL.values())})")
            setattr(dictionary, f"{name}_word", word)
            setattr(dictionary, f"{name}_index", dictionary.indices[word])
        dictionary.nspecial = 0
        return dictionary

    def save(self, f: Any) -> None:
        """Writes all words with their counts, including the special ones."""
        keys, values = self._get_meta()
        self._save(f, zip(keys + self.symbols, values + self.count))
