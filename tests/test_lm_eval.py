"""lm-evaluation-harness under `python -m fastgen`: the same answers to questions that are asked many times."""

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


# After each call that fastgen logs, the whole report goes to stderr.
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
    """A function that runs the harness on tasks: its results, the answers to each task's samples, and what it said."""
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
    found, fast, log = evaluated("fastgen", [sampled, chosen], "-m", "fastgen")
    assert found == results and results[chosen]["acc,none"] < 1
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
    """Multiple-choice questions behind so many words of examples, in the harness's form."""
    from lm_eval.api.instance import Instance

    examples = " ".join(f"w{(7 * word) % 90}" for word in range(shots))
    pairs = [
        (f"{examples} w{100 + number} w{number}", f" w{20 * option + number}" + " w5" * (option % 3))
        for number in range(questions)
        for option in range(options)
    ]
    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]


class Hook:
    """The cache of answers, as the harness calls it."""

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
    torch.testing.assert_close(
        torch.tensor([x for x, _ in fast]), torch.tensor([x for x, _ in stock]), atol=1e-4, rtol=0
    )
    assert hooks[0].added.keys() == hooks[1].added.keys() and len(hooks[1].added) == 24


def test_what_is_left_to_the_harness(harness, monkeypatch):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    class Own(HFLM):
        def _model_call(self, *args, **kwargs):
            return super()._model_call(*args, **kwargs) * 2

    def codes() -> set[str]:
        return fastgen.explain().codes("prompt sharing")

    with configured(share="always"):
        rolling = [Instance("loglikelihood_rolling", {}, (" ".join(f"w{word}" for word in range(40)),), 0)]
        with fastgen.disabled():
            expected = harness.loglikelihood_rolling(rolling, disable_tqdm=True)
        assert harness.loglikelihood_rolling(rolling, disable_tqdm=True) == expected and codes() == {"HARNESS"}
        monkeypatch.setattr(harness, "_max_length", 20)
        with fastgen.disabled():
            expected = harness.loglikelihood(requests(30), disable_tqdm=True)
        assert harness.loglikelihood(requests(30), disable_tqdm=True) == expected and codes() == {"HARNESS"}
        monkeypatch.undo()
        harness.__class__ = Own
        with fastgen.disabled():
            expected = harness.loglikelihood(requests(30), disable_tqdm=True)
        assert harness.loglikelihood(requests(30), disable_tqdm=True) == expected and codes() == {"METHOD_REPLACED"}
        harness.__class__ = type(harness).__mro__[1]
        original = type(harness)._model_call
        for owner in (harness, type(harness)):
            monkeypatch.setattr(owner, "_model_call", lambda *args, **kwargs: 2 * original(harness, args[-1], **kwargs))
            with fastgen.disabled():
                expected = harness.loglikelihood(requests(30), disable_tqdm=True)
            assert harness.loglikelihood(requests(30), disable_tqdm=True) == expected and codes() == {"METHOD_REPLACED"}
            monkeypatch.undo()
            vars(harness).pop("_model_call", None)  # pytest before 9.2 leaves the method that was found there
