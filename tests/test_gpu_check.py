"""`tools/gpu_check.py`: parts that raise or take too long, and which results are failures."""

import importlib
import json
import sys

import pytest
import torch
from python_process import REPOSITORY

FACTS = {"gpu": "H200", "date": "2026-11-27", "dry": False, "torch": "2.11", "transformers": "5.17", "fastgen": "0.1"}


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("gpu_check")


def fail(dry):
    raise RuntimeError("CUDA error: an illegal memory access\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")


def test_a_part_that_raises_runs_again_next_time(gpu_check, tmp_path, monkeypatch):
    file, results = tmp_path / "gpu-check.json", {}
    monkeypatch.setattr(gpu_check, "PARTS", {"break_even": fail, "tests": lambda dry: {"status": 0}})
    gpu_check.run(gpu_check.PARTS, results, file, dry=True)
    error = "RuntimeError: CUDA error: an illegal memory access"
    assert json.loads(file.read_text()) == results == {"break_even": {"error": error}, "tests": {"status": 0}}
    assert gpu_check.failures(results) == [f"break_even: {error}"]
    monkeypatch.setattr(gpu_check, "PARTS", {"break_even": lambda dry: {"eager": 1}, "tests": fail})
    gpu_check.run(gpu_check.PARTS, results, file, dry=True)
    assert json.loads(file.read_text()) == results == {"break_even": {"eager": 1}, "tests": {"status": 0}}


def test_a_part_that_takes_too_long_is_killed(gpu_check, tmp_path, monkeypatch):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(gpu_check, "SANITIZER", sleep)
    monkeypatch.setattr(gpu_check, "SECONDS", {"sanitize": 0.1})
    results = {}
    gpu_check.run(["sanitize"], results, tmp_path / "gpu-check.json", dry=True)
    assert results["sanitize"]["error"].startswith("TimeoutExpired: ")
    assert results["sanitize"]["error"].endswith(" timed out after 0.1 seconds")


def test_a_part_without_its_tool_is_no_failure(gpu_check, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "SANITIZER", ["no-such-tool"])
    results = {}
    for _ in range(2):  # it may have been installed meanwhile
        gpu_check.run(["sanitize"], results, tmp_path / "gpu-check.json", dry=True)
    assert results["sanitize"]["status"] is None and "already" not in capsys.readouterr().out
    assert gpu_check.failures(results) == []


def test_the_page_says_which_kernels_were_built(gpu_check):
    facts = FACTS | {
        "kernels": {"no-repeat n-gram": ["CUDA: not built", "Triton: usable"], "checksums": ["Triton: usable"]}
    }
    page = [*gpu_check.page({"environment": facts, "break_even": {"error": "ValueError: no kernel"}})]
    assert "Kernels: no-repeat n-gram (CUDA: not built, Triton: usable); checksums (Triton: usable)." in page
    assert page[-1] == "break_even: not ended, `ValueError: no kernel`"


def test_other_tokens_of_a_model_in_fp32_are_a_failure(gpu_check):
    ways = {"stock": {"equal_tokens": 1.0, "replayed": 0}, "fastgen": {"equal_tokens": 0.97, "replayed": 9}}
    single = [name for name, model in gpu_check.MODELS.items() if model.dtype == torch.float32]
    expected = [f"generate, {name}, fastgen: 97% of stock's tokens" for name in single]
    assert gpu_check.failures({"generate": dict.fromkeys(gpu_check.MODELS, ways)}) == expected
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
