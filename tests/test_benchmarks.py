"""Benchmarks: floors that fail them, CTranslate2 where it is installed, the machine's limit."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from seamless_models import SIZES, inputs_of, seamless
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import fastgen
from fastgen.testing import configured

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
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
        wanted.write_text(json.dumps({"generate": {"tiny": floors}}))
        status = bench.main(["--repeats", "1", "--floors", str(wanted), "--json", str(results), *flags])
        return status, json.loads(results.read_text())

    return run


def test_a_ratio_below_its_floor_fails_the_benchmark_by_name(run, capsys):
    assert run(stock=1e-6)[0] == 0
    assert run(stock=1e6)[0] == 1
    assert "tiny: " in capsys.readouterr().out.splitlines()[-1]


def test_a_floor_of_no_case_is_refused(bench, tmp_path, capsys):
    floors = tmp_path / "floors.json"
    floors.write_text('{"generate": {"tyni": {"stock": 1}}}')
    with pytest.raises(SystemExit):
        bench.main(["--floors", str(floors)])
    assert "'tyni': choose from tiny" in capsys.readouterr().err


NAMED = (
    *(
        "best_batch",
        "constrained",
        "generate",
        "growth",
        "lm_eval",
        "mqa",
        "pipeline",
        "prefix",
        "prophetnet",
        "quality",
    ),
    *("rollouts", "workers"),
)


@pytest.mark.parametrize("benchmark", NAMED)
def test_floors_that_are_checked_in_name_cases(monkeypatch, benchmark):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench, harness = importlib.import_module(f"bench_{benchmark}"), importlib.import_module("harness")
    assert harness.read_floors(str(BENCHMARKS / "floors.json"), benchmark, bench.CASES)


def test_floors_that_are_checked_in_are_of_benchmarks():
    for name in json.loads((BENCHMARKS / "floors.json").read_text()):
        assert (BENCHMARKS / f"bench_{name.removesuffix(' cuda')}.py").exists()


def test_floors_fail_the_benchmark_of_fairseq_too(monkeypatch, capsys):
    pytest.importorskip("fairseq")
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_fairseq")
    flags = ["bart-batch1", "--floors", str(BENCHMARKS / "floors.json")]
    for ratio, status in ((1.7, 1), (1.9, 0)):
        result = bench.Result("bart-batch1", ratio, 1.0, ratio, "4 of 4", {})
        monkeypatch.setattr(bench, "run", lambda *_, result=result: result)
        assert bench.main(flags) == status
        assert ("below the floor of 1.80" in capsys.readouterr().out) == bool(status)


def test_a_dash_stands_for_a_peer_that_is_not_installed(run, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.import_module("peer_process"), "ROOT", tmp_path)
    status, told = run("--peers", ctranslate2=1e6)
    assert status == 0 and list(told["results"][0]["ratios"]) == ["stock"]
    cells = capsys.readouterr().out.splitlines()[-1].split()
    assert cells[0] == "tiny" and cells[2] == "-" and cells[-1] == "-"


def test_limit_machine_and_turns_are_told(run):
    _, told = run()
    assert told["versions"]["torch"] == torch.__version__ and told["threads"] == torch.get_num_threads()
    assert len(told["results"][0]["turns"]["fastgen"]) == 1 and isinstance(told["commit"], str)
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
    if not (ROOT / ".venv-ctranslate2").exists():
        pytest.skip("python benchmarks/peers.py --install ctranslate2")
    monkeypatch.setattr(bench.CASES["tiny"], "make", make)
    status, told = run("--peers", ctranslate2=1e6)
    assert status == 1 and told["results"][0]["seconds"]["ctranslate2"] > 0
    assert told["results"][0]["peer_equal"] == "3 of 3"


@pytest.fixture
def run_seamless(monkeypatch, tmp_path):
    """Runs both versions of Seamless M4T, tiny ones; returns the status and the results of the JSON."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench, cases = importlib.import_module("bench_seamless"), importlib.import_module("seamless_cases")
    arguments = {"text_min_new_tokens": 6, "text_max_new_tokens": 6, "text_num_beams": 2}
    units = {"speech_min_new_tokens": 8, "speech_max_new_tokens": 8}

    def sizes(version: str, layers: int):
        return getattr(transformers, f"{version}Config")(**{**SIZES[version], "decoder_layers": layers})

    for name, case in bench.CASES.items():
        given = arguments | (units if name == "v1" else {})
        monkeypatch.setitem(bench.CASES, name, dataclasses.replace(case, sizes=sizes, arguments=given))
    monkeypatch.setattr(cases, "FRAMES", 20)

    def run(*flags: str, **floors: float):
        wanted, results, picture = (tmp_path / name for name in ("floors.json", "results.json", "picture.png"))
        told = {name.replace("_", " "): {"stock": floor} for name, floor in floors.items()}
        wanted.write_text(json.dumps({"seamless": told}))
        files = ["--floors", str(wanted), "--json", str(results), "--plot", str(picture)]
        status = bench.main(["--repeats", "1", *files, *flags])
        assert picture.read_bytes().startswith(b"\x89PNG")
        return status, json.loads(results.read_text())["results"]

    return run


