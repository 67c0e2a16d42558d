"""Workers write the bytes of one process; however some or all of them end, no line is lost."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile
from cli_language_models import save_whisper
from cli_models import WORDS, copy_with_template, save_bart, save_gpt2, save_llama, sentences
from python_process import run_code
from ray_runs import Cluster, changed

from fastgen.batch.errors import InputError
from fastgen.cli.transformers.args import parse_arguments
from fastgen.cli.transformers.command import main
from fastgen.testing import configured

pytest.importorskip("ray")
from fastgen.batch import workers

LINES = [*sentences(70), "", " ".join(WORDS * 2), *sentences(10, seed=1)]
FLAGS = ("--bs", "4", "--beam", "2", "--output_format", "jsonl")
# Line 33 ends the worker that generates for it, that many times.
POISON = """
import os
generate = SplitOnOOM.__call__
def ending(self, batch, start=0):
    if 33 in [item.line.number for item in batch.items]:
        with open("{folder}/deaths", "a") as deaths:
            dies = deaths.tell() < {most}
            deaths.write("x" * dies)
        dies and os._exit(9)
    return generate(self, batch, start)
SplitOnOOM.__call__ = ending
"""
# From the ninth batch on, workers wait until a file exists.
HELD = """
import os, time
generate = SplitOnOOM.__call__
def held(self, batch, start=0):
    open(f"{folder}/begun-{{batch.number}}", "w").close()
    while batch.number >= 8 and not os.path.exists("{folder}/go"):
        time.sleep(0.02)
    return generate(self, batch, start)
SplitOnOOM.__call__ = held
"""
UNLOADABLE = """
from fastgen.batch.errors import InputError
with open("{folder}/loads", "a") as loads:
    fails = loads.tell() < {most}
    loads.write("x" * fails)
if fails:
    raise InputError("MODEL x: bad")
"""

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.xdist_group("ray")]


class Runs:
    """A model, an INPUT, the output of one process, and a cluster of two nodes whose workers run a `change`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.source = folder, save_bart(folder / "bart"), folder / "in.txt"
        self.source.write_text("".join(f"{line}\n" for line in LINES))
        self.path = changed(folder, "")
        self.nodes = Cluster(1, 1, PYTHONPATH=self.path, OMP_NUM_THREADS="1")
        self.cluster = ("--workers", "2", "--ray", self.nodes.address)
        assert self.run(folder / "expected", *FLAGS) == 1  # a line fails
        self.expected = (folder / "expected").read_bytes()

    def change(self, code: str, **values: object) -> None:
        changed(self.folder, code.format(**values) if values else code)

    def run(self, output: Path, *flags: str, model: Path | None = None, source: Path | None = None) -> int:
        return main([str(model or self.model), str(source or self.source), str(output), "--quiet", *flags])


