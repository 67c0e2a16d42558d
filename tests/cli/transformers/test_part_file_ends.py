"""Whatever ends a run, --resume completes OUTPUT as if nothing had happened."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from python_process import REPOSITORY, run_code, run_python

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.resume.part_file import PartFile, check_part

SIGNATURE = {"--beam": 4, "--do_sample": False, "INPUT's content": "sha256:" + "0" * 64}

# Records that need the random numbers of all records before them, as samples do.
JOB = """
import random, sys
from pathlib import Path
from fastgen.cli.transformers.resume.part_file import PartFile, failures_if_complete

def job(path, total, longest=40):
    if failures_if_complete(Path(path), {"--total": total}, overwrite=False) is not None:
        return
    with PartFile.resume(Path(path), {"--total": total}) as part:
        draw = random.Random(1)
        if part.state is None:
            part.keep_state(repr(draw.getstate()))
        else:
            draw.setstate(eval(part.state))
        while part.records < total:
            number = min(draw.randint(1, 4), total - part.records)
            first = part.records
            texts = [f"{first + i} {draw.random()} {'x' * draw.randint(0, longest)}" for i in range(number)]
            part.write("".join(text + chr(10) for text in texts).encode(), number)
            part.keep_state(repr(draw.getstate()))
        part.complete()
"""
# Ends the process before the K-th line of these modules is run, for every K, and then completes the job.
CRASHES = (
    JOB
    + """
import gzip, os, shutil
from fastgen.cli.transformers.resume import locked_file
from fastgen.cli.transformers.resume import part_file
from fastgen.cli.transformers.files import whole_file

FILES = [module.__file__ for module in (locked_file, part_file, whole_file)]

def in_child(action):
    if (child := os.fork()) == 0:
        try:
            action()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def crash_at(line):
    left = line
    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os._exit(9)
        return trace
    sys.settrace(trace)
    job(output, 7)

folder, start = Path(sys.argv[1]), Path(sys.argv[2])
job(folder / "whole", 7)
whole = (folder / "whole").read_bytes()
output = folder / "work" / sys.argv[3]
read = gzip.open if output.suffix == ".gz" else open
# The last ones of a run that was killed after its OUTPUT had its name.
ENDS = ["", ".run.json", ".part.json", ".part.json.new"] + [".part"] * (output.suffix == ".gz")
line, status = 0, 9
while status == 9:
    line += 1
    shutil.rmtree(output.parent, ignore_errors=True)
    shutil.copytree(start, output.parent)
    status = in_child(lambda: crash_at(line))
    part = output.with_name(output.name + ".part")
    if status == 9 and part.exists():
        assert whole.startswith(part.read_bytes()), line
    assert in_child(lambda: job(output, 7)) == 0, line
    assert read(output, "rb").read() == whole, line
    names = [output.name + end for end in ENDS]
    assert set(names[:2]) <= set(os.listdir(output.parent)) <= set(names), (line, os.listdir(output.parent))
