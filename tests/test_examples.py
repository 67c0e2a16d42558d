"""The examples run, and do what their docstrings promise."""

import json
import subprocess
import sys
import time

import psutil
import pytest
from cli_models import save_bart, sentences
from python_process import REPOSITORY
from ray_runs import Cluster, changed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
FILES, ROWS, HELD_AT = 12, 8, 12
# A worker notes its process and its batches, and ends at one where a file "die" is there. From the batch HELD_AT on it
# waits until a file "go" is there.
NOTED = """
import os, time
generate = SplitOnOOM.__call__
def noted(self, batch, start=0):
    folder = os.environ["NOTED"]
    with open(f"{folder}/batches", "a") as file:
        file.write(f"{os.getpid()} {len(batch.items)}\\n")
    try:
        os.rename(f"{folder}/die", f"{folder}/died")
    except FileNotFoundError:  # it is not there, or another worker was first
        pass
    else:
        os._exit(9)
    with open(f"{folder}/batches") as file:
        is_held = len(file.readlines()) > HELD_AT
    while is_held and not os.path.exists(f"{folder}/go"):
        time.sleep(0.05)
    return generate(self, batch, start)
SplitOnOOM.__call__ = noted
""".replace("HELD_AT", str(HELD_AT))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("PYTHONPATH", changed(tmp_path, NOTED))
    monkeypatch.setenv("NOTED", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_cluster = Cluster(4, memory=200 << 20)
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    yield
    ray_cluster.end()


def test_a_job_on_ray_data_writes_every_id_once(cluster, tmp_path):
    """A worker is killed, then the job; it is resumed, run with other files of the same rows, and these again."""
    import pyarrow as pa
    import pyarrow.parquet

    def call(form: str) -> list[str]:
        script = [sys.executable, str(REPOSITORY / "examples/ray_data.py"), str(bart)]
        settings = ["--workers", "2", "--rows", "8", "--settings", '{"bs": 4, "num_beams": 2}']
        return [*script, str(tmp_path / form), str(tmp_path / f"out-{form}"), "--format", form, *settings]

    def outputs(form: str) -> dict[int, list[str]]:
        """Returns the outputs by id; every row is there once, with its text."""
        rows = pyarrow.parquet.read_table(tmp_path / f"out-{form}").to_pylist()
        assert sorted(row["id"] for row in rows) == list(range(FILES * ROWS))
        assert all(len(row["outputs"]) == 1 and row["error"] is None for row in rows)
        assert all(row["text"] == texts[row["id"]] for row in rows)
        return {row["id"]: row["outputs"] for row in rows}

    def batches() -> list[list[int]]:
        """Returns the process of each batch, and its number of rows."""
        return [[*map(int, line.split())] for line in (tmp_path / "batches").read_text().splitlines()]

    bart, texts = save_bart(tmp_path / "bart"), sentences(FILES * ROWS)
    for form in ("parquet", "jsonl"):
        (tmp_path / form).mkdir()
    for number in range(FILES):
        rows = [{"id": id, "text": texts[id]} for id in range(number * ROWS, (number + 1) * ROWS)]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "parquet" / f"{number}.parquet")
        (tmp_path / "jsonl" / f"{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "die").touch()
    with subprocess.Popen(call("parquet")) as job:
        while len([path for path in tmp_path.glob("out-parquet-ids/*.parquet") if "pending" not in path.name]) < 3:
            assert job.poll() is None
            time.sleep(0.05)
        job.kill()
    assert (tmp_path / "died").exists()
    while any(psutil.pid_exists(process) for process, _ in batches()):  # Ray ends the workers of a driver that is gone
        time.sleep(0.05)
    (tmp_path / "go").touch()
    for form in ("parquet", "jsonl"):
        before = len(batches())
        assert subprocess.run(call(form)).returncode == 0
        written, done = outputs(form), sum(rows for _, rows in batches()[before:])
        # without those that were written before the job was killed
        assert 0 < done < FILES * ROWS if form == "parquet" else done == FILES * ROWS
    before = len(batches())
    assert subprocess.run(call("jsonl")).returncode == 0
    assert len(batches()) == before and outputs("jsonl") == written
