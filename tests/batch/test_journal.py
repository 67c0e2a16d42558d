"""OUTPUT.part is a journal: however a run ends, --resume completes the same OUTPUT."""

import bz2
import errno
import gzip
import json
import lzma
import random
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import transformers
from backports import zstd
from cli_journal import job
from cli_loop import command, write_lines
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from python_process import REPOSITORY, run_code, run_python

from fastgen.batch import part as module
from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError
from fastgen.batch.files import check_writable, opened, write_whole
from fastgen.batch.journal import Journal
from fastgen.batch.part import Entry
from fastgen.cli.transformers.args import as_flag

SIGNATURE = {"--beam": 4, "--do_sample": False, "INPUT's content": "sha256:" + "0" * 64}


def entry(number: int, failed: bool = False) -> Entry:
    return Entry(number, 3 + number % 5, ["long", None][number % 2], None, failed, f"récord {number}\n".encode())


def journal_of(output: Path | str, resume: bool = False, overwrite: bool = False) -> Journal:
    return Journal(BatchConfig("model", "in", str(output), resume=resume, overwrite=overwrite, named=as_flag))


def begin(path: Path | str, signature: dict = SIGNATURE, resume: bool = False, overwrite: bool = False) -> Journal:
    journal = journal_of(path, resume, overwrite)
    try:
        journal.begin(signature)
    except BaseException:
        journal.leave()
        raise
    return journal


def left(path: Path, *batches: list[int], failed: int | None = None) -> Path:
    """Returns the journal of a run that ended after these batches."""
    journal = begin(path)
    for numbers in batches:
        journal.write([entry(number, number == failed) for number in numbers])
    journal.leave()
    return path.with_name(path.name + ".part")


def complete(path: Path | str, total: int, **how: bool) -> None:
    journal = begin(path, **how)
    written = {number for number in range(1, total + 1) if journal.entry(number)}
    journal.write([entry(number) for number in range(1, total + 1) if number not in written])
    journal.complete()
    journal.leave()


def text(total: int) -> bytes:
    return b"".join(entry(number).data for number in range(1, total + 1))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_output_appears_in_order_and_other_files_are_removed(tmp_path):
    journal = begin(tmp_path / "out")
    journal.write([entry(3), entry(1)])
    assert names(tmp_path) == ["out.part", "out.part.lock"]
    journal.write([entry(2, failed=True)])
    assert (journal.records, journal.failures, journal.generated) == (3, 1, 2)
    journal.complete()
    journal.leave()
    assert names(tmp_path) == ["out", "out.run.json"] and (tmp_path / "out").read_bytes() == text(3)
    summary = json.loads((tmp_path / "out.run.json").read_text())
    assert (summary["signature"], summary["records"], summary["failures"]) == (SIGNATURE, 3, 1)


def test_written_lines_are_known_and_empty_journals_are_removed(tmp_path):
    left(tmp_path / "out", [4, 1], [2], failed=2)
    journal = begin(tmp_path / "out", resume=True)
    assert (journal.records, journal.failures) == (3, 1)
    assert [journal.entry(number) for number in range(1, 6)] == [entry(1), entry(2, True), None, entry(4), None]
    journal.leave()
    assert names(tmp_path) == ["out.part"]
    complete(tmp_path / "out", 5, resume=True)
    assert (tmp_path / "out").read_bytes() == text(5)
    begin(tmp_path / "other").leave()
    assert names(tmp_path) == ["out", "out.run.json"]


