"""Calls as people make them: what each gains, whether outputs are equal, and the first reason why it gains no more.

Llama-like models of 6 layers of width 512 with random weights, a prompt of 256 tokens, 32 new tokens. Stock and fastgen
run in turns on one thread, without drafts, and what counts is CPU time. Outputs are compared with all that is returned:
tokens exactly, scores to 1e-4.

    Case        arguments of `generate`, and the settings that make the call of it
    setting     a function that changes the `Program`: another model, other inputs, something around the call
    Program     the model, its inputs, the arguments; `run` is the call
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from calls import GREEDY, Call, beams, make_inputs, make_model, samples
from measure import Options, compare
from transformers import DynamicCache, StoppingCriteria
from transformers.models.llama import modeling_llama
from word_tokenizer import word_tokenizer

import fastgen
from fastgen.testing import configured

TOLERANCE = 1e-4  # of scores and logits
KEPT = 7 / 8  # of a chat's tokens are in the cache that the caller passes

BEAMS, SAMPLES = beams(4), samples(8)
WITH_SCORES = {"return_dict_in_generate": True, "output_scores": True}


class Program:
    """The call of a case. Settings change its attributes.

    arguments: of each call. fresh: returns arguments that are made for each call, such as a cache. around: a context
    for each call. call: what is called instead of the model's `generate`, if anything is.
    """

    def __init__(self, case: Case, options: Options) -> None:
        self.length = case.length
        self.model = make_model(case.model).to(device=options.device, dtype=options.torch_dtype)
        shape = Call(case.model, case.prompts, case.length, GREEDY, copies=case.copies)
        torch.manual_seed(1)
        self.inputs: dict[str, Any] = {name: x.to(options.device) for name, x in make_inputs(shape, self.model).items()}
        self.arguments = {"max_new_tokens": case.new_tokens, "eos_token_id": None, **case.arguments}
        self.fresh: Callable[[], dict[str, Any]] = dict
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.call: Callable[[], Any] = self.generate
        for setting in case.settings:
            setting(self)

    def generate(self) -> Any:
        return self.model.generate(**self.inputs, **self.arguments, **self.fresh())

    def run(self) -> Any:
        with self.around():
            return self.call()

    @property
    def tokenizer(self) -> Any:
        return word_tokenizer(self.model.config.vocab_size)


Setting = Callable[[Program], None]


@dataclass(frozen=True)
class Case:
    """A call: arguments of `generate`, and settings, applied in their order.

    workload: in words. copies: equal rows of each prompt. model: a key of `calls.MODELS`.
    """

    workload: str
    arguments: dict[str, Any]
    settings: tuple[Setting, ...] = ()
    prompts: int = 1
    copies: int = 1
    model: str = "llama-512"
    length: int = 256
    new_tokens: int = 32


# What programs pass.


class Never(StoppingCriteria):
    """A criterion of a program, which ends no row."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def criterion(program: Program) -> None:
    program.arguments["stopping_criteria"] = [Never()]


def stop_strings(program: Program) -> None:
    tokenizer = program.tokenizer
    tokenizer.add_tokens("abcdef")  # the library puts this word before each token, to read the token's text
    program.arguments |= {"stop_strings": ["w1 w1 w1 w1"], "tokenizer": tokenizer}


def streamer(program: Program) -> None:
    tokenizer = program.tokenizer
    program.fresh = lambda: {"streamer": transformers.TextIteratorStreamer(tokenizer)}


def embeddings(program: Program) -> None:
    with torch.no_grad():
        embedded = program.model.get_input_embeddings()(program.inputs.pop("input_ids"))
    program.inputs["inputs_embeds"] = embedded


def cache(program: Program) -> None:
    """The call continues a chat, whose first tokens are in the caller's cache; equal rows for all beams."""
    filled = DynamicCache(config=program.model.config)
    with torch.no_grad(), fastgen.disabled():
        program.model(program.inputs["input_ids"][:, : int(program.length * KEPT)], past_key_values=filled)
    filled.batch_repeat_interleave(program.arguments.get("num_beams", 1))
    program.fresh = lambda: {"past_key_values": copy.deepcopy(filled)}


