"""A model of CTranslate2, converted from one of transformers that has no tokenizer: token i is called "t<i>"."""

from __future__ import annotations

from typing import Any

from answer import Task, Tokens
from ctranslate2.converters import TransformersConverter
from transformers import AutoConfig

NO_TIMESTAMPS = 50363  # of the Whisper of calls.py


class Names:
    """A stand-in for the tokenizer that the converter needs."""

    def __init__(self, task: Task) -> None:
        config = AutoConfig.from_pretrained(task.model)
        end, padding = config.eos_token_id, config.pad_token_id
        self.tokens = [f"t{token}" for token in range(config.vocab_size)]
        if config.model_type == "whisper":  # CTranslate2 knows these by their names
            self.tokens[end], self.tokens[config.decoder_start_token_id] = "<|endoftext|>", "<|startoftranscript|>"
            self.tokens[NO_TIMESTAMPS] = "<|notimestamps|>"
        self.eos_token, self.pad_token, self.unk_token = self.tokens[end], self.tokens[padding], self.tokens[-1]
        self.bos_token = self.tokens[getattr(config, "bos_token_id", padding)]  # T5 has none

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def convert_ids_to_tokens(self, number: int) -> str:
        return self.tokens[number]

    def rows(self, rows: Tokens) -> list[list[str]]:
        return [[self.tokens[token] for token in row] for row in rows]


class Converter(TransformersConverter):
    """A converter of models without a tokenizer."""

    def __init__(self, task: Task, names: Names) -> None:
        super().__init__(str(task.model))
        self.names = names

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super().load_model(*args, **kwargs)
        vars(model.config).setdefault("normalize_before", False)  # as files of published BARTs say
        return model

    def load_tokenizer(self, *args: Any, **kwargs: Any) -> Names:
        return self.names


def convert(task: Task, names: Names) -> str:
    """Returns the folder of the model in float32; it is quantized when it is loaded."""
    converted = task.folder / "ctranslate2"
    if not converted.exists():
        Converter(task, names).convert(str(converted))
    return str(converted)
