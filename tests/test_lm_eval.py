"""lm-evaluation-harness under `python -m fastgen`: the same answers to questions that are asked many times."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from python_process import run_python

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
    return importlib.import_module("bench_lm_eval")


def test_answers_are_the_same_where_batches_cut_the_samples_of_a_question(bench, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    bench.write_model(tmp_path / "model", **sizes, num_attention_heads=4, num_key_value_heads=2)
    bench.write_task(tmp_path, questions=3, length=20, new_tokens=6, repeats=8)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    told = {"FASTGEN_SHARE": "always", "FASTGEN_STRICT": "1"}
    (tmp_path / "sitecustomize.py").write_text(TELLS_REPORTS)

    def answers(name: str, *program: str) -> tuple[list, str]:
        arguments = [
            *("--model", "hf", "--model_args", f"pretrained={tmp_path / 'model'},dtype=float32", "--device", "cpu"),
            *("--tasks", bench.TASK, "--include_path", str(tmp_path), "--batch_size", "5", "--seed", "1"),
            *("--log_samples", "--output_path", str(tmp_path / name)),
        ]
        ended = run_python(*program, "-m", "lm_eval", *arguments, path=tmp_path, cwd=tmp_path, **offline, **told)
        assert ended.returncode == 0, ended.stderr
        samples = next((tmp_path / name).rglob("samples*.jsonl")).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["resps"] for line in samples], ended.stderr

    stock, _ = answers("stock")
    assert [len(set(answer[0])) > 1 for answer in stock] == [True] * 3
    fast, log = answers("fastgen", "-m", "fastgen")
    assert fast == stock
    assert "groups of 3, 2, not of one size" in log and "the prompt's keys and values: once per input" in log