def assistant(program: Program) -> None:
    small = copy.deepcopy(program.model)
    small.config.num_hidden_layers = 1
    del small.model.layers[1:]
    program.arguments["assistant_model"] = small


def pipeline(program: Program) -> None:
    tokenizer = program.tokenizer
    texts = tokenizer.batch_decode(program.inputs["input_ids"])
    generator = transformers.pipeline(
        "text-generation", model=program.model, tokenizer=tokenizer, batch_size=len(texts)
    )
    program.call = partial(generator, texts, return_tensors=True, **program.arguments)


# What programs do with models.


def prepared(program: Program) -> None:
    """The model is one that accelerate has prepared with mixed precision, as trainers do."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    program.model = accelerator.prepare_model(program.model, evaluation_mode=True)


def autocast(program: Program) -> None:
    program.around = partial(torch.autocast, "cpu", torch.bfloat16)


def adapter(program: Program) -> None:
    from peft import LoraConfig, get_peft_model

    program.model = get_peft_model(program.model, LoraConfig(r=8, target_modules="all-linear")).eval()


def checkpointing(program: Program) -> None:
    program.model.gradient_checkpointing_enable()


def training(program: Program) -> None:
    program.model.train()


def dispatched(program: Program) -> None:
    """The model has the hooks of `device_map`, which move the inputs of each layer."""
    from accelerate import dispatch_model

    program.model = dispatch_model(program.model, device_map={"": "cpu"}, force_hooks=True)


def int8(program: Program) -> None:
    program.model = torch.ao.quantization.quantize_dynamic(program.model, {torch.nn.Linear}, dtype=torch.qint8)


def local_code(program: Program) -> None:
    """The model's class is in its folder, in a file as those of the hub are: the library's, with other imports."""
    source = inspect.getsource(modeling_llama)
    source = re.sub(r"^from \.\.\.(?=\w)", "from transformers.", source, flags=re.MULTILINE)
    source = re.sub(r"^from \.\.\.", "from transformers", source, flags=re.MULTILINE)
    source = re.sub(r"^from \.(?=\w)", "from transformers.models.llama.", source, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        program.model.save_pretrained(folder)
        Path(folder, "modeling_local.py").write_text(source, encoding="utf-8")
        path = Path(folder, "config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_local.LlamaForCausalLM"}
        path.write_text(json.dumps(config), encoding="utf-8")
        kind = transformers.AutoModelForCausalLM
        program.model = kind.from_pretrained(folder, trust_remote_code=True, dtype=program.model.dtype).eval()


CASES = {
    "reach": {
        "greedy": Case("greedy", GREEDY),
        "beam4": Case("beam 4", BEAMS),
        "samples8": Case("8 samples", SAMPLES),
        "beam4-dict": Case("beam 4, `return_dict_in_generate`", BEAMS | {"return_dict_in_generate": True}),
        "beam4-scores": Case("beam 4, `output_scores`", BEAMS | WITH_SCORES),
        "samples8-scores": Case("8 samples, `output_scores`", SAMPLES | WITH_SCORES),
        "greedy-dict": Case("greedy, `output_scores`", GREEDY | WITH_SCORES),
        "sampled-beams": Case("beam 4 with `do_sample`", BEAMS | {"do_sample": True}),
        "beam4-criterion": Case("beam 4, a stopping criterion of your own", BEAMS, (criterion,)),
        "beam4-stop-strings": Case("beam 4, `stop_strings`", BEAMS, (stop_strings,)),
        "greedy-streamer": Case("greedy, a streamer", GREEDY, (streamer,)),
        "greedy-chat": Case("greedy, a `DynamicCache` with 448 of 512 tokens", GREEDY, (cache,), length=512),
        "beam4-chat": Case("beam 4, a `DynamicCache` of equal rows", BEAMS, (cache,), length=512),
        "beam4-static": Case('beam 4, `cache_implementation="static"`', BEAMS | {"cache_implementation": "static"}),
        "samples8-embeds": Case("8 samples, `inputs_embeds`", SAMPLES, (embeddings,)),
        "samples8-guidance": Case("8 samples, `guidance_scale`", SAMPLES | {"guidance_scale": 1.5}),
        "greedy-assisted": Case("greedy, `assistant_model`", GREEDY, (assistant,)),
        "beam4-pipeline": Case('`pipeline("text-generation")`, 2 texts, beam 4', BEAMS, (pipeline,), prompts=2),
        "samples8-rows": Case("8 equal rows, sampled", samples(1), copies=8),
        "samples8-bf16": Case("8 samples, a model that accelerate prepared with bf16", SAMPLES, (prepared,)),
        "greedy-bf16": Case("greedy, a model that accelerate prepared with bf16", GREEDY, (prepared,)),
        "samples8-autocast": Case("8 samples under `torch.autocast`", SAMPLES, (autocast,)),
        "greedy-autocast": Case("greedy under `torch.autocast`", GREEDY, (autocast,)),
        "samples8-lora": Case("8 samples, LoRA of PEFT", SAMPLES, (adapter,)),
        "samples8-lora-bf16": Case("8 samples, LoRA, prepared with bf16, as TRL does", SAMPLES, (adapter, prepared)),
        "samples8-checkpointing": Case("8 samples, gradient checkpointing, `eval()`", SAMPLES, (checkpointing,)),
        "samples8-training": Case("8 samples, gradient checkpointing, `train()`", SAMPLES, (checkpointing, training)),
        "samples8-dispatched": Case("8 samples, `device_map` with accelerate's hooks", SAMPLES, (dispatched,)),
        "samples8-int8": Case("8 samples, int8 by `quantize_dynamic`", SAMPLES, (int8,)),
        "beam4-local-code": Case("beam 4, a class with `trust_remote_code`", BEAMS, (local_code,)),
        "samples8-gemma3": Case("8 samples, Gemma 3, windows of 128", SAMPLES, model="gemma3-512"),
        "samples8-mistral": Case("8 samples, Mistral, a window of 128", SAMPLES, model="mistral-512"),
        "samples8-qwen3-next": Case("8 samples, Qwen3-Next", SAMPLES, model="qwen3-next-512"),
    }
}


def are_equal(stock: Any, fast: Any) -> bool:
    """Returns whether outputs are equal: tokens exactly, scores to `TOLERANCE`, caches not compared."""
    if isinstance(stock, Mapping):
        names = stock.keys() - {"past_key_values"}
        return stock.keys() == fast.keys() and all(are_equal(stock[name], fast[name]) for name in names)
    if isinstance(stock, list | tuple):
        return len(stock) == len(fast) and all(map(are_equal, stock, fast))
    if not isinstance(stock, torch.Tensor) or not stock.is_floating_point():
        return torch.equal(stock, fast) if isinstance(stock, torch.Tensor) else stock == fast
    return stock.shape == fast.shape and torch.allclose(stock, fast, rtol=0, atol=TOLERANCE)


def measure(kind: str, name: str, case: Case, options: Options) -> dict[str, Any]:
    """Returns the figures of a case, and the first reason of fastgen that is no decision."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        program = Program(case, options)
        fast, stock = configured(drafts="off")(program.run), fastgen.disabled()(program.run)
        fast()  # compares a class that no test has seen
        result, _ = compare({"fastgen": fast, "stock": stock}, replace(options, cpu_time=True), are_equal)
    finally:
        torch.set_num_threads(threads)
    reasons = [reason for reason in fastgen.explain().as_dict()["reasons"] if not reason["decision"]]
    return {"case": name, "workload": case.workload, "dtype": options.dtype, **result, "reason": (reasons or [None])[0]}
