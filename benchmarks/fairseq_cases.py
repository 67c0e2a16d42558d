"""Calls of fairseq's generator, on random weights of real size.

Scores of all hypotheses have to agree to 1e-4, so that hypotheses with other tokens are ties; those with equal tokens
are counted. Stock fairseq's n-gram blocking blocks nothing on a CPU, as it compares with the end of the padded buffer:
the outputs of "ngram3" are not comparable there, and the cases without it compare tokens.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from measure import Options, compare, with_and_without


@dataclass(frozen=True)
class Case:
    """A model of MODELS, inputs of `rows` times `length` words, and flags of `fairseq-generate`.

    prefix: words are what a language model resumes. new_tokens: of each hypothesis.
    """

    model: str
    rows: int
    length: int
    flags: dict[str, Any] = field(default_factory=dict)
    prefix: bool = False
    new_tokens: int = 32

    @property
    def workload(self) -> str:
        """Returns the case in words."""
        blocking = f", n-gram {self.flags['no_repeat_ngram_size']}" if "no_repeat_ngram_size" in self.flags else ""
        return f"{self.model}, {self.rows} × {self.length} tokens, beam {self.flags['beam']}{blocking}"

    def is_comparable(self, device: str) -> bool:
        return device == "cuda" or not self.flags.get("no_repeat_ngram_size")


CASES = {
    "fairseq": {
        "bart-beam4": Case("bart-base", 4, 512, {"beam": 4}),
        "bart-beam4-ngram3": Case("bart-base", 4, 512, {"beam": 4, "no_repeat_ngram_size": 3}),
        "bart-batch1": Case("bart-base", 1, 512, {"beam": 4}),
        "bart-greedy-short": Case("bart-base", 1, 16, {"beam": 1}),
        "lm-beam4": Case("gpt2-small", 4, 512, {"beam": 4}, prefix=True),
        "wmt-beam5": Case("transformer-base", 16, 32, {"beam": 5}),
        "prophetnet-beam5": Case("prophetnet-large", 2, 256, {"beam": 5}),
        # Table 1 of FastSeq, with five of calls.py.
        "table1-prophetnet": Case("prophetnet-large", 2, 256, {"beam": 4}, new_tokens=16),
        "table1-wmt": Case("transformer-big", 16, 32, {"beam": 4}, new_tokens=24),
    },
}
_POSITIONS = {"max_source_positions": 1024, "max_target_positions": 1024}
# Words of the vocabulary, architecture, and settings of it.
MODELS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "bart-base": (50265, "bart_base", _POSITIONS),
    "transformer-base": (32768, "transformer_wmt_en_de", {"share_all_embeddings": True}),
    "transformer-big": (32768, "transformer_vaswani_wmt_en_de_big", {"share_all_embeddings": True}),
    "prophetnet-large": (30522, "ngram_transformer_prophet_large", {}),
    "gpt2-small": (
        50257,
        "transformer_lm",
        {
            "decoder_embed_dim": 768,
            "decoder_input_dim": 768,
            "decoder_output_dim": 768,
            "decoder_ffn_embed_dim": 3072,
            "decoder_layers": 12,
            "decoder_attention_heads": 12,
            "share_decoder_input_output_embed": True,
            "activation_fn": "gelu",
            "decoder_learned_pos": True,
            "tokens_per_sample": 1024,
            "max_target_positions": 1024,
            "decoder_normalize_before": True,
        },
    ),
}


def make_model(name: str) -> tuple[Any, torch.nn.Module]:
    """Returns a task and its model."""
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig
    from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    size, arch, settings = MODELS[name]
    words = Dictionary()
    for number in range(size - len(words)):
        words.add_symbol(f"w{number}")
    if arch == "transformer_lm":
        task: Any = LanguageModelingTask(LanguageModelingConfig(), words)
        settings = vars(TransformerLanguageModelConfig()) | settings
    else:
        task = TranslationTask(TranslationConfig(), words, words)
    args = Namespace(arch=arch, **settings)
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(0)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task).eval()
    with torch.no_grad():  # equal words give equal scores otherwise, and rounding would decide between them
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return task, model


def make_call(case: Case, options: Options) -> Callable[[], list]:
    """Returns a function that generates: the hypotheses of each input."""
    task, model = make_model(case.model)
    model = model.to(device=options.device, dtype=options.torch_dtype)
    words = torch.randint(10, len(task.target_dictionary), (case.rows, case.length), device=options.device)
    words[:, 0 if case.prefix else -1] = task.target_dictionary.eos()
    length = case.new_tokens + (case.length if case.prefix else 0)  # random weights never end before they have to
    flags = {"max_len_a": 0, "max_len_b": length, "min_len": length, **case.flags}
    generator = task.build_generator([model], Namespace(**flags))
    lengths = torch.full((case.rows,), case.length, device=options.device)
    sample = {"id": torch.arange(case.rows), "net_input": {"src_tokens": words, "src_lengths": lengths}}
    return partial(task.inference_step, generator, [model], sample)


def equal_hypotheses(stock: list, fast: list) -> tuple[int, int, bool]:
    """Returns how many hypotheses have the same tokens, of how many, and whether all scores agree to 1e-4."""
    pairs = [pair for rows in zip(stock, fast, strict=True) for pair in zip(*rows, strict=True)]
    agree = all(torch.allclose(a["score"], b["score"], atol=1e-4, rtol=1e-4) for a, b in pairs)
    return sum(torch.equal(a["tokens"], b["tokens"]) for a, b in pairs), len(pairs), agree


def measure(kind: str, name: str, case: Case, options: Options) -> dict[str, Any]:
    is_comparable = case.is_comparable(options.device)

    def are_equal(stock: list, fast: list) -> bool:
        return not is_comparable or equal_hypotheses(stock, fast)[2]

    ways = with_and_without(make_call(case, options))
    repeats = options.repeats * (4 if case.rows == 1 else 1)
    result, returned = compare(ways, options, are_equal, repeats=repeats)
    same, hypotheses, _ = equal_hypotheses(returned["stock"], returned["fastgen"])
    tokens = f"{same} of {hypotheses}" if is_comparable else "not comparable"
    return {"case": name, "inputs": case.rows, **result, "tokens": tokens}