@pytest.fixture(scope="module")
def runs_of_module(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.nodes.end()


@pytest.fixture
def runs(runs_of_module, monkeypatch):
    """Ray's files are in a folder; it has no token, which it would write into the user's folder."""
    folder = tempfile.mkdtemp(prefix="fastgen-ray-", dir="/tmp")  # paths of sockets are short
    for name, value in {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    yield runs_of_module
    runs_of_module.change("")
    shutil.rmtree(folder, ignore_errors=True)


def save_recordings(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    for number in range(5):
        samples = draw.normal(scale=0.1 * (1 + number), size=16000)
        soundfile.write(folder / f"{number}.wav", samples, 16000)
    (folder / "in").write_text("".join(f"{folder / f'{number}.wav'}\n" for number in range(5)))
    return folder / "in"


def save_dated(folder: Path) -> Path:
    return copy_with_template(
        save_gpt2(folder / "plain"), folder, "word{{ strftime_now('%-d') }} {{ messages[0]['content'] }}"
    )


@pytest.mark.parametrize(
    ("save", "flags"),
    [
        (save_gpt2, "--causal_lm --do_sample --seed 3 --max_new_tokens 6 --bs 8"),
        (save_llama, "--causal_lm --beam 3 --max_new_tokens 100 --bs 4 --output_format jsonl --n_obs 32"),
        (save_whisper, "--task automatic-speech-recognition --max_new_tokens 6 --bs 2"),
        (save_dated, "--causal_lm --chat --date 2001-01-02 --max_new_tokens 6 --bs 8"),
    ],
    ids=["samples", "scores", "speech", "date"],
)
def test_workers_write_what_one_process_writes(save, flags, runs, tmp_path):
    """Scores are bit-equal, although each worker has captured other steps before."""
    files = {"model": save(tmp_path / "model"), "source": save_recordings(tmp_path) if "--task" in flags else None}
    runs.change("import fastgen\nfastgen.configure(share='always')")
    with configured(share="always"):
        status = runs.run(tmp_path / "one", *flags.split(), **files)
    assert runs.run(tmp_path / "out", *flags.split(), *runs.cluster, **files) == status
    assert (tmp_path / "out").read_bytes() == (tmp_path / "one").read_bytes()


def test_workers_of_a_private_ray_write_the_same(runs, tmp_path, capsys):
    command = [str(runs.model), str(runs.source), str(tmp_path / "out"), *FLAGS, "--workers", "2", "--verbose"]
    assert main(command) == 1
    assert (tmp_path / "out").read_bytes() == runs.expected
    stderr = capsys.readouterr().err
    assert "line 72: has 122 tokens" in stderr and "82 lines in" in stderr


def test_a_worker_has_the_requested_threads():
    code = "from fastgen.batch.workers import Worker; Worker(None, 2); import torch"
    assert run_code(f"{code}; print(torch.get_num_threads())", OMP_NUM_THREADS="1").strip() == "2"


def test_auto_is_a_worker_for_each_gpu_or_four_cpus(monkeypatch):
    args = parse_arguments(["MODEL", "in", "out", "--workers", "auto"])
    for gpus, cpus, count in ((3, 16, 3), (0, 17, 4), (0, 2, 1)):
        monkeypatch.setattr(workers, "usable_cpus", lambda cpus=cpus: cpus)
        assert workers.count_workers(args, gpus) == count
    with pytest.raises(InputError, match="--workers auto counts the GPUs of a cluster"):
        workers.count_workers(parse_arguments(["MODEL", "in", "out", "--workers", "auto", "--ray", "a:1"]), 0)


def test_a_batch_is_tried_again_if_its_worker_dies(runs, tmp_path, capsys):
    runs.change(POISON, folder=tmp_path, most=1)
    assert runs.run(tmp_path / "out", *FLAGS, *runs.cluster) == 1
    assert (tmp_path / "out").read_bytes() == runs.expected
    assert (tmp_path / "deaths").read_text() == "x" and capsys.readouterr().err.count("crashed at lines") == 1


def test_a_line_that_ends_every_worker_fails_alone(runs, tmp_path, capsys):
    runs.change(POISON, folder=tmp_path, most=9)
    assert runs.run(tmp_path / "out", *FLAGS, *runs.cluster) == 1
    assert (tmp_path / "deaths").read_text() == "xxxx"  # four lines twice, two lines, one line
    written, others = (tmp_path / "out").read_bytes().splitlines(), runs.expected.splitlines()
    failed = json.loads(written.pop(32))
    del others[32]
    assert failed["outputs"] == [] and "crashes every worker that generates for it" in failed["error"]
    assert f"line 33: {failed['error']}\n" in capsys.readouterr().err
    # Texts only: the batch was cut, and scores of other cuts differ in their last digits.
    mine, theirs = ([json.loads(line)["outputs"] for line in lines] for lines in (written, others))
    assert [[each["text"] for each in line] for line in mine] == [[each["text"] for each in line] for line in theirs]


@pytest.mark.parametrize("most", [1, 2])
def test_a_worker_without_a_model_is_left_out(most, runs, tmp_path, capsys):
    """Its error ends the run if no worker is left."""
    runs.change(UNLOADABLE, folder=tmp_path, most=most)
    status, stderr = runs.run(tmp_path / "out", *FLAGS, *runs.cluster), capsys.readouterr().err
    assert re.search("worker [01] is left out: MODEL x: bad\n", stderr)
    if most == 1:
        assert status == 1 and (tmp_path / "out").read_bytes() == runs.expected
    else:
        assert status == 2 and stderr.endswith("error: MODEL x: bad\n") and not list(tmp_path.glob("out*"))


def test_a_cluster_that_does_not_answer_is_named(runs, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert runs.run(tmp_path / "out", *FLAGS, "--workers", "2", "--ray", address) == 1
    assert f"--ray {address}: nothing answers there (ConnectionRefusedError" in capsys.readouterr().err
    assert runs.run(tmp_path / "out", *FLAGS, "--ray", address) == 2
    assert f"--ray {address} needs --workers N" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


class Held:
    """The command in its own process, whose two workers are held."""

    def __init__(self, runs: Runs, folder: Path, *flags: str) -> None:
        runs.change(HELD, folder=folder)
        self.folder, self.expected = folder, runs.expected
        call = [sys.executable, "-m", "fastgen.cli.transformers.command", runs.model, runs.source, folder / "out"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", runs.path)
            command = [*map(str, call), *FLAGS, *(flags or ("--workers", "2"))]
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Waits until both workers are held, and earlier batches are written."""
        part = self.folder / "out.part"
        while len(list(self.folder.glob("begun-*"))) < 10 or part.read_bytes().count(b"\n") < 1 + 8 * 5:
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.05)

    def of_ray(self, name: str) -> psutil.Process:
        """Waits until the command has started a process of Ray."""
        while True:
            assert self.process.poll() is None, self.process.stderr.read()
            for child in psutil.Process(self.process.pid).children(recursive=True):
                if child.name() == name:
                    return child
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        """Returns the exit status and stderr."""
        stderr = self.process.communicate()[1]
        assert "Traceback" not in stderr
        return self.process.returncode, stderr


@pytest.fixture
def held(runs, tmp_path):
    """Holds a run with a private Ray."""
    command = Held(runs, tmp_path)
    with command.process:
        yield command
        command.process.kill()


@pytest.fixture
def held_on_cluster(runs, tmp_path):
    command = Held(runs, tmp_path, *runs.cluster)
    with command.process:
        yield command
        command.process.kill()


def test_a_run_survives_the_loss_of_a_node(runs, held_on_cluster, tmp_path):
    held_on_cluster.wait()
    runs.nodes.remove_node()
    (tmp_path / "go").touch()
    status, stderr = held_on_cluster.ended()
    runs.nodes.add_node()
    assert status == 1 and stderr.count("crashed at") == 1, stderr
    assert (tmp_path / "out").read_bytes() == runs.expected


@pytest.mark.parametrize(("signals", "status"), [([signal.SIGINT], 130), ([signal.SIGTERM] * 2, 143)])
def test_a_signal_lets_batches_finish_and_a_second_stops_them(signals, status, held_on_cluster, tmp_path):
    held_on_cluster.wait()
    held_on_cluster.process.send_signal(signals[0])
    while "finishing the batch in flight" not in held_on_cluster.process.stderr.readline():
        assert held_on_cluster.process.poll() is None
    if signals[1:]:
        held_on_cluster.process.send_signal(signals[1])
    else:
        (tmp_path / "go").touch()
    ended = held_on_cluster.ended()
    assert ended[0] == status, ended
    assert (tmp_path / "out.part").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_run_whose_ray_ends_can_be_resumed(name, runs, held, tmp_path):
    """If it loses a node, the lost workers are seen first, or that no node is alive."""
    held.wait()
    held.of_ray(name).kill()
    status, stderr = held.ended()
    messages = ["Ray's processes have ended"] + ["no worker is left"] * (name == "raylet")
    assert status == 1 and any(message in stderr for message in messages) and "--resume" in stderr, stderr
    assert runs.run(tmp_path / "out", *FLAGS, "--resume") == 1
    assert (tmp_path / "out").read_bytes() == runs.expected


def test_a_sigterm_while_ray_starts_ends_it(held, tmp_path):
    raylet = held.of_ray("raylet")
    held.process.terminate()
    assert held.ended()[0] == 143
    raylet.wait(60)
    assert list(tmp_path.glob("out*")) == []
