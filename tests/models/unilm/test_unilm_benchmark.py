"""The benchmark compares equal tokens, and fails below its floor."""

from __future__ import annotations

import importlib
import json

import pytest
from python_process import REPOSITORY

SMALL = ["--layers", "1", "--batch", "2", "--source", "12", "--new-tokens", "2", "--beams", "2", "--repeats", "1"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_status_and_result(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    bench = importlib.import_module("bench_unilm")
    assert bench.main([*SMALL, "--json", str(tmp_path / "result.json")]) == 0
    told = json.loads((tmp_path / "result.json").read_text())
    (result,) = told["results"]
    assert result["equal"] and result["ratio"] > 0 and told["arguments"]["source"] == 12
    (tmp_path / "floors.json").write_text(json.dumps({"unilm": {"unilm": {"stock": 1e9}}}))
    assert bench.main([*SMALL, "--floors", str(tmp_path / "floors.json")]) == 1
    assert "below the floor" in capsys.readouterr().out
    monkeypatch.setattr(bench, "compare", lambda *_: result | {"equal": False})
    assert bench.main(SMALL) == 1