def test_all_stages_of_seamless_are_timed_in_all_ways(run_seamless, capsys):
    pytest.importorskip("matplotlib")
    status, results = run_seamless("--layers", "2")
    assert status == 0 and [result["case"] for result in results] == ["v2", "v1"]
    stages = ["speech encoder", "text decoder", "text-to-unit", "vocoder", "rest", "end to end"]
    for result in results:
        assert result["equal"] and result["layers"] == 2 and result["tokens"] == 8
        assert sorted(result["ratios"]) == sorted(stages)
        for seconds in result["seconds"].values():
            assert sorted(seconds) == sorted(stages) and min(seconds.values()) > 0
            assert sum(seconds[stage] for stage in stages[:-1]) == pytest.approx(seconds["end to end"])
    printed = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in printed.splitlines() if "**" in line] == 2 * stages


def test_the_ways_of_seamless_differ_in_what_fastgen_does(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_seamless")
    model, inputs = seamless("SeamlessM4Tv2", "ForSpeechToSpeech"), inputs_of("ForSpeechToSpeech", 1)
    done = {}
    for way, context in list(bench.WAYS.items())[1:]:
        with configured(cuda_graphs="on"), context():
            model.generate(**inputs, tgt_lang="fra", text_num_beams=2, text_min_new_tokens=30, text_max_new_tokens=30)
        report = fastgen.explain()
        tries_vocoder = any("vocoder" in told for told in [*report.kernels, *report.fallbacks, *report.decisions])
        done[way] = (bench.captured_calls(report), tries_vocoder, report.kernels["speech encoder, once"])
    captured = ["generate of SeamlessM4Tv2ForSpeechToSpeech"]
    assert done == {
        "+ caches and loop": ([], False, 0),
        "+ captured steps": (captured, False, 0),
        "+ vocoder": (captured, True, 0),
        "+ encoder once": (captured, True, 1),
    }


def test_a_stage_of_seamless_below_its_floor_fails_the_benchmark_by_name(run_seamless, capsys):
    pytest.importorskip("matplotlib")
    assert run_seamless("v1", "--layers", "2", v1_vocoder=1e6)[0] == 1
    assert "v1 vocoder: " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("device", ["", " cuda"])
def test_floors_of_seamless_that_are_checked_in_name_stages(monkeypatch, device):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench, harness = importlib.import_module("bench_seamless"), importlib.import_module("harness")
    assert harness.read_floors(str(BENCHMARKS / "floors.json"), f"seamless{device}", bench.floor_names())


@pytest.fixture
def run_mqa(monkeypatch, tmp_path):
    """Runs tiny multi-query Transformers; returns the status and the results of the JSON."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_mqa")
    sizes = {"vocab_size": 40, "d_model": 16, "head_dim": 4, "encoder_layers": 2, "decoder_layers": 2}
    monkeypatch.setattr(bench, "SIZES", sizes)
    monkeypatch.setattr(bench, "WARM_UP", 4)

    def run(*flags: str, **floors: float):
        wanted, results = tmp_path / "floors.json", tmp_path / "results.json"
        wanted.write_text(json.dumps({"mqa": {name: {"stock": floor} for name, floor in floors.items()}}))
        sizes = ["--repeats", "1", "--length", "8"]
        status = bench.main([*sizes, "--floors", str(wanted), "--json", str(results), *flags])
        return status, json.loads(results.read_text())["results"]

    return run


@pytest.mark.slow
def test_each_attention_has_a_cost_per_token_and_equal_outputs(run_mqa):
    status, results = run_mqa()
    assert status == 0
    assert [result["case"] for result in results][:3] == ["multi-head", "grouped", "multi-query"]
    for result in results:
        assert result["equal"] and result["ratio"] > 0
        for microseconds in result["microseconds"].values():
            assert list(microseconds) == ["encoder", "greedy", "beam 4"] and min(microseconds.values()) > 0


@pytest.mark.slow
def test_attention_below_its_floor_fails_the_benchmark_by_name(run_mqa, capsys):
    status, results = run_mqa("lm multi-query", grouped=1e6)
    assert status == 0 and [result["case"] for result in results] == ["lm multi-head", "lm multi-query"]
    assert run_mqa("grouped", grouped=1e6)[0] == 1
    assert "grouped: " in capsys.readouterr().out.splitlines()[-1]


def test_prophetnet_fails_its_benchmark_below_a_floor(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_prophetnet")
    monkeypatch.setattr(bench, "NEW_TOKENS", 4)
    wanted = tmp_path / "floors.json"
    for floor, status in ((1e-6, 0), (1e6, 1)):
        wanted.write_text(json.dumps({"prophetnet": {"beam": {"stock": floor}}}))
        flags = ["--repeats", "1", "--layers", "1", "--width", "64", "--floors", str(wanted)]
        assert bench.main(flags) == status
    told = capsys.readouterr().out
    assert told.count("greedy: transformers") == 2 and told.count("below the floor") == 1


@pytest.fixture
def run_constrained(monkeypatch, tmp_path):
    """Runs tiny models with closed sets of outputs; returns the status and the results of the JSON."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_constrained")
    qwen = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
    monkeypatch.setattr(bench, "SIZES", {"vocab_size": 2000, "d_model": 16, "d_ff": 32, "num_layers": 2, **qwen})
    for name, value in {"OUTPUTS": 500, "PROMPT": 9, "TEXT": 9}.items():
        monkeypatch.setattr(bench, name, value)

    def run(*flags: str, **floors: dict[str, float]):
        wanted, results = tmp_path / "floors.json", tmp_path / "results.json"
        told = {name.replace("_", "-"): ratios for name, ratios in floors.items()}
        wanted.write_text(json.dumps({"constrained": told}))
        status = bench.main(["--repeats", "1", "--floors", str(wanted), "--json", str(results), *flags])
        return status, json.loads(results.read_text())["results"]

    return run