assert status == 0
print(line - 1)
"""
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_part_that_another_run_writes_is_refused_until_that_run_is_killed(tmp_path: Path) -> None:
    """Even where processes that it has forked live on: they are not the ones that write."""
    code = JOB + (
        "import os, time\n"
        f"part = PartFile.create(Path({str(tmp_path / 'out')!r}), {SIGNATURE!r})\n"
        "part.write(b'one\\n', 1)\n"
        "part.keep_state('a state')\n"
        "child = os.fork()\n"
        "if child:\n    print(child, flush=True)\n"
        "time.sleep(1e6)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE
    )
    child = int(run.stdout.readline())
    try:
        for start in (lambda: PartFile.resume(tmp_path / "out", SIGNATURE), lambda: check_part(tmp_path / "out", True)):
            with pytest.raises(InputError, match=r"another run is writing to .*out\.part"):
                start()
        run.kill()
        run.wait()
        with PartFile.resume(tmp_path / "out", SIGNATURE) as part:
            assert part.records == 1
    finally:
        run.kill()
        os.kill(child, signal.SIGKILL)
        run.stdout.close()
        run.wait()


@pytest.mark.parametrize(
    ("start", "name"),
    [
        ("nothing", "out"),
        ("killed in the middle", "out"),
        ("killed when it was complete", "out"),
        ("killed in the middle", "out.gz"),
    ],
)
def test_killed_before_any_line_of_these_modules_a_run_can_be_resumed(tmp_path: Path, start: str, name: str) -> None:
    folder = tmp_path / "start"
    folder.mkdir()
    if start != "nothing":
        run_code(JOB + f"job({str(tmp_path / 'before')!r}, 7)")
        records = (tmp_path / "before").read_bytes().splitlines(keepends=True)
        run_code(
            JOB + f"part = PartFile.create(Path({str(folder / name)!r}), {{'--total': 7}})\n"
            "part.keep_state(repr(random.Random(1).getstate()))\n"
            f"part.write({b''.join(records[:2])!r}, 2)\n"
        )
        (folder / f"{name}.part.json.new").write_text("half")
        with (folder / f"{name}.part").open("ab") as file:
            file.write(records[2][:4])
    if start == "killed when it was complete":
        (folder / "out.part").unlink()
        (tmp_path / "before").rename(folder / "out")
        (tmp_path / "before.run.json").rename(folder / "out.run.json")
    done = run_python("-c", CRASHES, str(tmp_path), str(folder), name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > (10 if start == "killed when it was complete" else 100)


def test_killed_at_random_moments_and_resumed_a_run_writes_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    total, longest = 1500, 100_000
    # It says when it has written, and waits where the pipe is full: so many writes behind a reader it is at most.
    noisy = "write = PartFile.write\nPartFile.write = lambda *args: (write(*args), print(' ' * 8000, flush=True))\n"
    run_code(JOB + f"job({str(tmp_path / 'whole')!r}, {total}, {longest})")
    code = JOB + noisy + f"job({str(tmp_path / 'out')!r}, {total}, {longest})"
    draw, kills, most = random.Random(0), 0, 0
    while True:
        run = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if kills < 25:
            for _ in range(draw.randint(0, 20)):
                run.stdout.readline()
            run.kill()
        _, errors = run.communicate()
        assert run.returncode in (0, -signal.SIGKILL), errors.decode()
        if run.returncode == 0:
            break
        kills += 1
        part = tmp_path / "out.part"
        most = max(most, part.stat().st_size if part.exists() else 0)
    assert kills == 25 and most > 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert {"out", "out.run.json"} <= set(names(tmp_path)) and not part.exists()


def test_a_full_disk_leaves_whole_records_and_more_room_completes_them(tmp_path: Path) -> None:
    """A limit on the size of files ends a write in its middle, as a full disk does."""
    code = JOB + (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))\n"
        "try:\n"
        f"    job({str(tmp_path / 'out')!r}, 300, 500)\n"
        "except OSError as error:\n"
        "    print(error.errno, error.filename)\n"
    )
    part = tmp_path / "out.part"
    # 5000 is too small for the state of the random numbers, 50000 for the records.
    stopped = [(5000, f"{part}.json.new"), (50_000, str(part))]
    for limit, filename in stopped:
        assert run_code(code.replace("LARGEST", str(limit))) == f"{errno.EFBIG} {filename}\n"
        assert part.exists() == (limit == 50_000)
    data = part.read_bytes()
    assert 47_000 < len(data) <= 50_000 and data.endswith(b"\n")
    assert data.count(b"\n") == json.loads((tmp_path / "out.part.json").read_bytes())["records"]
    assert names(tmp_path) == ["out.part", "out.part.json"]
    run_code(JOB + f"job({str(tmp_path / 'out')!r}, 300, 500)\njob({str(tmp_path / 'whole')!r}, 300, 500)")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