def test_overwrite_replaces_an_output_only_when_complete(tmp_path):
    (tmp_path / "out").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match=r"OUTPUT .*out already exists .*--overwrite"):
            begin(tmp_path / "out", resume=resume)
    assert names(tmp_path) == ["out"]
    journal = begin(tmp_path / "out", overwrite=True)
    journal.write([entry(1)])
    journal.leave()
    with pytest.raises(InputError, match="already exists"):
        begin(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_text() == "mine"
    complete(tmp_path / "out", 1, resume=True, overwrite=True)
    assert (tmp_path / "out").read_bytes() == text(1)


def test_an_output_that_appears_during_a_run_is_not_replaced(tmp_path):
    journal = begin(tmp_path / "out")
    journal.write([entry(1)])
    (tmp_path / "out").write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        journal.complete()
    journal.leave()
    assert (tmp_path / "out").read_text() == "mine" and (tmp_path / "out.part").exists()


def test_a_complete_output_is_recognized_until_a_change(tmp_path):
    output = tmp_path / "out"
    complete(output, 2)
    for overwrite in (False, True):
        journal = journal_of(output, True, overwrite)
        assert journal.check(SIGNATURE) and journal.completed["records"] == 2
        journal.leave()
    other = SIGNATURE | {"--beam": 5}
    journal = journal_of(output, True, False)
    with pytest.raises(InputError, match=r"already exists .*; it was made differently: --beam was 4 and is 5 now"):
        journal.check(other)
    journal.leave()
    journal = journal_of(output, True, True)
    assert not journal.check(other)
    journal.leave()
    output.write_text("changed\n")
    with pytest.raises(InputError, match=r"already exists .*; its run is unknown"):
        journal_of(output, True, False)
    complete(output, 2, overwrite=True)
    assert output.read_bytes() == text(2)


@pytest.mark.parametrize(("end", "module"), [("gz", gzip), ("bz2", bz2), ("xz", lzma), ("zst", zstd)])
def test_compressed_outputs_of_equal_records_are_equal(tmp_path, end, module):
    left(tmp_path / f"out.{end}", [2])
    complete(tmp_path / f"out.{end}", 3, resume=True)
    complete(tmp_path / f"other.{end}", 3)
    written = (tmp_path / f"out.{end}").read_bytes()
    assert written == (tmp_path / f"other.{end}").read_bytes()
    assert module.decompress(written) == text(3)


def test_missing_packages_for_files_are_named_early(monkeypatch):
    monkeypatch.setattr("fastgen.batch.errors.find_spec", lambda name: None)
    needs = r"out\.zst needs the package backports\.zstd: pip install backports\.zstd$"
    with pytest.raises(InputError, match=rf"^OUTPUT {needs}"):
        check_writable("OUTPUT", "out.zst", {})
    with pytest.raises(InputError, match=rf"^INPUT {needs}"), opened("INPUT", "out.zst"):
        pass
    with pytest.raises(InputError, match=r"^OUTPUT nowhere://out: Protocol not known: nowhere"):
        check_writable("OUTPUT", "nowhere://out", {})
    monkeypatch.setitem(known_implementations, "far", {"class": "no_such.FS", "err": "Install far"})
    with pytest.raises(InputError, match=r"^OUTPUT far://out: Install far$"):
        check_writable("OUTPUT", "far://out", {})


def test_a_remote_output_is_uploaded_when_it_is_complete(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "memory://bucket/out.txt.gz"
    files = fsspec.filesystem("memory")
    journal = begin(url)
    journal.write([entry(2), entry(1)])
    assert names(tmp_path) == ["out.txt.gz.part", "out.txt.gz.part.lock"] and not files.exists("/bucket/out.txt.gz")
    journal.leave()
    complete(url, 3, resume=True)
    assert gzip.decompress(files.cat("/bucket/out.txt.gz")) == text(3)
    assert names(tmp_path) == ["out.txt.gz.run.json"]
    journal = journal_of(url, True, False)
    assert journal.check(SIGNATURE)
    journal.leave()
    with pytest.raises(InputError, match="already exists"):
        journal_of(url, False, False)
    files.rm("/bucket/out.txt.gz")


@pytest.mark.parametrize("content", [None, "mine", '{"line": 1, "outputs": []}\n'], ids=["folder", "file", "older"])
def test_a_part_of_another_version_is_never_overwritten(tmp_path, content):
    part = tmp_path / "out.part"
    if content is None:
        part.mkdir()
    else:
        part.write_text(content)
    with pytest.raises(InputError, match=r"out\.part .*--resume resumes it; remove it"):
        begin(tmp_path / "out")
    message = "is not a file" if content is None else "or was not written by this version .remove"
    with pytest.raises(InputError, match=message) as error:
        begin(tmp_path / "out", resume=True)
    assert "\n" not in str(error.value) and names(tmp_path) == ["out.part"]


def test_a_journal_of_another_version_is_refused_in_a_line(tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(module, "VERSION", module.VERSION - 1)
        part = left(tmp_path / "out", [1])
    before = part.read_bytes()
    with pytest.raises(InputError, match="was not written by this version") as error:
        begin(tmp_path / "out", resume=True)
    assert "\n" not in str(error.value) and part.read_bytes() == before


def test_differences_are_named_and_the_journal_stays(tmp_path):
    part = left(tmp_path / "out", [1])
    before = part.read_bytes()
    now = {"--beam": 5, "--do_sample": True, "--prefix": "to: ", "INPUT's content": "sha256:" + "1" * 64}
    with pytest.raises(InputError) as error:
        begin(tmp_path / "out", now, resume=True)
    for words in ("--beam was 4 and is 5 now", "--do_sample was not given and is given now", "INPUT's content changed"):
        assert words in str(error.value)
    assert '--prefix was not given and is "to: " now' in str(error.value) and "sha256" not in str(error.value)
    assert part.read_bytes() == before


def test_half_a_batch_is_dropped(tmp_path):
    part = left(tmp_path / "out", [1, 2], [3, 4])
    whole = part.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 7  # a signature, and twice two records and their number
    for size in range(ends[0], len(whole) + 1):
        part.write_bytes(whole[:size])
        journal = begin(tmp_path / "out", resume=True)
        records, size_left = (4, ends[6]) if size == ends[6] else (2, ends[3]) if size >= ends[3] else (0, ends[0])
        assert (journal.records, part.stat().st_size) == (records, size_left), size
        journal._part.close()
        journal.leave()


def test_damage_is_detected_and_named(tmp_path):
    part = left(tmp_path / "out", [1, 2], [3], [4, 5])
    whole = part.read_bytes()
    lines = whole.splitlines(keepends=True)
    draw = random.Random(0)
    for _ in range(200):  # a changed byte in any complete line
        place = draw.randrange(len(whole))
        byte = bytes([whole[place] ^ (1 << draw.randrange(8))])
        if b"\n" in (byte, whole[place : place + 1]):
            continue
        part.write_bytes(whole[:place] + byte + whole[place + 1 :])
        with pytest.raises(InputError, match=r"out\.part is damaged( in its first line|: line \d+ )"):
            begin(tmp_path / "out", resume=True)
    for number in range(1, 6):  # a missing line of a batch before the last
        part.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        with pytest.raises(InputError, match=r"out\.part is damaged: line \d counts . records of ."):
            begin(tmp_path / "out", resume=True)
    part.write_bytes(b"".join([*lines, *lines[1:]]))
    with pytest.raises(InputError, match="is damaged: line 10 repeats a record"):
        begin(tmp_path / "out", resume=True)
    for number in range(1, len(lines) - 1):  # half a line in the middle
        part.write_bytes(b"".join(lines[:number]) + lines[number][:-4] + b"".join(lines[number + 1 :]))
        with pytest.raises(InputError, match="is damaged: line"):
            begin(tmp_path / "out", resume=True)


def test_a_linked_output_is_written_to_its_target(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "out")
    left(tmp_path / "link", [1])
    assert (tmp_path / "there" / "out.part").exists()
    complete(tmp_path / "link", 2, resume=True)
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "there") == ["out", "out.run.json"]


def test_an_unwritable_output_is_refused_early(tmp_path):
    (tmp_path / "in").write_text("one\n")
    (tmp_path / "in.part").write_text("one\n")
    (tmp_path / "link").symlink_to("in")
    cases = [
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "out", "there is no folder .*none"),
        (tmp_path / "in", "is the same file as INPUT"),
        (tmp_path / "link", "is the same file as INPUT"),
        (tmp_path / ("x" * 250), "cannot be written"),  # too long with .part
    ]
    before = names(tmp_path)
    sources = {"INPUT": str(tmp_path / "in"), "--reference_path": None}
    for output, message in cases:
        with pytest.raises(InputError, match=f"OUTPUT .*: {message}"):
            check_writable("OUTPUT", str(output), sources)
    with pytest.raises(InputError, match=r"by way of .*in\.part, which is --reference_path"):
        check_writable("OUTPUT", str(tmp_path / "in"), {"--reference_path": str(tmp_path / "in.part")})
    check_writable("OUTPUT", str(tmp_path / "out"), sources)
    assert names(tmp_path) == before
    (tmp_path / "there.new").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "there", b"")


