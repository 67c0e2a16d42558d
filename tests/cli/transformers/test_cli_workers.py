"""Workers write what one process writes, byte for byte; whatever ends one or all of them, nothing is lost or left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import transformers
from cli_language_models import save_whisper
from cli_models import WORDS, save_bart, save_gpt2, save_llama, sentences
from ray_runs import POISON, Cluster, changed, left_behind, of_runs, titles

from fastgen.batch import own_ray
from fastgen.cli.transformers.command import main

pytest.importorskip("ray")

from fastgen.batch.own_ray import OBJECT_STORE
from fastgen.testing import configured

LINES = [*sentences(70), "", " ".join(WORDS * 2), *sentences(10, seed=1)]
FLAGS = ("--bs", "4", "--beam", "2", "--output_format", "jsonl")

# One run at a time: each looks for what it has left.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "in.txt"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def expected(bart: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What one process writes."""
    output = tmp_path_factory.mktemp("expected") / "out"
    assert run(bart, source, output, *FLAGS) == 1  # a line fails
    return output.read_bytes()


@pytest.fixture(autouse=True)
def already(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What other runs on this machine have begun; behind each test nothing else is left, and no variable of Ray's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before, variables = of_runs(), of_ray()
    yield before
    assert left_behind(before) == [] and of_ray() == variables


def of_ray() -> dict[str, str]:
    """The variables of this process's environment that Ray reads."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line 33 ends the worker that generates for it: each one, or only the first where ONCE names a file."""
    monkeypatch.setenv("PYTHONPATH", changed(tmp_path, POISON))
    monkeypatch.setenv("POISON", "33")


def run(model: Path, source: Path, output: Path, *flags: object) -> int:
    return main([str(model), str(source), str(output), "--quiet", *map(str, flags)])


def test_two_workers_write_what_one_process_writes(
    bart: Path, source: Path, tmp_path: Path, expected: bytes, capsys: pytest.CaptureFixture
) -> None:
    command = [str(bart), str(source), str(tmp_path / "out"), *FLAGS, "--workers", "2", "--verbose"]
    assert main(command) == 1
    assert (tmp_path / "out").read_bytes() == expected
    assert "line 72: has 122 tokens" in (said := capsys.readouterr().err) and "82 lines in" in said


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_worker_has_as_many_threads_as_cpus(
    bart: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "    import torch\n    open(os.environ['SAID'], 'w').write(str(torch.get_num_threads()))\n"
    monkeypatch.setenv("PYTHONPATH", changed(tmp_path, code))
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    for given, threads in ((None, len(os.sched_getaffinity(0))), ("1", 1)):
        monkeypatch.delenv("OMP_NUM_THREADS") if given is None else monkeypatch.setenv("OMP_NUM_THREADS", given)
        run(bart, source, tmp_path / "out", *FLAGS, "--workers", "1", "--n_obs", "2", "--overwrite")
        assert (tmp_path / "said").read_text() == str(threads)


SLOWER = """
    import time
    generate = pipeline.SplitOnOOM.__call__
    def slower(self, batch, start=0):
        open(f"{os.environ['DONE']}/{os.getpid()}", "a").write(f"{batch.number}\\n")
        time.sleep(0.5 if len(os.sched_getaffinity(0)) == int(os.environ["SLOW"]) else 0.01)
        return generate(self, batch, start)
    pipeline.SplitOnOOM.__call__ = slower
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="compares one worker of two CPUs with two of one")
@pytest.mark.parametrize("chosen", [1, 2])
def test_auto_takes_the_number_that_is_faster(
    bart: Path, source: Path, tmp_path: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch, chosen: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", changed(tmp_path, SLOWER))
    monkeypatch.setenv("SLOW", str(chosen))  # a worker that has so many CPUs
    (tmp_path / "done").mkdir()
    monkeypatch.setenv("DONE", str(tmp_path / "done"))
    assert run(bart, source, tmp_path / "out", *FLAGS, "--workers", "auto") == 1
    assert (tmp_path / "out").read_bytes() == expected
    done = [path.read_text().split() for path in (tmp_path / "done").iterdir()]
    assert sorted(map(len, done))[: 3 - chosen] == [2] * (3 - chosen)  # those that were only measured
    assert len([each for each in done if len(each) > 2]) == chosen


def test_a_batch_goes_to_another_worker_where_one_dies(
    poisoned: None,
    bart: Path,
    source: Path,
    tmp_path: Path,
    expected: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    assert run(bart, source, tmp_path / "out", *FLAGS, "--workers", "2") == 1
    assert (tmp_path / "once").exists() and capsys.readouterr().err.count("has died at") == 1
    assert (tmp_path / "out").read_bytes() == expected


def test_a_line_that_ends_every_worker_fails_alone(
    poisoned: None, bart: Path, source: Path, tmp_path: Path, expected: bytes, capsys: pytest.CaptureFixture
) -> None:
    assert run(bart, source, tmp_path / "out", *FLAGS, "--workers", "2") == 1
    written, others = (tmp_path / "out").read_bytes().splitlines(), expected.splitlines()
    failed = json.loads(written.pop(32))
    assert failed["outputs"] == [] and "has ended 3 workers" in failed["error"]
    assert f"line 33: {failed['error']}\n" in capsys.readouterr().err
    del others[32]
    texts = [[json.loads(line)["outputs"] for line in lines] for lines in (written, others)]
    for mine, theirs in zip(
        *texts, strict=True
    ):  # its batch was cut, and scores of other cuts differ in their last digits
        assert [each["text"] for each in mine] == [each["text"] for each in theirs]


def test_a_model_that_no_worker_can_load_is_one_line(
    bart: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    code = "    from fastgen.batch.errors import InputError\n    raise InputError('MODEL x: no memory')\n"
    monkeypatch.setenv("PYTHONPATH", changed(tmp_path, code))
    assert run(bart, source, tmp_path / "out", *FLAGS, "--workers", "2") == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("error: MODEL x: no memory")
    assert not (tmp_path / "out.part").exists()


def test_a_run_goes_on_without_a_worker_that_cannot_load_the_model(
    bart: Path,
    source: Path,
    tmp_path: Path,
    expected: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    code = """
    from fastgen.batch.errors import InputError
    try:
        os.close(os.open(os.environ["ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    raise InputError("MODEL x: no memory")
"""
    monkeypatch.setenv("PYTHONPATH", changed(tmp_path, code))
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    assert run(bart, source, tmp_path / "out", *FLAGS, "--workers", "2") == 1
    assert re.search(r"goes on without worker [01]: MODEL x: no memory\n", capsys.readouterr().err)
    assert (tmp_path / "out").read_bytes() == expected


def test_samples_of_workers_are_those_of_one_process(source: Path, tmp_path: Path) -> None:
    flags = ("--causal_lm", "--do_sample", "--seed", "3", "--max_new_tokens", "6", "--bs", "8")
    gpt2 = save_gpt2(tmp_path / "gpt2")
    run(gpt2, source, tmp_path / "one.txt", *flags)
    run(gpt2, source, tmp_path / "out.txt", *flags, "--workers", "2")
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "one.txt").read_bytes()


def test_scores_of_workers_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, although each worker has captured other steps before; shards have the same test."""
    monkeypatch.setenv("FASTGEN_SHARE", "always")
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in sentences(32, longest=9)))
    llama = save_llama(tmp_path / "llama")
    flags = ("--causal_lm", "--beam", "3", "--max_new_tokens", "100", "--bs", "4", "--output_format", "jsonl")
    with configured(share="always"):
        assert run(llama, tmp_path / "in", tmp_path / "one", *flags) == 0
        assert run(llama, tmp_path / "in", tmp_path / "out", *flags, "--workers", "2") == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "one").read_bytes()


def test_speech_of_workers_is_that_of_one_process(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for number in range(5):
        samples = draw.normal(scale=0.1 * (1 + number), size=16000)
        soundfile.write(tmp_path / f"{number}.wav", samples, 16000)
    (tmp_path / "in").write_text("".join(f"{tmp_path / f'{number}.wav'}\n" for number in range(5)))
    whisper = save_whisper(tmp_path / "whisper")
    flags = ("--task", "automatic-speech-recognition", "--max_new_tokens", "6", "--bs", "2")
    assert run(whisper, tmp_path / "in", tmp_path / "one", *flags) == 0
    assert run(whisper, tmp_path / "in", tmp_path / "out", *flags, "--workers", "2") == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "one").read_bytes()


def test_batches_may_be_larger_than_the_object_store(tmp_path: Path) -> None:
    mel_bins, seconds, inputs = 128, 30, 60
    assert inputs * mel_bins * 100 * seconds * 4 > OBJECT_STORE  # float32, 100 frames a second
    whisper = save_whisper(tmp_path / "whisper", num_mel_bins=mel_bins, max_source_positions=50 * seconds)
    extractor = transformers.WhisperFeatureExtractor(feature_size=mel_bins, chunk_length=seconds)
    tokenizer = transformers.WhisperTokenizer.from_pretrained(whisper)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(whisper)
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).normal(scale=0.1, size=16000), 16000)
    (tmp_path / "in").write_text(f"{tmp_path / 'a.wav'}\n" * 3 * inputs)
    flags = ("--task", "automatic-speech-recognition", "--max_new_tokens", "4", "--bs", inputs)
    assert run(whisper, tmp_path / "in", tmp_path / "one", *flags) == 0
    assert run(whisper, tmp_path / "in", tmp_path / "out", *flags, "--workers", "2") == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "one").read_bytes()


