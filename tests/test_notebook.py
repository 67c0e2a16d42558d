"""The notebook in examples/ runs from its first cell to its last, and its calls give equal tokens."""

import pytest
from python_process import REPOSITORY

pytestmark = pytest.mark.slow
NOTEBOOK = REPOSITORY / "examples" / "fastgen.ipynb"


@pytest.fixture
def printed(tmp_path, monkeypatch):
    """The outputs of the notebook's cells, run in an empty folder and without a network."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=":")
    for name in ("FASTGEN_DISABLE", "FASTGEN_AUTO"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    streams = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.text for output in streams if output.output_type == "stream" and output.name == "stdout"]


def test_ten_cells_show_equal_tokens_and_what_was_shared(printed):
    text = "".join(printed)
    assert [line.partition(", equal: ")[2] for line in text.splitlines() if ", equal: " in line] == ["True"] * 3
    assert "equal: 8 rows" in text  # verify
    assert "prompts shared" in text and "8 records, the first: " in text
    assert "prefill: one row per input" in text  # the rollout
    assert "in each of 2 groups" in text  # the scoring


def test_the_notebook_has_ten_cells_without_outputs():
    nbformat = pytest.importorskip("nbformat")
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert len(cells) == 10
    assert [cell.outputs for cell in cells if cell.cell_type == "code"] == [[]] * 9