def test_killed_before_any_line_a_run_can_be_resumed(tmp_path):
    done = run_python(str(REPOSITORY / "tests/helpers/cli_journal.py"), str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 100


def test_a_journal_of_a_running_process_is_refused(tmp_path):
    """It can be resumed as soon as that process is killed."""
    code = (
        "import sys\nfrom fastgen.batch.config import BatchConfig\n"
        "from fastgen.batch.journal import Journal\nfrom fastgen.batch.part import Entry\n"
        f"output = Journal(BatchConfig('model', 'in', {str(tmp_path / 'out')!r}))\noutput.begin({SIGNATURE!r})\n"
        "output.write([Entry(1, 1, None, None, False, b'one' + bytes([10]))])\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdin=-1, stdout=-1) as run:
        run.stdout.readline()
        with pytest.raises(InputError, match=r"another run is writing to .*out\.part"):
            journal_of(tmp_path / "out", True, False)
        run.kill()
        run.wait()
        journal = begin(tmp_path / "out", resume=True)
        assert journal.records == 1
        journal.leave()


@pytest.mark.parametrize("limit", [3000, 20_000])
def test_a_run_on_a_full_disk_resumes_with_more_room(tmp_path, limit):
    """A limit on the size of files interrupts a write, as a full disk does."""
    code = (
        "import resource, signal\nfrom cli_journal import job\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"try:\n    job({str(tmp_path / 'out')!r}, 90, 200)\n"
        "except OSError as error:\n    print(error.errno, error.filename, error.strerror)\n"
    )
    said = run_code(code, path=REPOSITORY / "tests/helpers")
    if limit == 3000:
        assert said == f"{errno.EFBIG} {tmp_path / 'out.part'} File too large\n"
        assert names(tmp_path) == ["out.part"]
    for name in ("out", "whole"):
        job(tmp_path / name, 90, 200)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def test_the_space_needed_to_order_output_is_named(tmp_path, monkeypatch):
    def full(self: Journal, path: Path, records: None) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    left(tmp_path / "out", [2, 1])
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_write_new", full)
        journal = begin(tmp_path / "out", resume=True)
        with pytest.raises(OSError, match=r"No space left on device .OUTPUT is sorted from OUTPUT\.part"):
            journal.complete()
        journal.leave()
    complete(tmp_path / "out", 2, resume=True)
    assert (tmp_path / "out").read_bytes() == text(2)


# The command runs in children of a process that has imported everything; every batch takes a moment, and is noted.
class FailingUploads(MemoryFileSystem):
    """A file system whose first upload fails halfway, with an error that is no OSError."""

    protocol = "failing"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    uploads = 0

    def put_file(self, lpath: str, rpath: str, **options: object) -> None:
        type(self).uploads += 1
        if self.uploads == 1:
            self.pipe_file(rpath, Path(lpath).read_bytes()[:5])
            raise RuntimeError("the bucket\nis gone")
        super().put_file(lpath, rpath, **options)


def test_an_upload_that_fails_keeps_the_journal_and_is_repeated(tmp_path, gpt2, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fsspec.register_implementation("failing", FailingUploads, clobber=True)
    write_lines(Path("in"), ["word1 word2", "word3"])
    url, flags = "failing://bucket/out.txt", ("--causal_lm", "--quiet")
    assert command(gpt2, "in", url, *flags) == 1
    *_, left, error = capsys.readouterr().err.splitlines()
    assert left.endswith("2 complete lines in out.txt.part; the same run with --resume resumes after that")
    assert error.endswith("OUTPUT failing://bucket/out.txt: the upload failed (RuntimeError: the bucket is gone)")
    files = fsspec.filesystem("failing")
    assert Path("out.txt.part").exists() and not files.exists(url)
    with monkeypatch.context() as patched:
        patched.setattr(transformers.GPT2LMHeadModel, "generate", lambda *_, **__: pytest.fail("it was generated"))
        assert command(gpt2, "in", url, *flags, "--resume") == 0
    assert command(gpt2, "in", "local.txt", *flags) == 0
    assert files.cat(url) == Path("local.txt").read_bytes()
    assert FailingUploads.uploads == 2 and not Path("out.txt.part").exists()
