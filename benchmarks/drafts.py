"""Drafts: outputs that copy parts of their input, with drafts and without, and transformers' prompt lookup.

Random weights copy nothing, so a logits processor forces the text: runs of 4 to 40 tokens from random places of the
prompt, with other tokens between them. All ways have this processor; their tokens must be equal to the text. The
command, which takes no processor, generates texts of random weights: they repeat themselves, more than texts do.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import calls
import torch
from lm_eval_cases import ALONE, OF_MODEL, write_model
from measure import Options, Ways, compare
from transformers import LogitsProcessor

import fastgen
from fastgen.models.demo import demo_path, sample_path
from fastgen.testing import configured

SHORTEST, LONGEST = 4, 40  # runs that are copied
COMMAND = "command"


@dataclass(frozen=True)
class Case:
    """share: of the new tokens that are copied, or None for a text of the model itself. lines: of the demo model."""

    model: str
    rows: int = 1
    share: float | None = None
    length: int = 512
    new_tokens: int = 256
    lines: int = 500

    @property
    def workload(self) -> str:
        if self.model == COMMAND:
            return f"the command, batches of {self.rows}, {self.lines} lines, {self.new_tokens} new tokens each"
        title = calls.MODELS[self.model].title
        if self.model == "demo":
            return f"{title}, one line at a time"
        text = "" if self.share is None else f", {self.share:.0%} copied"
        unit = "s" if "whisper" in self.model else "tokens"
        return f"{title}, {self.rows} × {self.length} {unit}, {self.new_tokens} new tokens{text}"


CASES = {
    "drafts": {
        **{
            f"{model.partition('-')[0]}-{rows}-{round(100 * share)}": Case(model, rows, share)
            for model in ("gpt2-small", "llama-like")
            for rows in (1, 4)
            for share in (0.95, 0.8, 0.5, 0.0)
        },
        "demo": Case("demo"),
        "whisper": Case("whisper-tiny", length=30, new_tokens=96),
        "bart": Case("bart-base", length=64, new_tokens=96),
        **{f"command-{rows}": Case(COMMAND, rows, length=100, new_tokens=64, lines=16) for rows in (1, 4, 16)},
    }
}


class Forced(LogitsProcessor):
    """Makes each row generate a given text; start: the number of tokens before it."""

    def __init__(self, texts: list[list[int]], start: int) -> None:
        self.texts, self.start = torch.tensor(texts), start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = min(input_ids.shape[1] - self.start, self.texts.shape[1] - 1)  # prompt lookup looks behind the end
        tokens = self.texts[:, position, None]
        return torch.full_like(scores, -1e4).scatter_(1, tokens, 1e4)


def copying(prompt: list[int], share: float, length: int, vocabulary: int, rng: random.Random) -> list[int]:
    """Returns a text of which this share is copied from the prompt, in runs."""
    text: list[int] = []
    while len(text) < length:
        count = rng.randint(SHORTEST, LONGEST) if share else 0
        start = rng.randrange(len(prompt) - count)
        others = count * (1 - share) / share if share else length
        own = int(others) + (rng.random() < others % 1)
        text += [*prompt[start : start + count], *(rng.randrange(calls.FIRST_WORD, vocabulary) for _ in range(own))]
    return text[:length]


def measure(kind: str, name: str, case: Case, options: Options) -> dict[str, Any]:
    """Returns the figures of a case; the ratio to stock's prompt lookup is that of one row with a forced text."""
    if case.model == COMMAND:
        return measure_command(name, case, options)
    call, with_lookup = call_of(case, options)
    counts: dict[str, int] = {}

    def counted() -> Any:
        returned, report = call(), fastgen.explain()
        counts.update(drafted=report.drafted, accepted=report.accepted, saved=report.steps_saved)
        return returned

    ways: Ways = {
        "fastgen": counted,
        ALONE: configured(drafts="off")(call),
        "stock": fastgen.disabled()(call),
    }
    if with_lookup:
        ways["prompt lookup"] = fastgen.disabled()(partial(call, prompt_lookup_num_tokens=10))
    result, returned = compare(ways, options)
    equal = all(torch.equal(output, returned["stock"]) for output in returned.values())
    what = {"case": name, "workload": case.workload, "dtype": options.dtype}
    return {**what, **result, "equal": result["equal"] and equal, **counts}


def call_of(case: Case, options: Options) -> tuple[Callable[..., torch.Tensor], bool]:
    """Returns the call of a case, and whether prompt lookup can do the same."""
    if case.model == "demo":
        return lines_of_demo(case, options), False
    shape = calls.Call(case.model, case.rows, case.length, calls.GREEDY | {"max_new_tokens": case.new_tokens})
    work = calls.Work(shape, options)
    if case.share is not None:
        rng, prompts = random.Random(0), work.inputs["input_ids"].tolist()
        texts = [copying(prompt, case.share, case.new_tokens, work.model.config.vocab_size, rng) for prompt in prompts]
        work.arguments["logits_processor"] = [Forced(texts, case.length)]
    return work.generate, case.share is not None and case.rows == 1


def lines_of_demo(case: Case, options: Options) -> Callable[[], torch.Tensor]:
    from transformers import AutoTokenizer

    model = calls.make_model("demo").to(options.torch_dtype)
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    lines = sample_path().read_text(encoding="utf-8").splitlines()[: case.lines]
    inputs = [tokenizer(line, return_tensors="pt") for line in lines]

    def generate() -> torch.Tensor:
        arguments = {"do_sample": False, "num_beams": 1, "max_new_tokens": 160}
        outputs = [model.generate(**each, **arguments)[0] for each in inputs]
        return torch.nn.utils.rnn.pad_sequence(outputs, batch_first=True)

    return generate


def measure_command(name: str, case: Case, options: Options) -> dict[str, Any]:
    """Returns the figures of the command, which reads and writes files, on a Llama-like model."""
    with tempfile.TemporaryDirectory() as folder:
        run = partial(outputs_of_command, case, Path(folder))
        write_model(Path(folder, "model"), **OF_MODEL)
        draw = random.Random(0)
        lines = (" ".join(f"w{draw.randrange(1000)}" for _ in range(case.length)) for _ in range(case.lines))
        Path(folder, "in.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        ways: Ways = {
            "fastgen": run,
            ALONE: configured(drafts="off")(run),
            "stock": partial(run, "--without_fastgen_opt"),
        }
        result, returned = compare(ways, options)
    equal = result["equal"] and torch.equal(returned[ALONE], returned["stock"])
    return {"case": name, "workload": case.workload, "dtype": options.dtype, **result, "equal": equal}


def outputs_of_command(case: Case, folder: Path, *flags: str) -> torch.Tensor:
    """Runs the command in this process; returns the bytes of its output."""
    from fastgen.cli.transformers.command import main

    files = [str(folder / name) for name in ("model", "in.txt", "out.txt")]
    sizes = ["--causal_lm", "--bs", str(case.rows), "--beam", "1", "--max_new_tokens", str(case.new_tokens)]
    if status := main([*files, *sizes, "--quiet", "--overwrite", *flags]):
        raise SystemExit(f"the command ended with status {status}")
    return torch.tensor(list(Path(files[-1]).read_bytes()))
