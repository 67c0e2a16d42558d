"""CTranslate2: BART, T5, Whisper, GPT-2 and Llama. A prefix that all prompts share is its static prompt."""

from __future__ import annotations

from typing import Any

import ctranslate2
from answer import Call, CannotError, Task, Tokens, answer
from ctranslate2_model import Names, convert
from transformers import AutoConfig


def translate(model: str, settings: dict[str, Any], task: Task, names: Names) -> Call:
    translator, source = ctranslate2.Translator(model, **settings), names.rows(task.prompts())
    numbers, arguments, new = names.get_vocab(), task.arguments, task.arguments["max_new_tokens"]
    search = {"beam_size": arguments["num_beams"], "no_repeat_ngram_size": arguments["no_repeat_ngram_size"]}
    search |= {"min_decoding_length": new if arguments["eos_token_id"] is None else 1, "max_decoding_length": new}

    def call() -> Tokens:
        results = translator.translate_batch(source, **search)
        return [[numbers[token] for token in result.hypotheses[0]] for result in results]

    return call


def generate(model: str, settings: dict[str, Any], task: Task, names: Names) -> Call:
    generator, arguments, length = ctranslate2.Generator(model, **settings), task.arguments, task.common_length()
    shared, *prompts = names.rows([task.prompts()[0][:length], *(prompt[length:] for prompt in task.prompts())])
    search = {"beam_size": arguments["num_beams"], "num_hypotheses": arguments["num_return_sequences"]}
    search |= {"sampling_topk": arguments["top_k"] if arguments["do_sample"] else 1, "include_prompt_in_result": False}
    search |= dict.fromkeys(("min_length", "max_length"), arguments["max_new_tokens"])
    search |= {"static_prompt": shared or None, "cache_static_prompt": False}
    return lambda: [row for result in generator.generate_batch(prompts, **search) for row in result.sequences_ids]


def transcribe(model: str, settings: dict[str, Any], task: Task, names: Names) -> Call:
    whisper, prompts = ctranslate2.models.Whisper(model, **settings), task.inputs["decoder_input_ids"].tolist()
    features = ctranslate2.StorageView.from_array(task.inputs["input_features"].numpy())
    search = {"suppress_tokens": [names.tokens.index(names.eos_token)], "suppress_blank": False}
    search |= {"beam_size": task.arguments["num_beams"]}
    search |= {"max_length": 2 * task.arguments["max_new_tokens"]}  # Whisper generates half of it
    return lambda: [result.sequences_ids[0] for result in whisper.generate(features, prompts, **search)]


WAYS = {"bart": translate, "t5": translate, "gpt2": generate, "llama": generate, "whisper": transcribe}


def load(task: Task) -> Call:
    supported = ctranslate2.get_supported_compute_types("cpu")
    if task.dtype not in supported:
        raise CannotError(f"its CPU build computes in {', '.join(sorted(supported))} on this CPU, not in {task.dtype}")
    names, settings = Names(task), {"compute_type": task.dtype, "inter_threads": 1, "intra_threads": task.threads}
    way = WAYS[AutoConfig.from_pretrained(task.model).model_type]
    return way(convert(task, names), {"device": "cpu", **settings}, task, names)


if __name__ == "__main__":
    answer(load, "ctranslate2")
