"""lm-evaluation-harness on tasks of local data, on a model made for it: transformers against fastgen.

Batches of 16 rows unless another number is named; a Llama-like model with random weights (6 layers of width 512), whose
texts repeat themselves, more than texts of trained models do: drafts gain at most this. All answers are compared, texts
exactly and log-probabilities to 1e-4. Needs `pip install lm-eval`.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import Options, compare, with_and_without
from transformers import LlamaConfig, LlamaForCausalLM
from word_tokenizer import word_tokenizer

from fastgen.testing import configured


@dataclass(frozen=True)
class Case:
    """Questions of about `length` tokens, after `shots` tokens of examples.

    workload: in words. repeats: samples of each question. options: of multiple choice. tasks: so many of these, each
    with examples of its own. batch: rows.
    """

    questions: int
    length: int
    shots: int = 0
    repeats: int = 1
    options: int = 0
    tasks: int = 1
    batch: int = 16
    workload: str = ""


CASES = {
    "lm_eval": {
        "repeats16": Case(6, 400, repeats=16, workload="6 questions of about 400 tokens, 16 samples each"),
        "shots5": Case(48, 60, shots=600, workload="5 examples of about 600 tokens together, 48 questions"),
        "greedy-alone": Case(12, 200, batch=1, workload="12 questions of about 200 tokens, one at a time"),
        "greedy16": Case(12, 200, workload="12 questions of about 200 tokens in one batch"),
        "choice4": Case(64, 300, options=4, workload="64 questions of about 300 tokens, 4 options"),
        "choice4-shots5": Case(64, 300, 600, options=4, workload="64 questions with 4 options after 5 examples"),
        "choice4-shots5-2tasks": Case(32, 300, 600, options=4, tasks=2, workload="2 tasks of 32 such questions"),
    }
}
TASK = "local_questions"
ALONE = "fastgen without drafts"
VOCABULARY = 2000
OF_MODEL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}
OF_MODEL |= {"num_attention_heads": 8, "num_key_value_heads": 2}


def write_model(folder: Path, **sizes: int) -> None:
    """Writes a Llama-like model with random weights, and a tokenizer of the words `w0`, `w1`, …"""
    word_tokenizer(VOCABULARY, model_max_length=2048).save_pretrained(folder)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **ends)).save_pretrained(folder)


def write_task(folder: Path, case: Case, new_tokens: int = 32, number: int = 0) -> str:
    """Writes a task `local_questions`, or with a number at its end; returns its name. A word is a token."""
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

        write_model(folder / "model", **OF_MODEL)
        self.names = [write_task(folder, case, number=number) for number in range(case.tasks)]
        self.tasks = TaskManager(include_path=str(folder), include_defaults=False)
        self.model = HFLM(pretrained=str(folder / "model"), dtype="float32", device="cpu", batch_size=case.batch)

    def answers(self) -> list[Any]:
        from lm_eval import simple_evaluate

        evaluated = simple_evaluate(self.model, tasks=self.names, task_manager=self.tasks, log_samples=True)
        return [sample["resps"] for name in self.names for sample in evaluated["samples"][name]]


def are_equal(stock: Any, fast: Any) -> bool:
    """Returns whether answers are equal: texts exactly, log-probabilities to 1e-4."""
    if isinstance(stock, (list, tuple)):
        return len(stock) == len(fast) and all(map(are_equal, stock, fast))
    return abs(stock - fast) <= 1e-4 if isinstance(stock, float) else stock == fast


def measure(kind: str, name: str, case: Case, options: Options) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        evaluation = Evaluation(case, Path(folder))
        ways = with_and_without(evaluation.answers)
        if not (case.options or case.repeats > 1):  # greedy
            ways[ALONE] = configured(drafts="off")(evaluation.answers)
        result, _ = compare(ways, options, are_equal)
    return {"case": name, **result}
