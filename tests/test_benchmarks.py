"""Benchmarks: floors that fail them, CTranslate2 where it is installed, the machine's limit."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.usefixtures("one_thread")


def tiny_bart():
    ends = {f"{end}_{name}": 2 for end in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")}
    config = BartConfig(
        vocab_size=40, d_model=8, init_std=0.5, forced_eos_token_id=None, decoder_start_token_id=1, **ends
    )
    return BartForConditionalGeneration(config), {"input_ids": torch.randint(5, 40, (3, 6))}


def tiny_gpt2():
    special = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    config = GPT2Config(vocab_size=40, n_embd=8, n_layer=2, n_head=2, initializer_range=0.5, **special)
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(5, 40, (3, 6))}


@pytest.fixture
def bench(monkeypatch):
    """The benchmark with one tiny case, without long measurements of the machine."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module, cases = importlib.import_module("bench_generate"), importlib.import_module("generate_cases")
    arguments = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}
    monkeypatch.setattr(module, "CASES", {"tiny": cases.Case(tiny_bart, arguments)})
    limits = importlib.import_module("limits")
    monkeypatch.setattr(limits, "GEMM_SIZE", 64)
    monkeypatch.setattr(limits, "READ_BYTES", 2**20)
    return module


@pytest.fixture
def run(bench, tmp_path):
    """Runs the tiny case with floors and flags; returns the status and the result of the JSON."""

    def run(*flags: str, **floors: float):
        wanted, results = tmp_path / "floors.json", tmp_path / "results.json"
        wanted.write_text(json.dumps({"tiny": floors}))
        status = bench.main(["--repeats", "1", "--floors", str(wanted), "--json", str(results), *flags])
        return status, json.loads(results.read_text())

    return run


def test_a_ratio_below_its_floor_fails_the_benchmark_by_name(run, capsys):
    assert run(stock=1e-6)[0] == 0
    assert run(stock=1e6)[0] == 1
    assert "tiny: " in capsys.readouterr().out.splitlines()[-1]


def test_a_floor_of_no_case_is_refused(bench, tmp_path, capsys):
    floors = tmp_path / "floors.json"
    floors.write_text('{"tyni": {"stock": 1}}')
    with pytest.raises(SystemExit):
        bench.main(["--floors", str(floors)])
    assert "'tyni': choose from tiny" in capsys.readouterr().err


def test_floors_that_are_checked_in_name_cases(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench, floors = importlib.import_module("bench_generate"), importlib.import_module("floors")
    assert floors.read_floors(str(BENCHMARKS / "floors.json"), bench.CASES)


def test_floors_fail_the_benchmark_of_fairseq_too(monkeypatch, capsys):
    pytest.importorskip("fairseq")
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_fairseq")
    flags = ["bart-batch1", "--floors", str(BENCHMARKS / "floors_fairseq.json")]
    for ratio, status in ((1.7, 1), (1.9, 0)):
        result = bench.Result("bart-batch1", ratio, 1.0, ratio, "4 of 4")
        monkeypatch.setattr(bench, "run", lambda *_, result=result: result)
        assert bench.main(flags) == status
        assert ("below the floor of 1.80" in capsys.readouterr().out) == bool(status)


def test_a_dash_stands_for_a_peer_that_is_not_installed(run, bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.peers, "installed", lambda: False)
    status, told = run("--peers", ctranslate2=1e6)
    assert status == 0 and list(told["results"][0]["ratios"]) == ["stock"]
    cells = capsys.readouterr().out.splitlines()[-1].split()
    assert cells[0] == "tiny" and cells[2] == "-" and cells[-1] == "-"


def test_limit_and_machine_are_told(run):
    _, told = run()
    result = told["results"][0]
    assert result["limit_seconds"] > 0 and result["times_limit"] > 0
    assert told["cpu"]["name"] and told["rates"]["flops"] > 0 and told["rates"]["bytes"] > 0


def test_limit_counts_the_weights_of_each_part_once(bench):
    size = bench.Size.of(tiny_bart()[0])
    attention, feed_forward = 8 * 8, 8 * 2
    assert size.encoder == 2 * (4 * attention + 2 * feed_forward)
    assert size.cross == 2 * 2 * attention
    assert size.decoder == 2 * (6 * attention + 2 * feed_forward)
    assert size.head == 40 * 8 and (size.layers, size.queries, size.keys) == (2, 8, 8)


def test_limit_grows_with_what_has_to_be_read_and_computed(bench):
    def limit(prompt: int, new: int, rows: int) -> float:
        rates = bench.Rates(flops=1e9, bytes=1e9)
        return bench.limit(size, [prompt] * 2, [new] * 2, rows, rates, 4)

    size = bench.Size.of(tiny_gpt2()[0])
    one = limit(8, 4, 1)
    assert one < limit(9, 4, 1) and one < limit(8, 5, 1) and one < limit(8, 4, 64)


@pytest.mark.parametrize("make", [tiny_bart, tiny_gpt2])
def test_ctranslate2_generates_from_the_same_weights(run, bench, make, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(bench.CASES["tiny"], "make", make)
    status, told = run("--peers", ctranslate2=1e6)
    assert status == 1 and told["results"][0]["seconds"]["ctranslate2"] > 0
    assert told["results"][0]["peer_equal"] == "3 of 3"
