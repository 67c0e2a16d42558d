"""CTranslate2: BART, T5, Whisper, GPT-2 and Llama, with weights in float32 or quantised to int8.

Token i is called "t<i>", so that no tokenizer is needed. A prefix that all prompts share is its static prompt, computed
once per call.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import ctranslate2
from answer import Call, CannotError, Task, Tokens, answer
from ctranslate2.converters import TransformersConverter
from transformers import AutoConfig

NO_TIMESTAMPS = 50363  # of the Whisper of generate_cases.py


class Names:
    """What the converter asks a tokenizer for."""

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

    def of(self, rows: Tokens) -> list[list[str]]:
        return [[self.tokens[token] for token in row] for row in rows]


class Converter(TransformersConverter):
    """For a model without a tokenizer."""

    def __init__(self, task: Task, names: Names) -> None:
        super().__init__(str(task.model))
        self.names = names

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super().load_model(*args, **kwargs)
        vars(model.config).setdefault("normalize_before", False)  # asked for, and in published BARTs' files only
        return model

    def load_tokenizer(self, *args: Any, **kwargs: Any) -> Names:
        return self.names


def translate(converted: str, settings: dict[str, Any], task: Task, names: Names) -> Call:
    arguments = task.arguments
    translator = ctranslate2.Translator(converted, **settings)
    source, numbers = names.of(task.prompts()), names.get_vocab()
    options = {
        "beam_size": arguments.get("num_beams", 1),
        "no_repeat_ngram_size": arguments.get("no_repeat_ngram_size", 0),
        "min_decoding_length": 1 if arguments["eos_token_id"] is not None else arguments["max_new_tokens"],
        "max_decoding_length": arguments["max_new_tokens"],
    }

    def call() -> Tokens:
        results = translator.translate_batch(source, **options)
        return [[numbers[token] for token in result.hypotheses[0]] for result in results]

    return call


def common_prefix(prompts: list[list[str]]) -> list[str]:
    """At least the last token of each prompt is no part of it."""
    columns = zip(*(prompt[:-1] for prompt in prompts))
    return [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]


def generate(converted: str, settings: dict[str, Any], task: Task, names: Names) -> Call:
    arguments = task.arguments
    generator = ctranslate2.Generator(converted, **settings)
    prompts = names.of(task.prompts())
    shared = common_prefix(prompts) if len(prompts) > 1 else []
    prompts = [prompt[len(shared) :] for prompt in prompts]
    options = {
        "static_prompt": shared or None,
        "cache_static_prompt": False,
        "beam_size": arguments.get("num_beams", 1),
        "num_hypotheses": arguments.get("num_return_sequences", 1),
        "sampling_topk": arguments["top_k"] if arguments["do_sample"] else 1,
        "min_length": arguments["max_new_tokens"],
        "max_length": arguments["max_new_tokens"],
        "include_prompt_in_result": False,
    }

    def call() -> Tokens:
        results = generator.generate_batch(prompts, **options)
        return [tokens for result in results for tokens in result.sequences_ids]

    return call


def transcribe(converted: str, settings: dict[str, Any], task: Task, names: Names) -> Call:
    whisper = ctranslate2.models.Whisper(converted, **settings)
    features = ctranslate2.StorageView.from_array(task.inputs["input_features"].numpy())
    prompts = task.inputs["decoder_input_ids"].tolist()
    options = {
        "beam_size": task.arguments["num_beams"],
        "max_length": 2 * task.arguments["max_new_tokens"],  # Whisper generates half of it
        "suppress_tokens": [names.tokens.index(names.eos_token)],
        "suppress_blank": False,
    }

    def call() -> Tokens:
        return [result.sequences_ids[0] for result in whisper.generate(features, prompts, **options)]

    return call


WAYS = {"bart": translate, "t5": translate, "gpt2": generate, "llama": generate, "whisper": transcribe}


def load(task: Task) -> Call:
    supported = ctranslate2.get_supported_compute_types("cpu")
    if task.dtype not in supported:
        raise CannotError(f"its CPU build computes in {', '.join(sorted(supported))} on this CPU, not in {task.dtype}")
    names = Names(task)
    way = WAYS[AutoConfig.from_pretrained(task.model).model_type]
    settings = {"device": "cpu", "compute_type": task.dtype, "inter_threads": 1, "intra_threads": task.threads}
    converted = task.folder / "ctranslate2"  # in float32: quantised when it is loaded
    if not converted.exists():
        Converter(task, names).convert(str(converted))
    return way(str(converted), settings, task, names)


if __name__ == "__main__":
    answer(load, "ctranslate2")
