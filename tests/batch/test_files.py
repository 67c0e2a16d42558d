"""INPUT is read byte for byte in little memory, even from a stream that can be read only once."""

import bz2
import gzip
import hashlib
import lzma
import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from backports import zstd
from cli_loop import command, write_lines
from python_process import REPOSITORY, run_python

from fastgen.batch.errors import InputError
from fastgen.batch.files import READ_BLOCK, Survey, is_stream, read_chunks, survey
from fastgen.batch.metrics import read_references

CRS = [b"one\rtwo\r\rthree", b"one\rtwo\r", b"\r\r", b"x" * 70_000 + b"\none\rtwo\n", b"one\r", b"one\rtwo\n"]
CONTENTS = [
    b"",
    b"one\n",
    b"one",
    b"\n",
    b"\n\n",
    b"one\r\n\r\ntwo\x0b\x0c\x1c\xe2\x80\xa8\n\xff\xfe\n",
    b"\xef\xbb\xbfone\ntwo",
    b"x" * 5_000_000 + b"\n" + b"y" * 3_000_000,
    b"".join(b"%d\n" % number for number in range(30_000)),
]


def lines_of(data: bytes) -> list[bytes]:
    """Returns the lines that wc and editors show."""
    return data.removesuffix(b"\n").split(b"\n") if data else []


def read_all(path: Path, **limits: int) -> list[tuple[int, bytes]]:
    return [(line.number, line.raw) for chunk in read_chunks(str(path), **limits) for line in chunk]


@contextmanager
def fifo(path: Path, *pieces: bytes) -> Iterator[Path]:
    """A pipe into which a thread writes; the unread rest is dropped."""
    os.mkfifo(path)

    def write() -> None:
        with open(path, "wb", buffering=0) as file:
            try:
                for piece in pieces:
                    file.write(piece)
            except BrokenPipeError:
                pass

    thread = threading.Thread(target=write)
    thread.start()
    yield path
    thread.join()


@pytest.mark.parametrize("data", CONTENTS, ids=range(len(CONTENTS)))
def test_every_byte_between_line_feeds_is_a_line(tmp_path, data):
    path = tmp_path / "in"
    path.write_bytes(data)
    expected = list(enumerate(lines_of(data), start=1))
    assert read_all(path) == expected
    assert survey(str(path)) == Survey(len(expected), hashlib.sha256(data).hexdigest())
    assert not is_stream(str(path))
    with fifo(tmp_path / "pipe", data) as pipe:
        assert is_stream(str(pipe))
        assert read_all(pipe) == expected


def test_a_file_of_lone_crs_is_lines(tmp_path):
    expected = [[b"one", b"two", b"", b"three"], [b"one", b"two"], [b"", b""], None, [b"one\r"], [b"one\rtwo"]]
    for data, lines in zip(CRS, expected, strict=True):
        (tmp_path / "in").write_bytes(data)
        texts = [raw for _, raw in read_all(tmp_path / "in")]
        assert texts == (lines_of(data) if lines is None else lines)
        assert survey(str(tmp_path / "in")) == Survey(len(texts), hashlib.sha256(data).hexdigest())
    many = b"\r".join(b"%d" % number for number in range(30_000))
    (tmp_path / "in").write_bytes(many)
    assert [raw for _, raw in read_all(tmp_path / "in")] == many.split(b"\r")
    assert survey(str(tmp_path / "in")).lines == 30_000
    with fifo(tmp_path / "pipe", many[:4], many[4:9], many[9:]) as pipe:
        assert [raw for _, raw in read_all(pipe)] == many.split(b"\r")
    with fifo(tmp_path / "crlf", b"one\r", b"\ntw", b"o\r\n") as pipe:
        assert [raw for _, raw in read_all(pipe)] == [b"one\r", b"two\r"]


