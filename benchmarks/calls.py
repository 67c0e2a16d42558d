"""Calls of transformers' `generate`, as rows of a table: a model, the shape of its inputs, arguments.

Models have real sizes and random weights, but for "demo", the trained model inside the package. Outputs are compared in
each turn, from the same seed. `constrained` rows choose among a closed set of outputs: stock by a trie of dictionaries,
fastgen by its `PrefixTrie`; there scores have to agree to 1e-4, and equal rows are counted, because among hundreds of
beams some differ by less than rounding.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any

import peers
import torch
from measure import Options, Tokens, UsageError, Ways, compare

import fastgen
from fastgen.models.demo import demo_path, sample_path
from fastgen.testing import configured

Inputs = dict[str, torch.Tensor]
NO_TIMESTAMPS = 50363  # of Whisper; without it CTranslate2 applies rules for timestamps
FRAMES_PER_SECOND = 100
FIRST_WORD = 10  # special tokens come before


@dataclass(frozen=True)
class Model:
    """A class, and the sizes of its configuration that are not the defaults. title: in words.

    is_half: whether its weights are too large for float32.
    """

    kind: str
    sizes: dict[str, Any] = field(default_factory=dict)
    title: str = ""
    is_half: bool = False

    def make(self, dtype: torch.dtype = torch.float32) -> Any:
        """Returns the model for inference, with the same random weights in each call, drawn in `dtype`."""
        if self.is_half and dtype is torch.float32:
            raise UsageError(f"--dtype float32: the weights of {self.title} would take 32 GB (accepted: bfloat16)")
        kind = resolve_name(self.kind)
        torch.manual_seed(0)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return kind(kind.config_class(**self.sizes)).eval()
        finally:
            torch.set_default_dtype(usual)


def both_ends(**sizes: int) -> dict[str, int]:
    """Returns the same sizes for an encoder and a decoder."""
    return {f"{end}_{name}": size for end in ("encoder", "decoder") for name, size in sizes.items()}


def widths(hidden_size: int, intermediate_size: int) -> dict[str, int]:
    return {"hidden_size": hidden_size, "intermediate_size": intermediate_size}


# The decoder begins with padding, because random weights repeat any other token, even the end token.
BART = {"forced_eos_token_id": None, "decoder_start_token_id": 1}
BART_BASE = {"vocab_size": 50265, "d_model": 768, **both_ends(layers=6, attention_heads=12, ffn_dim=3072)}
T5_BASE = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
WHISPER_TINY = {"vocab_size": 51865, "d_model": 384, **both_ends(layers=4, attention_heads=6, ffn_dim=1536)}
NOT_SUPPRESSED = {"suppress_tokens": None, "begin_suppress_tokens": None}
GROUPED = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 3, "num_hidden_layers": 8}
LLAMA = {"vocab_size": 32000, "intermediate_size": 2048, "pad_token_id": 0}
QWEN = {"vocab_size": 151_936, "intermediate_size": 3072, "tie_word_embeddings": True}
# Of width 512 and 6 layers, for calls as people make them (reach.py).
WIDTH512 = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
WIDTH512 |= {"num_key_value_heads": 4, "vocab_size": 8000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LINEAR512 = {"head_dim": 64, "num_experts": 4, "mlp_only_layers": [*range(8)], "num_hidden_layers": 8}
PROPHETNET = {"hidden_size": 1024, **both_ends(ffn_dim=4096), "num_encoder_layers": 12, "num_decoder_layers": 12}
NLLB = {"vocab_size": 256_206, "decoder_start_token_id": 1, "forced_eos_token_id": None}
WHISPER_SMALL = {"vocab_size": 51865, "d_model": 768, **both_ends(layers=12, attention_heads=12, ffn_dim=3072)}
WHISPER_LARGE = {"vocab_size": 51866, "d_model": 1280, **both_ends(layers=32, attention_heads=20, ffn_dim=5120)}
WHISPER_LARGE |= {"num_mel_bins": 128}
QWEN3 = {"vocab_size": 151_936, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "tie_word_embeddings": True, "pad_token_id": 0}
LLAMA_8B = {"vocab_size": 128_256, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B |= {"pad_token_id": 0}
_BART, _WHISPER = "transformers:BartForConditionalGeneration", "transformers:WhisperForConditionalGeneration"
MODELS = {
    "bart-base": Model(_BART, BART_BASE | BART, "BART-base"),
    "bart-large": Model(_BART, BART, "BART-large"),
    "distilbart": Model(_BART, BART | {"decoder_layers": 6}, "DistilBART"),
    "t5-base": Model("transformers:T5ForConditionalGeneration", T5_BASE | {"decoder_start_token_id": 0}, "T5-base"),
    "whisper-tiny": Model(_WHISPER, WHISPER_TINY | NOT_SUPPRESSED, "Whisper-tiny"),
    "gpt2-small": Model("transformers:GPT2LMHeadModel", {"pad_token_id": 50256}, "GPT-2-small"),
    "llama-like": Model("transformers:LlamaForCausalLM", GROUPED | LLAMA, "Llama-like"),
    "qwen-like": Model("transformers:Qwen2ForCausalLM", GROUPED | QWEN, "Qwen-like"),
    "unilm-base": Model("fastgen.models.unilm:UniLMForConditionalGeneration", title="UniLM-base"),
    "prophetnet-large": Model("transformers:ProphetNetForConditionalGeneration", PROPHETNET, "ProphetNet-large"),
    "llama-512": Model("transformers:LlamaForCausalLM", WIDTH512, "Llama-like"),
    "gemma3-512": Model(
        "transformers:Gemma3ForCausalLM", WIDTH512 | {"head_dim": 64, "sliding_window": 128}, "Gemma 3-like"
    ),
    "mistral-512": Model("transformers:MistralForCausalLM", WIDTH512 | {"sliding_window": 128}, "Mistral-like"),
    "qwen3-next-512": Model("transformers:Qwen3NextForCausalLM", WIDTH512 | LINEAR512, "Qwen3-Next-like"),
    # As published, at full depth and width.
    "bart-large-cnn": Model(_BART, BART, "BART-large-CNN"),
    "nllb-600m": Model("transformers:M2M100ForConditionalGeneration", NLLB, "NLLB-200-distilled-600M"),
    "whisper-small": Model(_WHISPER, WHISPER_SMALL | NOT_SUPPRESSED, "Whisper-small"),
    "whisper-large-v3": Model(_WHISPER, WHISPER_LARGE | NOT_SUPPRESSED, "Whisper-large-v3"),
    "qwen3-0.6b": Model("transformers:Qwen3ForCausalLM", QWEN3 | widths(1024, 3072), "Qwen3-0.6B"),
    "qwen3-1.7b": Model("transformers:Qwen3ForCausalLM", QWEN3 | widths(2048, 6144), "Qwen3-1.7B"),
    "llama-8b": Model("transformers:LlamaForCausalLM", LLAMA_8B | widths(4096, 14336), "Llama-3.1-8B", True),
    "demo": Model("", title="the demo model"),
}


@dataclass(frozen=True)
class Call:
    """One call of `generate`, in which 32 new tokens are the default, and forced if no eos_token_id is named.

    rows, length: of the inputs, in tokens or, of recordings, seconds. prefix: tokens before these that all inputs have
    in common. copies: equal rows of each input. padding: tokens of the second input. is_trained: in training mode, and
    all weights change after each turn. reuses: whether each input is a call of its own, and all are inside of
    `fastgen.reusing_prefix`. stock: arguments of stock alone, with which outputs are not compared. outputs:
    the closed set of `constrained` rows.
    """

    model: str
    rows: int
    length: int
    arguments: dict[str, Any]
    prefix: int = 0
    copies: int = 1
    padding: int = 0
    is_trained: bool = False
    reuses: bool = False
    stock: dict[str, Any] = field(default_factory=dict)
    outputs: str = ""

    @property
    def workload(self) -> str:
        """Returns the case in words."""
        arguments, size = self.arguments, f"{self.rows} × {self.length + self.prefix:,} "
        size += "s" if "whisper" in self.model else "tokens"
        returned = arguments.get("num_return_sequences", 1)
        words = [MODELS[self.model].title, f"{self.rows} lines" if self.model == "demo" else size]
        words += [f"{self.prefix:,} of them in common"] * bool(self.prefix)
        words += [f"{self.copies} rows each, in training mode"] * self.is_trained
        words += ["in one call each, `reusing_prefix`"] * self.reuses
        words += [f"among 100,000 {self.outputs}"] * bool(self.outputs)
        words += [f"beam {arguments['num_beams']}" if "num_beams" in arguments else "greedy"] * (
            not arguments["do_sample"]
        )
        words += [f"{returned} samples each"] * (arguments["do_sample"] and returned > 1)
        words += ["n-gram 3"] * ("no_repeat_ngram_size" in arguments)
        if most := arguments.get("max_new_tokens"):
            words.append("1 new token" if most == 1 else f"up to {most} new tokens")
        return ", ".join(words)


def beams(number: int, **more: Any) -> dict[str, Any]:
    return {"num_beams": number, "do_sample": False, **more}


def samples(number: int, **more: Any) -> dict[str, Any]:
    return {"num_return_sequences": number, "do_sample": True, "top_k": 50, **more}


def all_beams(number: int, **more: Any) -> dict[str, Any]:
    return beams(number, num_return_sequences=number, pad_token_id=0, **more)


GREEDY: dict[str, Any] = {"do_sample": False}
NEW16, NEW48 = {"max_new_tokens": 16}, {"max_new_tokens": 48}
SUMMARY = beams(4, no_repeat_ngram_size=3)
SEGMENTS = beams(5, return_timestamps=True, return_segments=True, **NEW48)
IDS, NAMES = {"max_new_tokens": 4, "eos_token_id": None}, {"max_new_tokens": 13, "eos_token_id": 1}
ENDS = list(range(FIRST_WORD, 50257, 41))  # one token in 41 ends a row
CASES: dict[str, dict[str, Call]] = {
    "models": {
        "bart-large-cnn": Call("bart-large-cnn", 4, 512, SUMMARY),
        "nllb-600m": Call("nllb-600m", 4, 64, beams(5)),
        "whisper-small": Call("whisper-small", 4, 30, beams(5)),
        "whisper-large-v3": Call("whisper-large-v3", 1, 30, beams(5, **NEW16)),
        "qwen3-0.6b": Call("qwen3-0.6b", 2, 256, samples(8)),
        "qwen3-1.7b": Call("qwen3-1.7b", 1, 256, samples(8)),
        "llama-8b": Call("llama-8b", 1, 128, samples(4, **NEW16)),
    },
    "generate": {
        "bart-beam4": Call("bart-base", 4, 512, SUMMARY),
        "bart-beam4-one-row": Call("bart-base", 1, 64, beams(4)),
        "bart-beam6-long": Call("bart-base", 4, 1024, beams(6, max_new_tokens=24)),
        "bart-greedy-short": Call("bart-base", 1, 16, GREEDY),
        "t5-beam4": Call("t5-base", 8, 128, beams(4)),
        "whisper-beam5": Call("whisper-tiny", 8, 30, beams(5, **NEW48)),
        "gpt2-beam4": Call("gpt2-small", 4, 512, beams(4)),
        "gpt2-sample16": Call("gpt2-small", 4, 512, samples(16)),
        "gpt2-greedy-one-row": Call("gpt2-small", 1, 16, GREEDY | NEW48),
        "gpt2-greedy-short": Call("gpt2-small", 1, 16, GREEDY),
        "llama-beam4": Call("llama-like", 4, 512, beams(4), padding=100),
        "llama-sample16": Call("llama-like", 4, 512, samples(16), padding=100),
        "lengths-differ": Call("demo", 32, 0, beams(4, max_new_tokens=160, eos_token_id=2)),
        "recordings": Call("whisper-tiny", 2, 90, SEGMENTS),
        "prefix-greedy": Call("llama-like", 8, 32, GREEDY | NEW16, prefix=1024),
        "prefix-sample4": Call("llama-like", 8, 32, samples(4, **NEW16), prefix=1024),
        "unilm-beam5": Call("unilm-base", 4, 448, beams(5)),
        # With its cache, stock raises for most padding tokens; without it mixes up positions (docs/models.md).
        "prophetnet-beam5": Call("prophetnet-large", 2, 256, beams(5), stock={"use_cache": False}),
        "prophetnet-greedy": Call("prophetnet-large", 2, 256, GREEDY),
        # Table 1 of FastSeq, with two of fairseq_cases.py.
        "table1-bart": Call("bart-large", 4, 256, SUMMARY | NEW16),
        "table1-distilbart": Call("distilbart", 4, 256, SUMMARY | NEW16),
        "table1-t5": Call("t5-base", 8, 32, beams(4, max_new_tokens=24)),
        "table1-gpt2": Call("gpt2-small", 4, 256, SUMMARY | NEW16),
        "table1-unilm": Call("unilm-base", 4, 256, SUMMARY | NEW16),
    },
    "prefix": {
        "greedy16": Call("llama-like", 16, 32, GREEDY | NEW16, prefix=1024),
        "beams8": Call("llama-like", 8, 32, beams(4, **NEW16), prefix=1024),
        "samples8": Call("llama-like", 8, 32, samples(4, **NEW16), prefix=1024),
        "classify16": Call("gpt2-small", 16, 32, GREEDY | {"max_new_tokens": 1}, prefix=768),
        "ragged16": Call("gpt2-small", 4, 512, samples(16, max_new_tokens=64, eos_token_id=ENDS, top_k=0)),
        "short2": Call("llama-like", 2, 32, GREEDY | NEW16, prefix=16),
        "reused4": Call("llama-512", 4, 32, GREEDY | NEW16, prefix=1024, reuses=True),
    },
    "rollouts": {
        f"g{copies}": Call("llama-like", 4, 512, samples(1), copies=copies, is_trained=True) for copies in (8, 16)
    },
    "constrained": {
        **{f"ids-beam{n}": Call("qwen-like", 1, 300, all_beams(n, **IDS), outputs="ids") for n in (20, 50, 200)},
        **{f"names-beam{n}": Call("t5-base", 1, 256, all_beams(n, **NAMES), outputs="names") for n in (10, 50)},
    },
}


class Work:
    """The model of a case on its device, its inputs and arguments."""

    def __init__(self, case: Call, options: Options, model: Any = None) -> None:
        self.case = case
        self.model = make_model(case.model, options.torch_dtype) if model is None else model
        torch.manual_seed(1)
        self.inputs = make_inputs(case, self.model)
        self.arguments = {"max_new_tokens": 32, "eos_token_id": None, **case.arguments}
        if "return_timestamps" in case.arguments:
            del self.arguments["eos_token_id"]
            own = self.model.generation_config
            own.no_timestamps_token_id, own.is_multilingual, own.max_length = NO_TIMESTAMPS, False, None
        self.model = self.model.to(device=options.device, dtype=options.torch_dtype).train(case.is_trained)
        self.inputs = {
            name: x.to(options.device, options.torch_dtype if x.is_floating_point() else None)
            for name, x in self.inputs.items()
        }

    def ways(self) -> Ways:
        """Returns the ways, without drafts: random weights repeat themselves, so drafts gain more than with texts."""
        fast, stock = configured(drafts="off")(self.generate), partial(self.generate, **self.case.stock)
        return {"fastgen": fast, "stock": fastgen.disabled()(stock)}

    def generate(self, **more: Any) -> Any:
        """Returns rows of tokens, or for each recording start, end and tokens of its segments."""
        if self.case.reuses:
            with fastgen.reusing_prefix(self.model):
                return torch.cat([self.generate_row(row, **more) for row in range(self.case.rows)])
        output = self.model.generate(**self.inputs, **self.arguments, **more)
        if "return_segments" not in self.arguments:
            return output
        return [
            [(segment["start"].item(), segment["end"].item(), segment["tokens"].tolist()) for segment in recording]
            for recording in output["segments"]
        ]

    def generate_row(self, row: int, **more: Any) -> torch.Tensor:
        inputs = {name: values[row : row + 1] for name, values in self.inputs.items()}
        return self.model.generate(**inputs, **self.arguments, **more)

    def are_equal(self, stock: Any, fast: Any) -> bool:
        if self.case.stock:
            return True
        return operator.eq(stock, fast) if isinstance(stock, list) else torch.equal(stock, fast)

    def train(self) -> None:
        """Changes all weights, as a step of training does."""
        if self.case.is_trained:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.999)

    def new_tokens(self, output: Any) -> Tokens:
        """Returns the new tokens of each row, without the end token and padding."""
        if isinstance(output, torch.Tensor):
            rows, end = output[:, -self.arguments["max_new_tokens"] :].tolist(), self.arguments["eos_token_id"]
            ends = {*end} if isinstance(end, list) else {end}
            ends |= set() if end is None else {self.model.config.pad_token_id}
            return [[token for token in row if token not in ends] for row in rows]
        if "return_segments" in self.arguments and output and output[0] and isinstance(output[0][0], tuple):
            return [[token for *_, tokens in recording for token in tokens] for recording in output]
        return output  # of a peer


class ConstrainedWork(Work):
    """A case whose outputs are among a closed set."""

    OUTPUTS, CODES, PLACES, SHORTEST, LONGEST = 100_000, 256, 4, 3, 12

    def __init__(self, case: Call, options: Options) -> None:
        super().__init__(case, options)
        vocabulary, numbers, end = self.model.config.vocab_size, random.Random(0), case.arguments["eos_token_id"]
        self.ignored, self.at_dead_ends = (1, [end]) if case.outputs == "names" else (case.length, [])
        first = vocabulary - self.PLACES * self.CODES
        if case.outputs == "ids":
            self.outputs = [
                [first + place * self.CODES + numbers.randrange(self.CODES) for place in range(self.PLACES)]
                for _ in range(self.OUTPUTS)
            ]
        else:  # they often begin with the same tokens
            self.outputs = [
                [
                    FIRST_WORD + int((vocabulary - FIRST_WORD) * numbers.random() ** 3)
                    for _ in range(numbers.randint(self.SHORTEST, self.LONGEST))
                ]
                + [end]
                for _ in range(self.OUTPUTS)
            ]

    def ways(self) -> Ways:
        trie = fastgen.PrefixTrie(self.outputs, self.at_dead_ends).after(self.ignored)
        fast = partial(self.generate, prefix_allowed_tokens_fn=trie)
        stock = partial(self.generate, prefix_allowed_tokens_fn=self.by_dictionaries())
        return {"fastgen": fast, "stock": fastgen.disabled()(stock)}

    def by_dictionaries(self) -> Callable[[int, torch.Tensor], list[int]]:
        """Returns a function of allowed tokens as users write it for transformers."""
        root: dict = {}
        for output in self.outputs:
            node = root
            for token in output:
                node = node.setdefault(token, {})

        def allowed(batch_id: int, input_ids: torch.Tensor) -> list[int]:
            node = root
            for token in input_ids.tolist()[self.ignored :]:
                node = node.get(token, {})
            return list(node) or self.at_dead_ends

        return allowed

    def are_equal(self, stock: Any, fast: Any) -> bool:
        return True  # `scored` compares

    def scored(self) -> dict[str, Any]:
        """Returns how many rows of tokens are equal, and whether the scores are."""
        from fastgen.optimizer.transformers.outputs import SEQUENCES_SCORES, only_outputs

        with only_outputs(SEQUENCES_SCORES):
            outputs = {way: call(return_dict_in_generate=True, output_scores=True) for way, call in self.ways().items()}
        stock, fast = outputs["stock"], outputs["fastgen"]
        is_same_shape = stock.sequences.shape == fast.sequences.shape
        same = int((stock.sequences == fast.sequences).all(dim=1).sum()) if is_same_shape else 0
        equal = torch.allclose(stock.sequences_scores, fast.sequences_scores, rtol=0, atol=1e-4)
        return {"tokens": f"{same} of {len(stock.sequences)}", "equal": equal}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if name == "demo":
        from transformers import AutoModelForSeq2SeqLM

        return AutoModelForSeq2SeqLM.from_pretrained(demo_path()).eval()
    return MODELS[name].make(dtype)


def make_inputs(case: Call, model: Any) -> Inputs:
    """Returns the inputs of a case, drawn from torch's own random numbers."""
    if case.model == "demo":
        from transformers import AutoTokenizer

        lines = sample_path().read_text(encoding="utf-8").splitlines()[: case.rows]
        batch = AutoTokenizer.from_pretrained(demo_path())(lines, padding=True, return_tensors="pt")
        return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if model.main_input_name == "input_features":
        frames = case.length * FRAMES_PER_SECOND
        features = torch.randn(case.rows, model.config.num_mel_bins, frames)
        if "return_timestamps" in case.arguments:
            return {"input_features": features, "attention_mask": torch.ones(case.rows, frames, dtype=torch.long)}
        prompt = torch.tensor([[model.config.decoder_start_token_id, NO_TIMESTAMPS]])
        return {"input_features": features, "decoder_input_ids": prompt.repeat(case.rows, 1)}
    highest = model.config.vocab_size
    if case.outputs == "ids":
        highest -= ConstrainedWork.PLACES * ConstrainedWork.CODES
    prefix = torch.randint(FIRST_WORD, highest, (1, case.prefix)).expand(case.rows, -1)
    input_ids = torch.cat([prefix, torch.randint(FIRST_WORD, highest, (case.rows, case.length))], dim=1)
    mask = torch.ones_like(input_ids)
    input_ids[1:2, : case.padding], mask[1:2, : case.padding] = model.config.pad_token_id or 0, 0
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    return {name: x.repeat_interleave(case.copies, dim=0) for name, x in inputs.items()}


def measure(kind: str, name: str, case: Call, options: Options) -> dict[str, Any]:
    """Returns seconds and memory of all ways, whether outputs are equal, and why peers have no figure."""
    work = (ConstrainedWork if case.outputs else Work)(case, options)
    ways, reasons = work.ways(), {}
    repeats = options.repeats * (4 if kind == "generate" and case.rows == 1 else 1)  # short calls are noisy
    with ExitStack() as stack:
        added = peers.add(ways, name, work, options, stack, reasons) if options.against else {}
        result, returned = compare(ways, options, work.are_equal, work.train, reasons, repeats)
    tokens = {way: work.new_tokens(output) for way, output in returned.items() if way in ways}
    result |= {"case": name, "dtype": options.dtype, "inputs": case.rows}
    result |= {"repeats": repeats, "cpu_time": options.cpu_time, **added}
    if options.against:
        result |= {"reasons": reasons, "new_tokens": {way: sum(map(len, rows)) for way, rows in tokens.items()}}
        result["rows_equal"] = {} if case.arguments["do_sample"] else peers.rows_equal(tokens)
    if isinstance(work, ConstrainedWork):
        result |= work.scored()
    return result
