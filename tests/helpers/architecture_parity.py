"""Comparisons with the unpatched library; run as a script, it writes the table of all architectures in docs/."""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from architectures import ARCHITECTURES, REAL, Architecture
from parity import run_both
from reports import is_materialized

import fastgen
from fastgen.optimizer.decoding.report import KV_CACHE, PREFILL, Report
from fastgen.testing import configured

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


def write_table(path: Path) -> None:
    transformers.logging.set_verbosity_error()
    defaults = {architecture.id: shared_by_default(architecture) for architecture in ARCHITECTURES}
    lines = [
        "# Architectures",
        "",
        f"Random models of two layers, fp32, transformers {transformers.__version__}, torch "
        f"{torch.__version__.split('+')[0]}: tokens and scores with fastgen against",
        "those of the unpatched library in the same process. Made by `python tests/helpers/architecture_parity.py`.",
        "",
        f"*shared* and the last three columns: tiny models, {', '.join(MODES)}, under",
        "`FASTGEN_SHARE=always`. They show what can be shared, whatever the size; by default, models and prompts as",
        "small as these are left alone.",
        "",
        "*shared by default at real size*: what a beam search with nothing set shares, 2 inputs, 3 beams, 12 new",
        f"tokens, {REAL.heads} heads of {REAL.head_dim} (fewer key heads where an architecture has them: "
        f"{REAL.key_value_heads}, gpt_bigcode, falcon and fastgen's own 1), prompts",
        f"of {REAL.length} tokens, {REAL.frames // 100} seconds of sound, pictures of "
        f"{REAL.image_size} × {REAL.image_size}. deepseek_v3's latent heads stay tiny.",
        "",
        "*prefill*: computed once per input instead of once per beam or sample. *cross-attention*, *prompt*: keys and",
        "values kept once per input. *until materialized*: the attention code of the model asks for keys in one piece,",
        "so that they are repeated for each row at the first step, and then written in place.",
        "",
        "`fastgen.token_log_probs` computes common beginnings once, forward and backward, in all decoder-only",
        "architectures except openai-gpt, unilm, and those with recurrent states or linear attention: mamba,",
        "falcon_mamba, minimax, jamba, qwen3_next and recurrent_gemma take one forward of all rows.",
        "",
        "| architecture | shared | shared by default at real size | equal tokens | largest difference of scores "
        "| left to the original |",
        "|---|---|---|---|---|---|",
    ]
    for architecture in ARCHITECTURES:
        model, inputs = architecture.model(), architecture.inputs()
        with configured(share="always"):
            parities = {mode: measure(model, inputs, mode) for mode in MODES}
        equal = [mode for mode, parity in parities.items() if parity.tokens_equal]
        difference = max(parity.largest_score_difference for parity in parities.values())
        beams = parities["beam search"]
        # Calls that return scores have the library's loop, whatever the architecture.
        left = "; ".join(str(reason) for part, reason in beams.report.not_done if part in (PREFILL, KV_CACHE))
        shown = "all modes" if len(equal) == len(MODES) else ", ".join(equal) or "none"
        real = defaults[architecture.id]
        lines.append(f"| {architecture.id} | {shares(beams.report)} | {real} | {shown} | {difference:.0e} | {left} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_table(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "architectures.md"))