def test_two_runs_at_once_do_not_see_each_other(bart: Path, source: Path, tmp_path: Path, expected: bytes) -> None:
    call = [sys.executable, "-m", "fastgen.cli.transformers.command", str(bart), str(source)]
    outputs = [tmp_path / "a", tmp_path / "b"]
    runs = [subprocess.Popen([*call, str(output), "--quiet", *FLAGS, "--workers", "1"]) for output in outputs]
    assert [process.wait() for process in runs] == [1, 1]
    assert [output.read_bytes() for output in outputs] == [expected, expected]


class Held:
    """The command with two workers in a process of its own, whose workers wait in batches until a file is there."""

    CODE = """
    import time
    generate = pipeline.SplitOnOOM.__call__
    def held(self, batch, start=0):
        folder = os.environ["HELD"]
        open(f"{folder}/begun-{batch.number}", "w").close()
        while batch.number >= 8 and not os.path.exists(f"{folder}/go"):
            time.sleep(0.02)
        return generate(self, batch, start)
    pipeline.SplitOnOOM.__call__ = held
"""

    def __init__(self, bart: Path, source: Path, folder: Path, *flags: str) -> None:
        self.folder, self.part = folder, folder / "out.part"
        self.environment = os.environ | {"PYTHONPATH": changed(folder, self.CODE), "HELD": str(folder)}
        call = [sys.executable, "-m", "fastgen.cli.transformers.command", bart, source, folder / "out"]
        self.process = subprocess.Popen(
            [*map(str, call), *FLAGS, "--workers", "2", *flags],
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Until both workers are held, and what was done before is written."""
        while len(list(self.folder.glob("begun-*"))) < 10 or self.part.read_bytes().count(b"\n") < 1 + 8 * 5:
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.05)


@pytest.fixture
def held(already: dict[str, str], bart: Path, source: Path, tmp_path: Path) -> Iterator[Held]:
    command = Held(bart, source, tmp_path)
    with command.process:
        try:
            command.wait()
            yield command
        finally:
            command.process.kill()


def test_a_process_whose_environment_is_overwritten_is_ended_too(tmp_path: Path) -> None:
    """Ray's agents, which change their titles: they are known by their files. The run has files there, too."""
    folder = tmp_path.resolve()
    with (
        open(folder / "log", "w") as log,
        subprocess.Popen(["sleep", "600"], stdout=log, env={}) as agent,
        subprocess.Popen([sys.executable, own_ray.__file__, str(folder)], stdin=subprocess.PIPE) as outlives,
    ):
        outlives.communicate(timeout=60)
        ended = agent.poll()
        agent.kill()
    assert ended == -signal.SIGKILL
    assert not folder.exists()


def test_kill_9_of_the_driver_of_workers(
    held: Held,
    already: dict[str, str],
    bart: Path,
    source: Path,
    tmp_path: Path,
    expected: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers and Ray end with it, and another number of workers goes on, without what was written."""
    held.process.kill()
    assert held.process.wait() == -signal.SIGKILL
    assert left_behind(already) == []
    monkeypatch.setenv("PYTHONPATH", held.environment["PYTHONPATH"])
    monkeypatch.setenv("HELD", str(tmp_path))
    for path in tmp_path.glob("begun-*"):
        path.unlink()
    (tmp_path / "go").touch()
    assert run(bart, source, tmp_path / "out", *FLAGS, "--resume", "--workers", "1") == 1
    assert (tmp_path / "out").read_bytes() == expected
    assert len(list(tmp_path.glob("begun-*"))) == 20 - 8  # batches


def test_rays_own_processes_end_in_the_middle(
    held: Held, already: dict[str, str], bart: Path, source: Path, tmp_path: Path, expected: bytes
) -> None:
    """Without its agent Ray's node ends, and with it the workers, which nobody starts again."""
    agents = [pid for pid, title in titles(already) if title.startswith("ray::DashboardAgent")]
    os.kill(min(agents), signal.SIGKILL)  # what it starts has its title, too, for a moment
    stderr = held.process.communicate()[1]
    assert held.process.returncode == 1 and "Ray's processes on this machine have ended" in stderr, stderr
    assert "--resume resumes" in stderr and left_behind(already) == []
    assert run(bart, source, tmp_path / "out", *FLAGS, "--resume") == 1
    assert (tmp_path / "out").read_bytes() == expected


def test_a_cluster_that_does_not_answer_is_named_at_once(
    bart: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert run(bart, source, tmp_path / "out", *FLAGS, "--workers", "2", "--ray", address) == 1
    assert f"--ray {address}: nothing answers there (ConnectionRefusedError" in capsys.readouterr().err
    assert run(bart, source, tmp_path / "out", *FLAGS, "--ray", address) == 2
    assert f"--ray {address} needs --workers N" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.fixture
def cluster(already: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes for a worker each, whose processes run what `Held` changes."""
    monkeypatch.setenv("PYTHONPATH", changed(tmp_path, Held.CODE))
    monkeypatch.setenv("HELD", str(tmp_path))
    found = Cluster(1, 1)
    yield found
    found.end()


def test_a_node_of_a_cluster_is_removed_in_the_middle(
    cluster: Cluster, bart: Path, source: Path, tmp_path: Path, expected: bytes
) -> None:
    held = Held(bart, source, tmp_path, "--ray", cluster.address, "--workers", "auto")
    assert "--workers auto measures the CPUs of this machine only" in held.process.communicate()[1]
    assert held.process.returncode == 2
    held = Held(bart, source, tmp_path, "--ray", cluster.address)
    with held.process:
        try:
            held.wait()
            cluster.remove_node()
            (tmp_path / "go").touch()
            stderr = held.process.communicate()[1]
        finally:
            held.process.kill()
    assert held.process.returncode == 1 and stderr.count("has died at") == 1, stderr
    assert (tmp_path / "out").read_bytes() == expected


def test_ctrl_c_finishes_the_batches_of_workers(held: Held, tmp_path: Path, expected: bytes) -> None:
    held.process.send_signal(signal.SIGINT)
    while "finishing the batch in flight" not in held.process.stderr.readline():
        assert held.process.poll() is None
    (tmp_path / "go").touch()
    stderr = held.process.communicate()[1]
    assert held.process.returncode == 130, stderr
    assert "Traceback" not in stderr and "with --resume resumes" in stderr
    assert held.part.exists() and not (tmp_path / "out").exists()


def test_a_second_sigterm_stops_workers_at_once(held: Held) -> None:
    held.process.terminate()
    while "finishing the batch in flight" not in held.process.stderr.readline():
        assert held.process.poll() is None
    held.process.terminate()
    stderr = held.process.communicate()[1]
    assert held.process.returncode == 143, stderr
    assert "Traceback" not in stderr


def test_a_sigterm_while_ray_starts_leaves_nothing(
    already: dict[str, str], bart: Path, source: Path, tmp_path: Path
) -> None:
    command = Held(bart, source, tmp_path)
    while not any("ray::" in title or "raylet" in title or "gcs_server" in title for _, title in titles(already)):
        assert command.process.poll() is None, command.process.communicate()
        time.sleep(0.05)
    command.process.terminate()
    stderr = command.process.communicate()[1]
    assert command.process.returncode == 143 and "Traceback" not in stderr, stderr
    assert list(tmp_path.glob("out*")) == []
