"""CTranslate2 with a model's own weights, to be measured beside it: fp32, the threads of torch, the same lengths.

Weights go from the live model into CTranslate2's converter; token i is called "t<i>", so that no tokenizer is needed.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

Tokens = list[list[int]]
Call = Callable[[], Tokens]
SETTINGS = {"device": "cpu", "compute_type": "float32", "inter_threads": 1}


def installed() -> bool:
    return importlib.util.find_spec("ctranslate2") is not None


class _Names:
    """What the converter asks a tokenizer for."""

    def __init__(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
        config = model.config
        self.tokens = [f"t{token}" for token in range(config.vocab_size)]
        if config.model_type == "whisper":  # CTranslate2 knows these by their names
            self.tokens[config.eos_token_id] = "<|endoftext|>"
            start, no_timestamps = inputs["decoder_input_ids"][0].tolist()
            self.tokens[start], self.tokens[no_timestamps] = "<|startoftranscript|>", "<|notimestamps|>"
        self.eos_token = self.tokens[config.eos_token_id]
        self.pad_token = self.tokens[config.pad_token_id]
        self.bos_token = self.tokens[getattr(config, "bos_token_id", config.pad_token_id)]  # T5 has none
        self.unk_token = self.tokens[-1]

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def convert_ids_to_tokens(self, number: int) -> str:
        return self.tokens[number]


def _translate(model_folder: str, threads: int, names: _Names, inputs: dict, arguments: dict) -> Call:
    import ctranslate2

    translator = ctranslate2.Translator(model_folder, intra_threads=threads, **SETTINGS)
    source, numbers = _named(inputs, names), names.get_vocab()
    shortest = 1 if arguments["eos_token_id"] is not None else arguments["max_new_tokens"]
    options = {
        "beam_size": arguments.get("num_beams", 1),
        "no_repeat_ngram_size": arguments.get("no_repeat_ngram_size", 0),
        "min_decoding_length": shortest,
        "max_decoding_length": arguments["max_new_tokens"],
    }

    def call() -> Tokens:
        results = translator.translate_batch(source, **options)
        return [[numbers[token] for token in result.hypotheses[0]] for result in results]

    return call


def _generate(model_folder: str, threads: int, names: _Names, inputs: dict, arguments: dict) -> Call:
    import ctranslate2

    generator = ctranslate2.Generator(model_folder, intra_threads=threads, **SETTINGS)
    prompts = _named(inputs, names)
    options = {
        "beam_size": arguments.get("num_beams", 1),
        "num_hypotheses": arguments.get("num_return_sequences", 1),
        "sampling_topk": 0 if arguments["do_sample"] else 1,
        "min_length": arguments["max_new_tokens"],
        "max_length": arguments["max_new_tokens"],
        "include_prompt_in_result": False,
    }

    def call() -> Tokens:
        results = generator.generate_batch(prompts, **options)
        return [tokens for result in results for tokens in result.sequences_ids]

    return call


def _transcribe(model_folder: str, threads: int, names: _Names, inputs: dict, arguments: dict) -> Call:
    import ctranslate2

    whisper = ctranslate2.models.Whisper(model_folder, intra_threads=threads, **SETTINGS)
    features = ctranslate2.StorageView.from_array(inputs["input_features"].numpy())
    prompts = inputs["decoder_input_ids"].tolist()
    options = {
        "beam_size": arguments["num_beams"],
        "max_length": 2 * arguments["max_new_tokens"],  # Whisper generates half of it
        "suppress_tokens": [names.tokens.index(names.eos_token)],
        "suppress_blank": False,
    }

    def call() -> Tokens:
        return [result.sequences_ids[0] for result in whisper.generate(features, prompts, **options)]

    return call


WAYS = {"bart": _translate, "t5": _translate, "gpt2": _generate, "whisper": _transcribe}


def ctranslate2_call(model: torch.nn.Module, inputs: dict[str, torch.Tensor], arguments: dict) -> Call | None:
    """A call that generates from the same inputs with CTranslate2, or None where it has no such model here.

    arguments: those of `generate`; an eos_token_id of None forces the length to max_new_tokens. It returns the new
    tokens of each row.
    """
    way = WAYS.get(model.config.model_type)
    if way is None:
        return None
    names = _Names(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        return way(_convert(model, names, folder), torch.get_num_threads(), names, inputs, arguments)


def _convert(model: torch.nn.Module, names: _Names, folder: str) -> str:
    from ctranslate2.converters import TransformersConverter

    vars(model.config).setdefault("normalize_before", False)  # asked for, and in the files of published BARTs only
    model.config.save_pretrained(folder)
    converter = TransformersConverter(folder)
    converter.load_model = lambda *_, **__: model
    converter.load_tokenizer = lambda *_, **__: names
    return converter.convert(str(Path(folder, "converted")))


def _named(inputs: dict[str, torch.Tensor], names: _Names) -> list[list[str]]:
    """Names of the tokens of each row, without padding."""
    input_ids = inputs["input_ids"]
    masks = inputs.get("attention_mask", torch.ones_like(input_ids)).bool()
    return [[names.tokens[token] for token in row[mask].tolist()] for row, mask in zip(input_ids, masks)]
