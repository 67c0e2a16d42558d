"""Benchmarks of peers: processes that answer, that cannot do the work, or that end."""

import importlib
import json
import shutil

import pytest
from test_benchmarks import BENCHMARKS

pytestmark = pytest.mark.usefixtures("one_thread")

PROGRAM = """
import os, sys
from answer import CannotError, answer

def load(task):
    {}

answer(load, "torch")
"""
ANSWERS = """
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(task.model)
    print("what a library prints")
    return lambda: model.generate(**task.inputs, **task.arguments)[:, -4:].tolist()
"""
ENDS = 'return lambda: print("out of memory", file=sys.stderr, flush=True) or os._exit(3)'
TINY_GPT2 = {"vocab_size": 40, "n_embd": 8, "n_layer": 2, "n_head": 2, "initializer_range": 0.5, "pad_token_id": 0}


@pytest.fixture
def run_peers(monkeypatch, tmp_path):
    """Runs programs as peers of a tiny model; returns the results."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench, calls, peers = map(importlib.import_module, ("bench", "calls", "peers"))
    shutil.copy(peers.PROGRAMS / "answer.py", tmp_path)
    monkeypatch.setattr(peers, "PROGRAMS", tmp_path)
    monkeypatch.setattr(peers, "PAUSE", 0)
    monkeypatch.setitem(calls.MODELS, "tiny", calls.Model("transformers:GPT2LMHeadModel", TINY_GPT2, "tiny"))
    case = calls.Call("tiny", 3, 6, {"do_sample": False, "max_new_tokens": 4})
    monkeypatch.setitem(calls.CASES, "generate", {"tiny": case})

    def run(environment: str = "", cannot: dict[str, str] | None = None, **programs: str):
        engines = []
        for name, program in programs.items():
            (tmp_path / f"{name}.py").write_text(PROGRAM.replace("{}", program))
            engines.append(peers.Peer(name, "float32", environment, f"{name}.py", cannot or {}, name == "answers"))
        monkeypatch.setattr(peers, "PEERS", tuple(engines))
        results = tmp_path / "results.json"
        flags = ["--repeats", "2", "--json", str(results)]
        assert bench.main(["run", "tiny", "--against", *programs, *flags]) == 0
        return json.loads(results.read_text())["results"][0]

    return run


def test_a_peer_answers_in_turns_with_stock_and_fastgen(run_peers, capsys):
    result = run_peers(answers=ANSWERS)
    peer = "answers float32, other numbers"
    assert list(result["seconds"]) == ["fastgen", "stock", "fastgen bfloat16, other numbers", peer]
    assert result["equal"] and result["reasons"] == {} and result["peer_versions"]["torch"]
    assert all(len(turns) == 2 and min(turns) > 0 for turns in result["turns"].values())
    assert result["rows_equal"][peer] == "3 of 3" and result["new_tokens"][peer] == 12
    assert peer in capsys.readouterr().out


def test_a_peer_without_a_figure_has_a_reason(run_peers, capsys):
    result = run_peers(
        refuses='raise CannotError(f"no {task.dtype} here")',
        raises="return lambda: [][0]",
        ends=ENDS,
        crashes="return lambda: os.kill(os.getpid(), 11)",
    )
    assert result["reasons"] == {
        "refuses float32": "no float32 here",
        "raises float32": "IndexError: list index out of range",
        "ends float32": "ended with status 3: out of memory",
        "crashes float32": "crashed with SIGSEGV",
    }
    assert list(result["seconds"]) == ["fastgen", "stock"] and "no float32 here" in capsys.readouterr().out


def test_a_peer_that_cannot_run_is_not_started(run_peers):
    result = run_peers(cannot={"tiny": "has no tiny models"}, peer="raise SystemExit")
    assert result["reasons"] == {"peer float32": "has no tiny models"}
    result = run_peers(environment="none-such", peer=ANSWERS)
    assert result["reasons"] == {"peer float32": "not installed: python benchmarks/bench.py install none-such"}


def test_each_peer_has_a_short_program_and_its_requirements(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    calls, peers = importlib.import_module("calls"), importlib.import_module("peers")
    for peer in peers.PEERS:
        program = peers.PROGRAMS / peer.program
        assert len(program.read_text().splitlines()) <= 60 and set(peer.cannot) <= set(calls.CASES["generate"])
        assert not peer.environment or "==" in (peers.PROGRAMS / f"{peer.environment}.txt").read_text()
