"""Benchmarks of peers: processes that answer, that cannot do the work or end, and the section of docs/benchmarks.md."""

from __future__ import annotations

import importlib
import json
import shutil

import pytest
from test_benchmarks import BENCHMARKS, ROOT, tiny_gpt2

pytestmark = pytest.mark.usefixtures("one_thread")

ANSWERS = """
from answer import answer
from transformers import AutoModelForCausalLM

def load(task):
    model = AutoModelForCausalLM.from_pretrained(task.model)
    print("what a library prints")
    return lambda: model.generate(**task.inputs, **task.arguments)[:, -4:].tolist()

answer(load, "torch")
"""
CANNOT = """
from answer import CannotError, answer

def load(task):
    raise CannotError(f"no {task.dtype} here")

answer(load)
"""
RAISES = """
from answer import answer

def load(task):
    return lambda: [][0]

answer(load)
"""
ENDS = """
import os, sys
from answer import answer

def call():
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(3)

answer(lambda task: call)
"""
CRASHES = ENDS.replace("os._exit(3)", "os.kill(os.getpid(), 11)")


@pytest.fixture
def run_peers(monkeypatch, tmp_path):
    """Runs programs as peers beside a tiny model; returns what the JSON tells."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench, process = importlib.import_module("peers"), importlib.import_module("peer_process")
    shutil.copy(process.PROGRAMS / "answer.py", tmp_path)
    monkeypatch.setattr(process, "PROGRAMS", tmp_path)
    monkeypatch.setattr(bench, "PAUSE", 0)
    arguments = {"do_sample": False, "max_new_tokens": 4}
    monkeypatch.setattr(bench, "CASES", {"tiny": bench.Case(tiny_gpt2, arguments)})

    def run(*flags: str, environment: str = "", cannot: dict[str, str] | None = None, **programs: str):
        peers = []
        for name, program in programs.items():
            (tmp_path / f"{name}.py").write_text(program)
            peers.append(bench.Peer(name, "float32", process.Environment(environment), f"{name}.py", cannot or {}))
        monkeypatch.setattr(bench, "PEERS", tuple(peers))
        results = tmp_path / "results.json"
        assert bench.main(["--repeats", "2", "--json", str(results), *flags]) == 0
        return json.loads(results.read_text())

    return run


def test_peer_answers_in_turns_with_stock_and_fastgen(run_peers, capsys):
    told = run_peers(answers=ANSWERS)
    result = told["results"][0]
    ways = ["fastgen", "stock", "fastgen bfloat16, other numbers", "answers float32"]
    assert list(result["seconds"]) == ways and result["equal"] and result["reasons"] == {}
    assert all(len(turns) == 2 and min(turns) > 0 for turns in result["turns"].values())
    assert result["rows_equal"]["answers float32"] == "3 of 3" and told["peer_versions"]["torch"]
    assert "answers float32" in capsys.readouterr().out


def test_results_of_other_cases_stay_in_the_file(run_peers, monkeypatch):
    first = run_peers(answers=ANSWERS)
    bench = importlib.import_module("peers")
    monkeypatch.setattr(bench, "CASES", {"other": bench.CASES["tiny"]})
    told = run_peers()
    assert [result["case"] for result in told["results"]] == ["tiny", "other"]
    assert told["results"][0] == first["results"][0] and told["peer_versions"] == first["peer_versions"]


def test_peer_that_has_no_figure_has_a_reason(run_peers, capsys):
    result = run_peers(refuses=CANNOT, raises=RAISES, ends=ENDS, crashes=CRASHES, answers=ANSWERS)["results"][0]
    assert result["reasons"] == {
        "refuses float32": "no float32 here",
        "raises float32": "IndexError: list index out of range",
        "ends float32": "ended with status 3: out of memory",
        "crashes float32": "was ended by SIGSEGV",
    }
    assert list(result["seconds"])[-1] == "answers float32" and len(result["seconds"]) == 4
    assert "no float32 here" in capsys.readouterr().out


def test_peer_that_is_known_to_fail_is_not_started(run_peers):
    result = run_peers(cannot={"tiny": "has no tiny models"}, peer="raise SystemExit")["results"][0]
    assert result["reasons"] == {"peer float32": "has no tiny models"}


def test_missing_environment_has_the_command_that_makes_it(run_peers):
    result = run_peers(environment="none-such", peer=ANSWERS)["results"][0]
    told = "not installed: python benchmarks/peers.py --install none-such"
    assert result["reasons"] == {"peer float32": told}


def test_environment_is_made_without_what_needs_cuda(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench, process = importlib.import_module("peers"), importlib.import_module("peer_process")
    monkeypatch.setattr(process, "ROOT", tmp_path)
    done = []

    def run(command: list[str], check: bool) -> None:
        done.append(command[1:])
        if "venv" in command:
            (tmp_path / ".venv-vllm" / "bin").mkdir(parents=True)
            (tmp_path / ".venv-vllm" / "bin" / "python").touch()

    monkeypatch.setattr(process.subprocess, "run", run)
    assert bench.main(["--install", "vllm"]) == 0
    made, installed, uninstalled = done
    assert made[-1] == str(tmp_path / ".venv-vllm") and installed[-1] == str(process.PROGRAMS / "vllm.txt")
    assert "uninstall" in uninstalled and "torchvision" in uninstalled


def test_turns_hold_the_lock(run_peers, monkeypatch, tmp_path):
    bench = importlib.import_module("peers")
    held = []
    flock = bench.fcntl.flock
    monkeypatch.setattr(bench.fcntl, "flock", lambda file, kind: held.append(kind) or flock(file, kind))
    run_peers("--lock", str(tmp_path / "lock"), answers=ANSWERS)
    shared, exclusive, free = bench.fcntl.LOCK_SH, bench.fcntl.LOCK_EX, bench.fcntl.LOCK_UN
    assert held == [shared, free] + 3 * [exclusive, free]


def test_each_peer_has_a_program_and_each_environment_its_requirements(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench, process = importlib.import_module("peers"), importlib.import_module("peer_process")
    for peer in bench.PEERS:
        assert (process.PROGRAMS / peer.program).exists() and set(peer.cannot) <= set(bench.CASES)
        assert not peer.environment.name or "==" in peer.environment.requirements.read_text()


def measured(**others: float):
    """What peers.py tells of one case. others: seconds of peers."""
    seconds = {"stock": 3.0, "fastgen": 2.0, "fastgen bfloat16, other numbers": 1.8, **others}
    ratios = {way: found / 2 for way, found in seconds.items()}
    result = {"case": "t5-beam4", "seconds": seconds, "ratios": ratios, "rows_equal": dict.fromkeys(others, "7 of 8")}
    result |= {"turns": {"fastgen": [2.0] * 3}, "reasons": {"Other float32": "has no T5"}}
    return {"peer_versions": {"a": "1"}, "results": [result]}


def test_section_of_peers_begins_with_those_that_are_faster(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    show = importlib.import_module("show_peers")
    monkeypatch.setattr(show, "HOW", {"Quick int8, other numbers": "It quantises weights."})
    workloads = importlib.import_module("show_results").GENERATE
    told = show.section(measured(**{"Slow float32": 5.0, "Quick int8, other numbers": 1.5}), "a CPU", workloads)
    begins = told.split("\n\n")
    assert begins[0] == "## Peers, a CPU" and begins[1].startswith("Peers that are faster")
    assert (
        begins[2].startswith("- Quick int8, other numbers.")
        and "1.50 against 2.00 s, fastgen in bfloat16 1.80 s" in begins[2]
    )
    assert begins[2].endswith("It quantises weights.")
    assert "medians of 3 turns" in told
    assert "| 3.00 s | 2.00 s | 1.80 s | 5.00 s (7 of 8) | **1.50 s** (7 of 8) |" in told and "| has no T5 |" in told
    assert show.section(measured(), "a CPU", workloads).split("\n\n")[1] == "No peer is faster than fastgen."


def test_document_is_what_the_results_make(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    show = importlib.import_module("show_results")
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == show.tables()
