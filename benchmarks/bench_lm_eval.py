"""lm-evaluation-harness on tasks of local data: transformers against fastgen, on a model made for it.

    python benchmarks/bench_lm_eval.py [CASE ...] [--repeats 3] [--floors FILE] [--json FILE]

| case | what it is |
|---|---|
| repeats16 | 6 questions of about 400 tokens, 16 samples of 32 new tokens each |
| shots5 | 48 questions of about 60 tokens behind the same 5 examples of 600 tokens together, 32 new tokens |
| choice4, choice4-shots5 | 64 questions of about 300 tokens, 4 options of 3 tokens; and behind those examples |

Batches of 16 rows; a Llama-like model with random weights (6 layers of width 512). Both evaluate in turns in one
process, from the same seed; seconds are medians, ratios medians of those of a turn, and all answers are compared.
--floors takes a file of the ratios to reach (floors.json); the status is 1 where one is missed, or where an
answer differs. Needs `pip install lm-eval`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import compare, finish, missed_by, parse_flags, parser_of, summary, with_and_without
from machine import print_head
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class Case(NamedTuple):
    """questions of about `length` tokens, behind `shots` tokens of examples; options: of multiple choice.

    tasks: so many of these, each with examples of its own.
    """

    questions: int
    length: int
    shots: int = 0
    repeats: int = 1
    options: int = 0
    tasks: int = 1


CASES = {
    "repeats16": Case(6, 400, repeats=16),
    "shots5": Case(48, 60, shots=600),
    "choice4": Case(64, 300, options=4),
    "choice4-shots5": Case(64, 300, shots=600, options=4),
    "choice4-shots5-2tasks": Case(32, 300, shots=600, options=4, tasks=2),
}
TASK = "local_questions"
WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(1997))]


def write_model(folder: Path, **sizes: int) -> None:
    """A Llama-like model with random weights, and a tokenizer of the words `w0`, `w1`, …"""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=2048, **special).save_pretrained(folder)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes, **ends)).save_pretrained(folder)


def write_task(folder: Path, case: Case, new_tokens: int = 32, number: int = 0) -> str:
    """A task `local_questions`, or one with a number behind it; its name. A word is a token."""
    name = f"{TASK}{number or ''}"
    lines = []
    for line in range(case.questions):
        words = (f"w{(31 * line + word * word + number) % 1997}" for word in range(case.length + line % 9))
        lines.append({"question": " ".join(words), "answer": "w1"})
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    task: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "description": "".join(f"w{(17 * word + 5 * number) % 1997} " for word in range(case.shots)),
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
    }
    sampled = {"do_sample": case.repeats > 1} | ({"temperature": 0.8} if case.repeats > 1 else {})
    if case.options:
        options = [f"w{7 * option} w{option} w{option + 9}" for option in range(case.options)]
        task |= {"output_type": "multiple_choice", "doc_to_choice": options, "doc_to_target": 0}
        task["metric_list"] = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    else:
        task |= {"output_type": "generate_until", "repeats": case.repeats}
        task["generation_kwargs"] = {"max_gen_toks": new_tokens, "until": ["</s>"], **sampled}
        task["filter_list"] = [{"name": "first", "filter": [{"function": "take_first"}]}]
        task["metric_list"] = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return name


class Evaluation:
    """Tasks on one model, loaded once."""

    def __init__(self, case: Case, folder: Path) -> None:
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}
        write_model(folder / "model", **sizes, num_attention_heads=8, num_key_value_heads=2)
        self.names = [write_task(folder, case, number=number) for number in range(case.tasks)]
        self.tasks = TaskManager(include_path=str(folder), include_defaults=False)
        self.model = HFLM(pretrained=str(folder / "model"), dtype="float32", device="cpu", batch_size=16)

    def answers(self) -> list[Any]:
        from lm_eval import simple_evaluate

        found = simple_evaluate(self.model, tasks=self.names, task_manager=self.tasks, log_samples=True)
        return [sample["resps"] for name in self.names for sample in found["samples"][name]]


def are_equal(stock: Any, fast: Any) -> bool:
    """Whether answers are: texts exactly, log-probabilities to 1e-4."""
    if isinstance(stock, (list, tuple)):
        return len(stock) == len(fast) and all(map(are_equal, stock, fast))
    return abs(stock - fast) <= 1e-4 if isinstance(stock, float) else stock == fast


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Median seconds of each way, the median ratio, and whether all answers are equal."""
    with tempfile.TemporaryDirectory() as folder:
        evaluation = Evaluation(CASES[name], Path(folder))
        return compare(name, with_and_without(evaluation.answers), repeats, are_equal)


def main(argv: list[str] | None = None) -> int:
    args = parse_flags(parser_of(__doc__, CASES), argv, "lm_eval", CASES)
    print_head()
    results, missed = [], []
    for name in args.cases:
        results.append(measure(name, args.repeats))
        print(summary(results[-1]), flush=True)
        missed += missed_by(results[-1], args.floors, "answers")
    return finish(args, results, missed)


if __name__ == "__main__":
    raise SystemExit(main())