@pytest.mark.slow
def test_constrained_search_has_seconds_and_memory_and_equal_scores(run_constrained):
    cases = ["ids-beam20", "ids-beam50", "names-beam10", "names-beam50"]
    status, results = run_constrained(*cases)
    assert status == 0 and [result["case"] for result in results] == cases
    for result in results:
        assert result["equal"] and int(result["tokens"].split()[0]) > 5
        assert min(*result["seconds"].values(), *result["added_mb"].values(), *result["ratios"].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("ratio", ["stock", "memory"])
def test_constrained_search_below_a_floor_fails_the_benchmark_by_name(run_constrained, capsys, ratio):
    assert run_constrained("names-beam10", names_beam10={ratio: 1e6}, ids_beam20={ratio: 1e6})[0] == 1
    assert "names-beam10: " in capsys.readouterr().out.splitlines()[-1]


def tiny_whisper():
    ends = {f"{end}_{name}": 2 for end in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(
        vocab_size=1600, d_model=8, num_mel_bins=8, suppress_tokens=None, begin_suppress_tokens=None, **ends, **special
    )
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config.no_timestamps_token_id, model.generation_config.is_multilingual = 90, False
    return model


def test_recordings_fail_their_benchmark_below_a_floor(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_recordings")
    monkeypatch.setattr(bench, "transcriber", tiny_whisper)
    monkeypatch.setitem(bench.SETTINGS, "max_new_tokens", 4)
    wanted = tmp_path / "floors.json"
    for floor, status in ((1e-6, 0), (1e6, 1)):
        wanted.write_text(json.dumps({"recordings": {"recordings": {"stock": floor}}}))
        assert bench.main(["--seconds", "31", "--repeats", "1", "--floors", str(wanted)]) == status
    told = capsys.readouterr().out
    assert told.count("times as fast\n") == 2 and told.count("below the floor of 1000000.00") == 1
    with pytest.raises(SystemExit):
        bench.main(["--seconds", "30"])
    assert "--seconds 30: Whisper hears that at once (accepted: more than 30)" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "case"), (("bench_rollouts", "g8"), ("bench_prefix", "greedy16")))
def test_shared_prompts_below_a_floor_fail_their_benchmark_by_name(name, case, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module(name)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

    def small() -> tuple[LlamaForCausalLM, dict]:
        return LlamaForCausalLM(LlamaConfig(vocab_size=60, **sizes)), {}

    if name == "bench_rollouts":
        monkeypatch.setattr(bench, "llama_like", small)
        monkeypatch.setattr(bench, "LENGTH", 12)
    else:
        monkeypatch.setitem(bench.CASES, case, bench.CASES[case]._replace(model=small, prefix=12, inputs=2))
    wanted = tmp_path / "floors.json"
    for floor, status in ((0, 0), (1e9, 1)):
        wanted.write_text(json.dumps({name.removeprefix("bench_"): {case: {"stock": floor, "memory": 0}}}))
        assert bench.main([case, "--repeats", "1", "--floors", str(wanted)]) == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{case}: ")


def test_check_fails_where_a_ratio_is_lower_than_the_committed_one(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    check = importlib.import_module("check")
    assert check.slower({"a": 0.85, "b": 0.95, "new": 0.1}, {"a": 1.0, "b": 1.0}, noise=0.1) == [
        "a: 0.85 times as fast as stock, 1.00 when it was committed"
    ]
    monkeypatch.setattr(check, "HERE", tmp_path)
    assert check.main(["generate"]) == 2 and "in benchmarks/results" in capsys.readouterr().out
    (tmp_path / "results").mkdir()
    told = {"cpu": check.cpu(), "results": [{"case": "bart-beam4-one-row", "ratios": {"stock": 2.0}}]}
    (tmp_path / "results" / "generate-here.json").write_text(json.dumps(told))
    program = "import json, sys; json.dump({'results': [{'case': 'bart-beam4-one-row', 'ratio': %s}]}, open(%s, 'w'))"
    for ratio, status in (1.9, 0), (1.7, 1):
        (tmp_path / "bench_generate.py").write_text(program % (ratio, "sys.argv[-1]"))
        assert check.main(["generate"]) == status


def test_check_knows_the_committed_ratios_of_the_papers_tables(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    check = importlib.import_module("check")
    monkeypatch.setattr(check, "HERE", tmp_path)
    for machine, others in (("here", {}), ("gpu", {"gpu": "A GPU"})):
        (tmp_path / "results" / f"papers-{machine}").mkdir(parents=True)
        told = {"cpu": check.cpu(), "results": [{"case": machine, "ratio": 2.0}], **others}
        (tmp_path / "results" / f"papers-{machine}" / "table1-t5.json").write_text(json.dumps(told))
    assert check.committed("best_batch") == {"here": 2.0} and check.committed("quality") == {}


def test_check_runs_cases_that_there_are(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    check = importlib.import_module("check")
    for name, cases in check.QUICK.items():
        if name == "fairseq":
            pytest.importorskip("fairseq")
        assert set(cases) <= set(importlib.import_module(f"bench_{name}").CASES)


@pytest.fixture
def papers(monkeypatch, tmp_path):
    """The driver with two parts, which only write what they were called with, and a folder of its own for results."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module, shown = importlib.import_module("papers"), importlib.import_module("show_papers")
    program = (
        "import json, sys; name, out = sys.argv[1], sys.argv[sys.argv.index('--json') + 1]\n"
        "json.dump({'commit': %r, 'results': [], 'arguments': sys.argv[1:]}, open(out, 'w')); sys.exit(name == 'bad')"
    )
    (tmp_path / "bench_part.py").write_text(program % module.commit())
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "PARTS", {name: module.Part("bench_part.py", (name,)) for name in ("good", "bad")})
    monkeypatch.setattr(shown, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(shown, "main", lambda: 0)
    return module


def test_a_run_of_the_papers_skips_parts_that_this_commit_has_measured(papers, capfd):
    assert papers.main(["--only", "good"]) == 0
    assert papers.main([]) == 1 and papers.main([]) == 0
    told = capfd.readouterr().out
    assert told.count("good: done before") == 2 and told.count("bad: done before") == 1 and "bad: failed" in told
    path = next((papers.HERE / "results").glob("papers-*/good.json"))
    path.write_text(path.read_text().replace(papers.commit(), "another"))
    papers.main(["--only", "good"])
    assert "done before" not in capfd.readouterr().out
    papers.main(["--only", "good", "--again"])
    assert "done before" not in capfd.readouterr().out


def test_parts_of_the_papers_get_floors_and_the_device(papers, monkeypatch, capfd):
    assert papers.main(["--device", "cuda"]) == 0 and "no GPU was found" in capfd.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    papers.main(["--device", "cuda", "--only", "good", "--floors", "floors.json"])
    arguments = json.loads((papers.HERE / "results" / "papers-a-gpu" / "good.json").read_text())["arguments"]
    assert arguments[3:] == ["--device", "cuda", "--dtype", "float16", "--floors", "floors.json"]
    with pytest.raises(SystemExit):
        papers.main(["--only", "ugly"])
    assert "--only ugly: choose from good, bad" in capfd.readouterr().err


def test_parts_of_the_papers_are_cases_that_there_are(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    papers, cases = importlib.import_module("papers"), {}
    for part in papers.PARTS.values():
        module = importlib.import_module(part.benchmark.removesuffix(".py"))
        named = [argument for argument in part.arguments if argument in getattr(module, "CASES", ())]
        cases.setdefault(part.benchmark, []).extend(named)
    tables, growth = importlib.import_module("paper_tables"), importlib.import_module("bench_growth")
    assert cases["bench_best_batch.py"] == list(tables.TABLE_1) and cases["bench_growth.py"] == list(growth.CASES)
    assert cases["bench_ablation.py"] == ["steps", "stages"]


def test_the_page_of_the_papers_holds_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    shown = importlib.import_module("show_papers")
    assert (BENCHMARKS.parent / "docs" / "papers.md").read_text(encoding="utf-8") == shown.page()


def test_batches_are_doubled_until_samples_per_second_grow_no_more(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_best_batch")
    clock = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def generate(batch: int) -> torch.Tensor:
        clock[0] += {1: 1.0, 2: 1.1, 4: 1.2, 8: 2.6}[batch]
        return torch.zeros(batch, 1)

    doubling = bench.Doubling(generate)
    assert doubling.run() == 4
    assert [trial["batch"] for trial in doubling.trials] == [1, 2, 4, 8]


def test_samples_behind_a_dense_mask_are_those_of_the_library(monkeypatch):
    """Which makes MultiGen's second method, that is measured beside, the same work."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_growth")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, initializer_range=0.5, pad_token_id=0, **sizes)).eval()
    ways = bench.multigen(model, {"source": 7, "samples": 3, "batch": 2, "output": 5})
    assert torch.equal(ways["stock"]()[:, 7:], ways["dense mask"]())


def test_slopes_are_those_of_a_line(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_growth")
    points = [
        {"size": size, "seconds": {"stock": 1 + size / 500}, "added_mb": {"stock": 3 * size}} for size in (1, 2, 4)
    ]
    assert bench.slopes(points, "stock") == pytest.approx({"ms": 2.0, "mb": 3.0})