def test_the_lines_up_to_n_obs_are_read(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(CONTENTS[-1])
    everything = list(enumerate(lines_of(CONTENTS[-1]), start=1))
    for n_obs in (1, 64, 65, 7, 25_000, 40_000, None):
        assert read_all(path, n_obs=n_obs) == everything[:n_obs]


def test_chunks_are_limited_by_lines_and_by_bytes(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"".join(b"x" * size + b"\n" for size in [10] * 20 + [60, 60, 500, 10, 10]))
    sizes = [[len(line.raw) for line in chunk] for chunk in read_chunks(str(path), lines=8)]
    assert sizes == [[10] * 8, [10] * 8, [10] * 4 + [60, 60, 500, 10], [10]]
    path.write_bytes((b"x" * 5000 + b"\n") * 100)
    chunks = list(read_chunks(str(path), lines=99))
    assert sum(map(len, chunks)) == 100 and max(map(len, chunks)) <= READ_BLOCK // 5000 + 1


def test_lines_of_a_slow_stream_are_passed_on_as_they_arrive(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        chunks = read_chunks(str(tmp_path / "pipe"), n_obs=3)
        for data, expected in ((b"one\ntw", [b"one"]), (b"o\nthree\nfour", [b"two", b"three"])):
            os.write(writer, data)
            assert [line.raw for line in next(chunks)] == expected
        assert next(chunks, None) is None  # although the pipe is open
    finally:
        os.close(writer)


def test_only_the_beginning_of_a_long_line_is_kept(tmp_path):
    data = b"one\n" + b"x" * 50_000_000 + b"\ntwo\n" + b"y" * 300_000 + b"\n" + b"z" * 300_001
    (tmp_path / "in").write_bytes(data)
    tracemalloc.start()
    lines = [line for chunk in read_chunks(str(tmp_path / "in"), longest=300_000) for line in chunk]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = [b"one", b"x" * 300_000, b"two", b"y" * 300_000, b"z" * 300_000]
    assert [line.raw for line in lines] == expected
    assert [line.cut for line in lines] == [False, True, False, False, True]
    assert peak < 3 << 20


def test_memory_stays_flat_on_a_stream_of_any_size(tmp_path):
    block = b"".join(b"x" * (number % 500) + b"\n" for number in range(1000))
    with fifo(tmp_path / "pipe", *[block] * 100) as pipe:
        lines = 0
        tracemalloc.start()
        for chunk in read_chunks(str(pipe)):
            lines += len(chunk)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert lines == 100_000 and peak < 2 << 20
    (tmp_path / "in").write_bytes(block * 100)
    tracemalloc.start()
    surveyed = survey(str(tmp_path / "in"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert surveyed.lines == 100_000 and peak < 4 << 20


def test_an_unreadable_input_is_named(tmp_path):
    for name, message in (("none", "there is no such file"), ("", "Is a directory")):
        path = str(tmp_path / name)
        assert not is_stream(path)
        with pytest.raises(InputError, match=f"INPUT {path}: {message}"):
            survey(path)
        with pytest.raises(InputError, match=f"--reference_path {path}: {message}"):
            read_references("--reference_path", path)
    assert is_stream("/dev/null") and is_stream("-")


def test_a_bad_reference_is_named_by_its_line(tmp_path):
    path = tmp_path / "references"
    path.write_bytes("\ufeffeins\r\nzwei \n\u2028\n\nfünf".encode())
    assert read_references("--reference_path", str(path)) == ["eins", "zwei ", "\u2028", "", "fünf"]
    path.write_bytes(b"")
    assert read_references("--reference_path", str(path)) == []
    path.write_bytes(b"x" * 100_000 + b"\ntwo\nthr\xffee\n")
    with pytest.raises(InputError, match=f"--reference_path {path}: line 3 is not UTF-8"):
        read_references("--reference_path", str(path))


def test_references_can_be_a_field_of_records(tmp_path):
    path = tmp_path / "records"
    path.write_text('\ufeff{"a": {"b": "one"}}\r\n\n{"a": {"b": "two"}}', encoding="utf-8")
    assert read_references("INPUT", str(path), "a.b") == ["one", "", "two"]
    for record, message in (
        ('{"a": 1}', 'has no field "a.b"'),
        ('{"a": {"b": 1}}', "has a number"),
        ("one", "is not JSON"),
    ):
        path.write_text('{"a": {"b": "one"}}\n' + record)
        with pytest.raises(InputError, match=f"INPUT {path}: line 2 {message}"):
            read_references("INPUT", str(path), "a.b")


MODULES = [("gz", gzip, "gzip"), ("xz", lzma, "xz"), ("bz2", bz2, "bz2"), ("zst", zstd, "zst")]


@pytest.mark.parametrize(("end", "module", "kind"), MODULES)
def test_compressed_files_and_urls_are_read_as_their_contents(tmp_path, end, module, kind):
    plain, packed = tmp_path / "in", tmp_path / f"in.{end}"
    for data in CONTENTS:
        plain.write_bytes(data)
        half = len(data) // 2
        packed.write_bytes(module.compress(data[:half]) + module.compress(data[half:]))  # several members are allowed
        assert survey(str(packed)) == survey(str(plain)) == survey(f"file://{packed}")
        assert read_all(packed) == read_all(plain)
    with pytest.raises(InputError, match=r"INPUT nothing://at\.all: "):
        survey("nothing://at.all")


@pytest.mark.parametrize(("end", "module", "kind"), MODULES)
def test_a_part_of_a_compressed_file_is_one_clear_line(tmp_path, capsys, end, module, kind):
    packed, lines = tmp_path / f"in.{end}", tmp_path / "lines"
    whole = module.compress(random.Random(0).randbytes(100_000))
    parts = [whole[: len(whole) // 2], whole[:-9], whole[:3], whole + whole[:30]]
    for data in (b"plain text\n", whole[:5000] + b"x" * 50 + whole[10_000:], *parts):
        packed.write_bytes(data)
        with pytest.raises(InputError, match=f"{packed}: is not a valid {kind} file, or only a part of one [(][A-Z]"):
            survey(str(packed))
    lines.write_bytes(b"word1\n" * 1000)
    packed.write_bytes(module.compress(lines.read_bytes())[:-9])
    capsys.readouterr()
    assert command("demo", packed, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"is not a valid {kind} file" in error


@pytest.mark.parametrize(("end", "module", "kind"), [each for each in MODULES if each[0] in ("gz", "zst")])
def test_junk_behind_a_compressed_file_is_no_silent_end(tmp_path, end, module, kind):
    packed = tmp_path / f"in.{end}"
    packed.write_bytes(module.compress(b"one\n") + b"two\n")
    with pytest.raises(InputError, match=f"{packed}: is not a valid {kind} file, or only a part of one"):
        survey(str(packed))


READ_STDIN = r"""
import threading, time
from fastgen.batch.files import read_chunks

came = threading.Event()

def read():
    for chunk in read_chunks("-"):
        print(*(line.raw for line in chunk), sep="\n", flush=True)
        came.set()
"""


def test_a_closed_standard_input_is_named():
    call = ["sh", "-c", f"{sys.executable} -c '{READ_STDIN}read()' <&-"]
    done = subprocess.run(call, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True)
    assert b"INPUT -: standard input is closed" in done.stderr


def reading(code: str) -> subprocess.Popen:
    """Starts a process with the definitions of READ_STDIN, whose streams are pipes."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-c", READ_STDIN + code], env=environment, stdin=-1, stdout=-1, stderr=-1)


def test_a_process_ends_while_a_thread_waits_for_standard_input():
    with reading("threading.Thread(target=read, daemon=True).start()\ncame.wait()\ntime.sleep(0.5)\n") as run:
        run.stdin.write(b"one\ntw")
        run.stdin.flush()
        assert run.wait() == 0
        assert run.stdout.read() == b"b'one'\n" and run.stderr.read() == b""


def test_a_non_blocking_pipe_is_waited_for():
    """An empty read is not the end of it."""
    with reading("import os\nos.set_blocking(0, False)\nprint('reads', flush=True)\nread()\n") as run:
        assert run.stdout.readline() == b"reads\n"
        time.sleep(0.5)  # so that one read was empty
        run.stdin.write(b"one\n")
        run.stdin.close()
        assert run.stdout.read() == b"b'one'\n"


def test_files_are_checked_and_runs_signed_without_torch(tmp_path, bart):
    code = (
        "import sys\nfrom fastgen.cli.transformers.args import parse_arguments\n"
        "from fastgen.batch.run import check_files\nfrom fastgen.batch.signature import signature\n"
        "import fastgen.batch.journal\n"
        "args = parse_arguments([sys.argv[1], sys.argv[2], sys.argv[2] + '.out'])\nsignature(args, check_files(args))\n"
        "assert 'torch' not in sys.modules and 'fsspec' not in sys.modules\n"
    )
    done = run_python("-c", code, str(bart), str(write_lines(tmp_path / "in", ["one"])))
    assert done.returncode == 0, done.stderr
