"""OUTPUT.part holds whole records, and --resume goes on from it only where everything is as it was."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.files.whole_file import write_whole
from fastgen.cli.transformers.resume.part_file import PartFile, check_part, check_writable, failures_if_complete

SIGNATURE = {"--beam": 4, "--do_sample": False, "INPUT's content": "sha256:" + "0" * 64}


def write_records(part: PartFile, *records: str) -> None:
    part.write("".join(record + "\n" for record in records).encode(), len(records))
    part.keep_state("a state")


def left_part(path: Path, *records: str, half: bytes = b"") -> Path:
    """The part of a run that ended with these records, and after them half a one."""
    with PartFile.create(path, SIGNATURE) as part:
        write_records(part, *records)
    part_path = path.with_name(path.name + ".part")
    with part_path.open("ab") as file:
        file.write(half)
    return part_path


def complete(path: Path, *records: str, overwrite: bool = False) -> None:
    with PartFile.create(path, SIGNATURE, overwrite) as part:
        write_records(part, *records)
        part.complete()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_output_appears_when_complete_and_nothing_else_stays(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with PartFile.create(output, SIGNATURE) as part:
        write_records(part, "one", "two")
        part.keep_state("a state")
        assert not output.exists()
        assert (tmp_path / "out.part").read_bytes() == b"one\ntwo\n"  # nothing waits in a buffer
        part.complete()
    assert names(tmp_path) == ["out", "out.run.json"] and output.read_bytes() == b"one\ntwo\n"


def test_a_run_that_is_left_can_be_resumed_and_one_without_records_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(ZeroDivisionError), PartFile.create(output, SIGNATURE) as part:
        write_records(part, "one")
        raise ZeroDivisionError
    assert names(tmp_path) == ["out.part", "out.part.json"]
    with PartFile.resume(output, SIGNATURE) as part:
        assert part.records == 1
        write_records(part, "two")
        part.complete()
    assert output.read_bytes() == b"one\ntwo\n"
    with PartFile.create(tmp_path / "other", SIGNATURE) as part:
        part.keep_state("")
    assert names(tmp_path) == ["out", "out.run.json"]


def test_an_output_that_is_there_is_replaced_only_by_a_complete_one_and_where_that_is_asked_for(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("mine")
    for start in (
        lambda: PartFile.create(output, SIGNATURE),
        lambda: PartFile.resume(output, SIGNATURE),
        lambda: check_part(output, resume=False),
        lambda: check_part(output, resume=True),
    ):
        with pytest.raises(InputError, match=r"OUTPUT .*out: is there already .*--overwrite"):
            start()
    assert names(tmp_path) == ["out"]
    with PartFile.create(output, SIGNATURE, overwrite=True) as part:
        write_records(part, "one")
    for start in (lambda: check_part(output, resume=True), lambda: check_part(output, resume=False)):
        with pytest.raises(InputError, match=r"is there already|goes on from it"):
            start()
    check_part(output, resume=True, overwrite=True)
    assert output.read_text() == "mine"
    with PartFile.resume(output, SIGNATURE, overwrite=True) as part:
        part.complete()
    assert output.read_text() == "one\n"


def test_an_output_that_appears_during_a_run_is_not_replaced(tmp_path: Path) -> None:
    with PartFile.create(tmp_path / "out", SIGNATURE) as part:
        write_records(part, "one")
        (tmp_path / "out").write_text("mine")
        with pytest.raises(InputError, match="is there already"):
            part.complete()
    assert (tmp_path / "out").read_text() == "mine" and (tmp_path / "out.part").read_text() == "one\n"


def test_a_complete_output_is_known_until_something_changes(tmp_path: Path) -> None:
    output, other = tmp_path / "out", SIGNATURE | {"--beam": 5}
    assert failures_if_complete(output, SIGNATURE, overwrite=False) is None
    complete(output, "one")
    check_part(output, resume=True)
    assert failures_if_complete(output, SIGNATURE, overwrite=False) == 0
    assert failures_if_complete(output, SIGNATURE, overwrite=True) == 0
    with pytest.raises(InputError, match=r"out: is there already .*--overwrite.*; it was made .*: --beam was 4, is 5"):
        failures_if_complete(output, other, overwrite=False)
    assert failures_if_complete(output, other, overwrite=True) is None
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with PartFile.create(output, other, overwrite=True) as part:
        part.keep_state("")
        assert failures_if_complete(output, SIGNATURE, overwrite=True) is None  # there is a run to go on with
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    output.write_text("changed\n")
    assert failures_if_complete(output, SIGNATURE, overwrite=False) is None
    with pytest.raises(InputError, match=r"is there already .*; no run is known that made it as it is"):
        check_part(output, resume=True)
    complete(output, "two", overwrite=True)
    assert failures_if_complete(output, SIGNATURE, overwrite=False) == 0 and output.read_text() == "two\n"


def test_a_compressed_output_is_gone_on_with_and_the_same_bytes_for_the_same_records(tmp_path: Path) -> None:
    output = tmp_path / "out.gz"
    assert left_part(output, "one", "two", half=b"thr").read_bytes() == b"one\ntwo\nthr"
    with PartFile.resume(output, SIGNATURE) as part:
        assert part.records == 2
        write_records(part, "three")
        part.complete()
    assert names(tmp_path) == ["out.gz", "out.gz.run.json"]
    assert gzip.decompress(output.read_bytes()) == b"one\ntwo\nthree\n"
    other = tmp_path / "other.gz"
    with PartFile.create(other, SIGNATURE) as part:
        write_records(part, "one", "two", "three")
        part.complete()
    assert other.read_bytes() == output.read_bytes()


@pytest.mark.parametrize("made", ["file", "folder", "broken link"])
def test_a_part_that_is_there_is_never_overwritten(tmp_path: Path, made: str) -> None:
    part = tmp_path / "out.part"
    if made == "file":
        part.write_text("mine")
    elif made == "folder":
        part.mkdir()
    else:
        part.symlink_to(tmp_path / "none")
    for start in (lambda: PartFile.create(tmp_path / "out", {}), lambda: check_part(tmp_path / "out", resume=False)):
        with pytest.raises(InputError, match=r"out\.part .*--resume goes on from it; remove it"):
            start()
    with pytest.raises(InputError, match="missing" if made == "file" else "not a file"):
        PartFile.resume(tmp_path / "out", {})
    assert names(tmp_path) == ["out.part"] and (made != "file" or part.read_text() == "mine")


def test_half_a_record_is_cut_and_written_again(tmp_path: Path) -> None:
    part_path = left_part(tmp_path / "out", "one", "two", half=b"thr")
    with PartFile.resume(tmp_path / "out", SIGNATURE) as part:
        assert part.records == 2 and part_path.read_bytes() == b"one\ntwo\n"
        write_records(part, "three")
        part.complete()
    assert (tmp_path / "out").read_bytes() == b"one\ntwo\nthree\n"


def test_records_are_compressed_in_little_memory(tmp_path: Path) -> None:
    left_part(tmp_path / "out.gz", *["x" * 999] * 50_000, half=b"x" * 5_000_000)
    tracemalloc.start()
    with PartFile.resume(tmp_path / "out.gz", SIGNATURE) as part:
        assert part.records == 50_000
        part.complete()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_every_difference_is_named_and_the_part_stays_as_it_is(tmp_path: Path) -> None:
    part_path = left_part(tmp_path / "out", "one", half=b"tw")
    now = {"--beam": 5, "--do_sample": True, "--prefix": "to: ", "INPUT's content": "sha256:" + "1" * 64}
    with pytest.raises(InputError) as error:
        PartFile.resume(tmp_path / "out", now)
    for words in ("--beam was 4, is 5", "--do_sample was not given, is given", "INPUT's content changed"):
        assert words in str(error.value)
    assert '--prefix was not given, is "to: "' in str(error.value) and "sha256" not in str(error.value)
    assert part_path.read_bytes() == b"one\ntw"


def test_values_inside_a_setting_are_compared_one_by_one(tmp_path: Path) -> None:
    with PartFile.create(tmp_path / "out", {"--gen": {"top_k": 5, "top_p": 0.5}, "--bad": (1, 2), "--old": 1}) as part:
        write_records(part, "one")
    with pytest.raises(InputError, match="made differently: --gen: top_k was 5, is 6; --old was 1, is not given"):
        PartFile.resume(tmp_path / "out", {"--gen": {"top_k": 6, "top_p": 0.5}, "--bad": (1, 2), "--added": None})


INCOMPLETE = json.dumps({"written_by": "fastgen", "signature": SIGNATURE, "records": 1}).encode()


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"name": "mine"}', b"\xff", INCOMPLETE])
def test_a_part_whose_signature_is_missing_or_damaged_is_refused(tmp_path: Path, content: bytes | None) -> None:
    part_path = left_part(tmp_path / "out", "one")
    signature = tmp_path / "out.part.json"
    signature.unlink() if content is None else signature.write_bytes(content)
    with pytest.raises(InputError, match=r"out\.part\.json.*remove"):
        PartFile.resume(tmp_path / "out", SIGNATURE)
    part_path.unlink()
    if content not in (None, INCOMPLETE):  # a file that is not the command's is not replaced, either
        with pytest.raises(InputError, match=r"out\.part\.json.*remove"):
            PartFile.create(tmp_path / "out", SIGNATURE)
        assert signature.read_bytes() == content


def test_records_behind_the_state_are_given_up(tmp_path: Path) -> None:
    state = {"random": "\x00second", "cells": 3}
    with PartFile.create(tmp_path / "out", SIGNATURE) as part:
        part.keep_state("first")
        part.write(b"one\ntwo\n", 2)
        part.keep_state(state)
        part.write(b"three\n", 1)
    with PartFile.resume(tmp_path / "out", SIGNATURE) as part:
        assert (part.records, part.state) == (2, state)
        assert (tmp_path / "out.part").read_bytes() == b"one\ntwo\n"


def test_a_part_that_lacks_records_is_refused(tmp_path: Path) -> None:
    left_part(tmp_path / "out", "one", "two")
    (tmp_path / "out.part").write_bytes(b"one\n")
    with pytest.raises(InputError, match=r"has 4 bytes, but had 8 .*remove"):
        PartFile.resume(tmp_path / "out", SIGNATURE)


def test_what_is_no_whole_record_is_not_written(tmp_path: Path) -> None:
    with PartFile.create(tmp_path / "out", SIGNATURE) as part:
        for data, records in ((b"one", 1), (b"one\ntwo", 1), (b"one\n", 2), (b"one\ntwo\n", 1)):
            with pytest.raises(ValueError):
                part.write(data, records)
        assert part.records == 0 and (tmp_path / "out.part").read_bytes() == b""


def test_where_output_is_a_link_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "out")
    with PartFile.create(tmp_path / "link", SIGNATURE) as part:
        write_records(part, "one")
        assert (tmp_path / "there" / "out.part").exists()
        part.complete()
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "there") == ["out", "out.run.json"]


def test_an_output_that_cannot_be_written_is_found_beforehand(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("one\n")
    (tmp_path / "in.part").write_text("one\n")
    (tmp_path / "link").symlink_to("in")
    os.mkfifo(tmp_path / "pipe")
    cases = [
        (tmp_path, "is a folder"),
        (Path("/dev/null"), "is a device or a pipe"),
        (tmp_path / "pipe", "is a device or a pipe"),
        (tmp_path / "none" / "out", "there is no folder .*none"),
        (tmp_path / "in", "is the same file as INPUT"),
        (tmp_path / "link", "is the same file as INPUT"),
        (tmp_path / ("x" * 250), "cannot be written"),  # too long with .part
    ]
    before = names(tmp_path)
    for output, message in cases:
        with pytest.raises(InputError, match=f"OUTPUT .*: {message}"):
            check_writable("OUTPUT", output, {"INPUT": tmp_path / "in", "--reference_path": None})
    with pytest.raises(InputError, match=r"by way of .*in\.part, which is --reference_path"):
        check_writable("OUTPUT", tmp_path / "in", {"--reference_path": tmp_path / "in.part"})
    check_writable("OUTPUT", tmp_path / "out", {"INPUT": tmp_path / "in", "--reference_path": None})
    assert names(tmp_path) == before


def test_a_whole_file_takes_no_name_that_is_in_use(tmp_path: Path) -> None:
    taken = tmp_path / f"scores.{os.getpid()}-0.new"
    taken.write_text("mine")
    write_whole(tmp_path / "scores", b"{}\n")
    assert (tmp_path / "scores").read_bytes() == b"{}\n" and taken.read_text() == "mine"
    with pytest.raises(IsADirectoryError):
        (tmp_path / "folder").mkdir()
        write_whole(tmp_path / "folder", b"")
    assert names(tmp_path) == ["folder", "scores", taken.name]
