"""The recipes of docs/scaling.md run."""

import re

import pytest
from python_process import REPOSITORY, run_code

RECIPES = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/scaling.md").read_text(encoding="utf-8"), re.DOTALL)
TEXT = "thirty one books for seven dollars"


def test_the_recipe_for_datasets_runs():
    pytest.importorskip("datasets")
    assert TEXT in run_code(RECIPES[0], HF_HUB_OFFLINE="1")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_recipe_for_ray_data_runs():
    pytest.importorskip("ray")
    pytest.importorskip("pyarrow")
    assert TEXT in run_code(RECIPES[1], HF_HUB_OFFLINE="1", RAY_ADDRESS="local")  # not that of another program
