"""lm-evaluation-harness under `python -m fastgen` has the same answers and metrics."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from python_process import run_python

import fastgen
from fastgen.testing import configured

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval")
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


# Prints the whole report to stderr after each call that fastgen logs.
TELLS_REPORTS = """
import logging, sys

class Tell(logging.Handler):
    def emit(self, record):
        import fastgen
        print(fastgen.explain(), file=sys.stderr)

logging.getLogger("fastgen").addHandler(Tell())
logging.getLogger("fastgen").setLevel(logging.DEBUG)
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("lm_eval_cases")


@pytest.fixture
def evaluated(bench, tmp_path):
    """Runs the harness on tasks; returns its results, the answers to each task's samples, and its log."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    bench.write_model(tmp_path / "model", **sizes, num_attention_heads=4, num_key_value_heads=2)
    (tmp_path / "sitecustomize.py").write_text(TELLS_REPORTS)
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    environment |= {"FASTGEN_SHARE": "always", "FASTGEN_STRICT": "1"}

    def run(name: str, tasks: list[str], *program: str) -> tuple[dict, dict[str, list], str]:
        arguments = [
            *("--model", "hf", "--model_args", f"pretrained={tmp_path / 'model'},dtype=float32", "--device", "cpu"),
            *("--tasks", ",".join(tasks), "--include_path", str(tmp_path), "--batch_size", "5", "--seed", "1"),
            *("--log_samples", "--output_path", str(tmp_path / name)),
        ]
        ended = run_python(*program, "-m", "lm_eval", *arguments, path=tmp_path, cwd=tmp_path, **environment)
        assert ended.returncode == 0, ended.stderr
        answers = {}
        for task in tasks:
            samples = next((tmp_path / name).rglob(f"samples_{task}_*.jsonl")).read_text(encoding="utf-8")
            answers[task] = [json.loads(line)["resps"] for line in samples.splitlines()]
        results = json.loads(next((tmp_path / name).rglob("results*.json")).read_text(encoding="utf-8"))["results"]
        return results, answers, ended.stderr

    return run


def test_answers_and_metrics_are_the_same(bench, evaluated, tmp_path):
    """A task whose batches cut the samples of a question, and one of multiple choice."""
    sampled = bench.write_task(tmp_path, bench.Case(3, 20, repeats=8), new_tokens=6)
    chosen = bench.write_task(tmp_path, bench.Case(12, 20, shots=30, options=4), number=1)
    results, stock, _ = evaluated("stock", [sampled, chosen])
    fast_results, fast, log = evaluated("fastgen", [sampled, chosen], "-m", "fastgen")
    assert fast_results == results and results[chosen]["acc,none"] < 1
    assert [len(set(answer[0])) > 1 for answer in stock[sampled]] == [True] * 3
    assert fast[sampled] == stock[sampled]
    assert "groups of 3, 2, not of one size" in log and "the prompt's keys and values: once per input" in log
    for answers, expected in zip(fast[chosen], stock[chosen]):
        for ((score, greedy),), ((other, other_greedy),) in zip(answers, expected):
            assert float(score) == pytest.approx(float(other), abs=1e-4) and greedy == other_greedy
    assert "30 tokens of all inputs" in log and "contexts: once for all their continuations" in log


@pytest.fixture
def harness(bench, tmp_path):
    from lm_eval.models.huggingface import HFLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    bench.write_model(tmp_path / "model", **sizes, num_attention_heads=4, num_key_value_heads=2)
    return HFLM(pretrained=str(tmp_path / "model"), dtype="float32", device="cpu", batch_size=4)


def requests(shots: int, questions: int = 6, options: int = 4) -> list:
    """Returns multiple-choice questions after so many words of examples, in the harness's form."""
    from lm_eval.api.instance import Instance

    examples = " ".join(f"w{(7 * word) % 90}" for word in range(shots))
    pairs = [
        (f"{examples} w{100 + number} w{number}", f" w{20 * option + number}" + " w5" * (option % 3))
        for number in range(questions)
        for option in range(options)
    ]
    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]


class Hook:
    """A cache of answers with the method that the harness calls."""

    def __init__(self) -> None:
        self.added: dict = {}

    def add_partial(self, attribute: str, request: tuple, answer: tuple) -> None:
        self.added[attribute, request] = answer


@pytest.mark.parametrize("shots", (0, 30))
def test_multiple_choice_has_the_same_answers(harness, shots):
    asked, hooks = requests(shots), (Hook(), Hook())
    with configured(share="always"):
        harness.set_cache_hook(hooks[0])
        with fastgen.disabled():
            stock = harness.loglikelihood(asked, disable_tqdm=True)
        harness.set_cache_hook(hooks[1])
        fast = harness.loglikelihood(asked, disable_tqdm=True)
        report = fastgen.explain()
    assert report.inputs == 6 and report.rows == 24 and report.prefix_length == shots
    assert [greedy for _, greedy in fast] == [greedy for _, greedy in stock]
    torch.testing.assert_close([x for x, _ in fast], [x for x, _ in stock], atol=1e-4, rtol=0)
    assert hooks[0].added.keys() == hooks[1].added.keys() and len(hooks[1].added) == 24


def test_other_requests_and_models_are_left_to_the_harness(harness, monkeypatch):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    class Own(HFLM):
        def _model_call(self, *args, **kwargs):
            return super()._model_call(*args, **kwargs) * 2

    def assert_left(code: str, method: str = "loglikelihood", asked: list | None = None) -> None:
        with fastgen.disabled():
            expected = getattr(harness, method)(asked or requests(30), disable_tqdm=True)
        assert getattr(harness, method)(asked or requests(30), disable_tqdm=True) == expected
        assert fastgen.explain().codes("prompt sharing") == {code}

    with configured(share="always"):
        text = " ".join(f"w{word}" for word in range(40))
        assert_left("HARNESS", "loglikelihood_rolling", [Instance("loglikelihood_rolling", {}, (text,), 0)])
        monkeypatch.setattr(harness, "_max_length", 20)
        assert_left("HARNESS")
        monkeypatch.undo()
        harness.__class__ = Own
        assert_left("METHOD_REPLACED")
        harness.__class__ = HFLM
        original = HFLM._model_call
        for owner in (harness, HFLM):
            monkeypatch.setattr(owner, "_model_call", lambda *args, **kwargs: 2 * original(harness, args[-1], **kwargs))
            assert_left("METHOD_REPLACED")
            monkeypatch.undo()
            vars(harness).pop("_model_call", None)  # pytest before 9.2 leaves the method of the class there
