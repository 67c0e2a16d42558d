"""`tools/gpu_check.py`: cases that raise or take too long, and which results are failures."""

import importlib
import json
import sys

import pytest
import torch
from python_process import REPOSITORY

FACTS = {"gpu": "H200", "date": "2026-11-27", "dry": False, "torch": "2.11", "transformers": "5.17", "fastgen": "0.1"}
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("gpu_check")


@pytest.fixture
def options(gpu_check, tmp_path):
    return gpu_check.Options(True, tmp_path)


def fail():
    raise RuntimeError("CUDA error: an illegal memory access\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")


def saved(options):
    return json.loads((options.folder / "gpu-check.json").read_text())


def test_a_case_that_raises_runs_again_next_time(gpu_check, options, monkeypatch):
    results = {}
    cases = {"rates": {"eager": fail, "in a graph": lambda: {"measured": 1}}, "tests": {"all": lambda: {"status": 0}}}
    parts = {name: lambda options, name=name: cases[name] for name in cases}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    gpu_check.run(parts, results, options)
    expected = {"rates": {"eager": {"error": ILLEGAL}, "in a graph": {"measured": 1}}, "tests": {"all": {"status": 0}}}
    assert saved(options) == results == expected
    assert gpu_check.failures(results) == [f"rates, eager: {ILLEGAL}"]
    cases["rates"] = {"eager": lambda: {"measured": 2}, "in a graph": fail}
    gpu_check.run(parts, results, options)
    assert saved(options)["rates"] == {"eager": {"measured": 2}, "in a graph": {"measured": 1}}


def test_each_case_is_written_before_the_next(gpu_check, options, monkeypatch, capsys):
    seen = {}
    cases = {"a": lambda: {"status": 0}, "b": lambda: seen.update(saved(options)) or {"status": 0}}
    monkeypatch.setattr(gpu_check, "PARTS", {"tests": lambda options: cases})
    gpu_check.run(["tests"], {}, options)
    assert seen == {"tests": {"a": {"status": 0}}}
    gpu_check.run(["tests"], results := {}, options, until=0.0)
    assert results == {"tests": {}} and "no time left for a" in capsys.readouterr().out


def test_a_part_that_takes_too_long_is_killed(gpu_check, options, monkeypatch):
    sleep = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    monkeypatch.setattr(gpu_check, "SANITIZER", sleep)
    monkeypatch.setattr(gpu_check, "SECONDS", {"sanitize": 2})
    gpu_check.run(["sanitize"], results := {}, options)
    error = results["sanitize"]["n-gram kernels"]["error"]
    assert error.startswith("TimeoutExpired: ") and " timed out after " in error
    assert (options.folder / "sanitize.log").read_text() == "begun\n"


def test_a_part_without_its_tool_is_no_failure(gpu_check, options, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "SANITIZER", ["no-such-tool"])
    results = {}
    for _ in range(2):  # it may have been installed meanwhile
        gpu_check.run(["sanitize"], results, options)
    assert results["sanitize"]["n-gram kernels"]["status"] is None
    assert gpu_check.failures(results) == []


def test_the_page_says_which_kernels_were_built(gpu_check):
    facts = FACTS | {
        "kernels": {"no-repeat n-gram": ["CUDA: not built", "Triton: usable"], "checksums": ["Triton: usable"]}
    }
    page = [*gpu_check.page({"environment": facts, "rates": {"eager": {"error": "ValueError: no kernel"}}})]
    assert "Kernels: no-repeat n-gram (CUDA: not built, Triton: usable); checksums (Triton: usable)." in page
    assert page[-1] == "rates, eager: not ended, `ValueError: no kernel`"


def test_other_tokens_of_a_model_in_fp32_are_a_failure(gpu_check):
    models = gpu_check.gpu_models.MODELS
    ways = {"stock": {"equal_tokens": 1.0, "replayed": 0}, "fastgen": {"equal_tokens": 0.97, "replayed": 9}}
    single = [name for name, model in models.items() if model is not None and model.dtype == torch.float32]
    expected = [f"generate, {name}, fastgen: 97% of stock's tokens" for name in single]
    assert gpu_check.failures({"generate": dict.fromkeys(models, ways)}) == expected
    assert len(expected) == 2


@pytest.mark.parametrize(
    ("ways", "failing"),
    [
        ({"fastgen": 5e-4}, []),
        ({"fastgen": 3e-3}, ["fastgen's error 3.0e-03"]),
        ({"fastgen": float("nan")}, ["fastgen's error nan"]),
        ({"Triton": 3.1e-4, "fastgen": 3.1e-4}, []),
        ({"Triton": 5e-4, "fastgen": 5e-4}, ["Triton's error 5.0e-04"]),
    ],
)
def test_attention_is_judged_with_and_without_triton(gpu_check, ways, failing):
    name = "BART-large, 128 inputs, beam 4"  # fp16
    errors = {way: {"error": error} for way, error in {"stock": 3e-4, **ways}.items()}
    expected = [f"attention, {name}: {message}, stock's 3.0e-04" for message in failing]
    assert gpu_check.failures({"attention": {name: errors}}) == expected
