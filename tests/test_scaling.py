"""The recipes of docs/scaling.md run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from python_process import REPOSITORY, run_code, run_python

RECIPES = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/scaling.md").read_text(encoding="utf-8"), re.DOTALL)
TEXT = "thirty one books for seven dollars"


def test_the_recipe_for_datasets_runs() -> None:
    pytest.importorskip("datasets")
    assert TEXT in run_code(RECIPES[0], HF_HUB_OFFLINE="1")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_recipe_for_ray_data_runs() -> None:
    pytest.importorskip("ray")
    pytest.importorskip("pyarrow")
    assert TEXT in run_code(RECIPES[1], HF_HUB_OFFLINE="1", RAY_ADDRESS="local")  # not that of another program


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_driver_of_workers_that_sleep_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    flags = "--workers 4 --lines 160 --bs 4 --seconds 0.1 --json"
    done = run_python(
        "benchmarks/bench_dispatch.py", *flags.split(), str(tmp_path / "told"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told").read_text())
    (row,) = told["results"]
    assert row["workers"] == 4 and row["lines"] == 160
    assert row["seconds"] >= 40 / 4 * 0.1  # 40 batches, four at a time
    assert told["d"] > 0 and told["journal"] > 0
