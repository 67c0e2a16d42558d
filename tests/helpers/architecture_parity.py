"""Comparisons of the models of `architectures.py` with the unpatched library, and what is shared."""

from typing import NamedTuple

import torch
import transformers
from architectures import REAL, Architecture
from parity import run_both
from reports import is_materialized

import fastgen
from fastgen.optimizer.decoding.report import Report

# Models left alone, or of which only the prefill runs once per input: their caches cannot store once per input.
LEFT_ALONE = {"minimax", "nllb-moe", "recurrent_gemma"}
ONLY_PREFILL = {"openai-gpt", "mamba", "falcon_mamba"}

MODES = {
    "beam search": {"num_beams": 3, "do_sample": False},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "sampling": {"num_beams": 1, "do_sample": True, "num_return_sequences": 4},
    "greedy": {"num_beams": 1, "do_sample": False},
}


class Parity(NamedTuple):
    tokens_equal: bool
    largest_score_difference: float
    report: Report


def shares(report: Report) -> str:
    """Returns in a few words what was shared."""
    words = {"prefill": "prefill", "cross-attention": "cross-attention", "the prompt": "prompt"}
    parts = [word for start, word in words.items() if any(item.startswith(start) for item in report.shared)]
    return (", ".join(parts) or "nothing") + (" (until materialized)" if is_materialized(report) else "")


def generate(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], mode: str, new_tokens: int = 12
) -> transformers.utils.ModelOutput:
    """Generates from the same random state in every call."""
    torch.manual_seed(1)
    return model.generate(
        **inputs, **MODES[mode], max_new_tokens=new_tokens, return_dict_in_generate=True, output_scores=True
    )


def measure(model: torch.nn.Module, inputs: dict[str, torch.Tensor], mode: str, new_tokens: int = 12) -> Parity:
    """Generates `new_tokens` tokens with and without fastgen.

    In half precision rounding decides which of two close tokens a sample cuts off: these are not compared.
    """
    both = run_both(lambda: generate(model, inputs, mode, new_tokens))
    differences = []
    for ours, theirs in zip(both.fast.scores, both.stock.scores, strict=True):
        difference = (ours.nan_to_num(neginf=-1e9) - theirs.nan_to_num(neginf=-1e9)).abs()
        if model.dtype in (torch.float16, torch.bfloat16):
            difference = difference.masked_fill(ours.isneginf() != theirs.isneginf(), 0)
        differences.append(difference.max().item())
    return Parity(torch.equal(both.fast.sequences, both.stock.sequences), max(differences), both.report)


def expected_sharing(architecture: Architecture, mode: str) -> str:
    """Returns what `shares` must return for tiny models under FASTGEN_SHARE=always."""
    if mode == "greedy":
        return "nothing"
    if architecture.id in LEFT_ALONE:
        return "nothing"
    if architecture.id in ONLY_PREFILL:
        return "prefill"
    return "prefill, prompt" if architecture.kind == "causal" else "prefill, cross-attention, prompt"


def shared_by_default(architecture: Architecture) -> str:
    """Returns what a beam search shares at real size, if fastgen decides what pays."""
    generate(architecture.model(REAL), architecture.inputs(REAL), "beam search")
    return shares(fastgen.explain())
