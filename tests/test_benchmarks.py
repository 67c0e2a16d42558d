"""Benchmarks: a tiny case of each kind, floors and outputs that fail a run, files of results and their pages."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from seamless_models import SIZES

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.usefixtures("one_thread")

ENDS = {f"{end}_{name}": 2 for end in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")}
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
HEADS = {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}
WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NARROW = WIDTHS | {"num_key_value_heads": 2, "vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR |= {"num_hidden_layers": 4, "mlp_only_layers": [*range(4)], "num_experts": 2}
WHISPER = {"vocab_size": 51865, "d_model": 8, "num_mel_bins": 8, "suppress_tokens": None, **ENDS}
T5 = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
TINY = {
    "bart": ("BartForConditionalGeneration", {"vocab_size": 60, "d_model": 8, "init_std": 0.5, **ENDS}),
    "llama": ("LlamaForCausalLM", {"vocab_size": 2000, "pad_token_id": 0, **WIDTHS}),
    "llama-512": ("LlamaForCausalLM", NARROW),
    "gemma3-512": ("Gemma3ForCausalLM", NARROW | {"head_dim": 8, "sliding_window": 8}),
    "mistral-512": ("MistralForCausalLM", NARROW | {"sliding_window": 8}),
    "qwen3-next-512": ("Qwen3NextForCausalLM", NARROW | LINEAR | {"head_dim": 8}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 2000, **T5}),
    "prophetnet": ("ProphetNetForConditionalGeneration", {"vocab_size": 60, "hidden_size": 16, **LAYERS, **HEADS}),
    "whisper": ("WhisperForConditionalGeneration", {"begin_suppress_tokens": None, **WHISPER}),
}
BEAMS = "arguments={'num_beams': 2, 'do_sample': False, 'max_new_tokens': 4}"
GRPO = ["model=llama", "prompts=2", "length=12", "completions=2", "completion_length=4"]
# Case, fields that make it small, and whether the test is slow. {model}: a key of TINY.
CASES = {
    "bart-beam4": (["model=bart", "length=6", BEAMS], False),
    "gpt2-sample16": (["model=llama", "length=6"], False),
    "recordings": (["model=whisper", "rows=1", "length=31"], False),
    "unilm-beam5": (["rows=1", "length=12", BEAMS], True),
    "prophetnet-beam5": (["model=prophetnet", "length=6", BEAMS], False),
    "prefix/samples8": (["model=llama", "rows=2", "length=3", "prefix=12"], False),
    "prefix/reused4": (["model=llama", "rows=2", "length=3", "prefix=12"], False),
    "rollouts/g8": (["model=llama", "rows=2", "length=12"], False),
    "constrained/ids-beam20": (["model=llama", "length=9"], True),
    "constrained/names-beam10": (["model=t5", "length=9"], True),
    "fairseq/bart-batch1": (["model=tiny", "length=6", "new_tokens=4"], False),
    "pipeline/loop": (["lines=6"], False),
    "fairseq_command/command": (["lines=20"], True),
    "trainer/grpo": (["model=llama", "groups=2", "prompt=9", "length=4"], False),
    "lm_eval/choice4": (["questions=2", "length=4", "options=2"], True),
    "attention/4-4-3-4-128-16-64": (["prompt=8"], False),
    "attention/bart-encoder": (["length=128"], False),
    "ngram/own-4x32-2": ([], False),
    "mqa/multi-query": (["length=8", "batch=2"], False),
    "small": (["shapes=1"], False),
    "drafts/llama-1-80": (["model=llama", "length=48", "new_tokens=12"], False),
    "trainer/trl-grpo": (GRPO, True),
    "trainer/trl-grpo-defaults": (GRPO, True),
    "drafts/command-1": (["lines=2", "length=8", "new_tokens=8"], True),
    "lm_eval/greedy-alone": (["questions=2", "length=8"], True),
}
OPTIONAL = {"fairseq": "fairseq", "fairseq_command": "fairseq", "lm_eval": "lm_eval"}
OPTIONAL |= {"trainer/trl-grpo": "trl", "trainer/trl-grpo-defaults": "trl"}


@pytest.fixture
def bench(monkeypatch):
    """The driver, with tiny models."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    calls, commands, fairseq, stages = map(importlib.import_module, ("calls", "commands", "fairseq_cases", "stages"))
    for name, (kind, sizes) in TINY.items():
        title = calls.MODELS[name].title if name in calls.MODELS else name  # pages have it
        monkeypatch.setitem(calls.MODELS, name, calls.Model(f"transformers:{kind}", sizes, title))
    monkeypatch.setattr(calls.ConstrainedWork, "OUTPUTS", 500)
    monkeypatch.setattr(commands, "TRAINING_LINES", 200)
    monkeypatch.setattr(commands, "UPDATES", 20)
    monkeypatch.setitem(fairseq.MODELS, "tiny", (50, "transformer_tiny", {}))
    sizes = {"vocab_size": 40, "d_model": 16, "head_dim": 4, "encoder_layers": 2, "decoder_layers": 2}
    monkeypatch.setattr(stages, "SIZES", sizes)
    return importlib.import_module("bench")


@pytest.fixture
def run(bench, tmp_path):
    """Runs cases with floors, {case: {way: ratio}}; returns the status and the results."""

    def run(*flags: str, floors: dict | None = None):
        wanted, results = tmp_path / "floors.json", tmp_path / "results.json"
        wanted.write_text(json.dumps({"generate": floors or {}}))
        status = bench.main(["run", *flags, "--repeats", "1", "--floors", str(wanted), "--json", str(results)])
        return status, json.loads(results.read_text())

    return run


PARAMS = [pytest.param(case, marks=[pytest.mark.slow] * slow) for case, (_, slow) in CASES.items()]


@pytest.mark.parametrize("case", PARAMS)
def test_a_tiny_case_of_each_kind_is_measured_and_has_a_floor(run, case, capsys):
    pytest.importorskip(OPTIONAL.get(case) or OPTIONAL.get(case.partition("/")[0], "transformers"))
    status, data = run(case, *["--set"] * bool(CASES[case][0]), *CASES[case][0])
    (result,) = data["results"]
    assert status == 0 and result["equal"]
    assert data["threads"] == 1 and data["cpu"] and data["versions"]["torch"] and 0 <= result["others"] <= 1
    assert f"{result['kind']}/{result['case']}:" in capsys.readouterr().out
    other, ratio = next(iter(result["ratios"].items()))
    missed = importlib.import_module("bench").failures(result, {result["case"]: {other: 1e6}})
    assert ratio > 0 and missed == [f"{result['case']}: {ratio:.2f} against {other}, below the floor of 1000000.00"]


@pytest.mark.slow
def test_each_call_of_people_runs_and_is_compared(run, bench):
    pytest.importorskip("peft")
    status, data = run("reach", "--set", "length=16", "new_tokens=6")
    results = {result["case"]: result for result in data["results"]}
    assert status == 0 and [*results] == [*bench.cases_of("reach")]
    assert all(result["equal"] and result["ratios"]["stock"] > 0 for result in results.values())
    assert results["greedy-assisted"]["reason"]["code"] == "NO_PREFILL" and results["samples8"]["reason"] is None


@pytest.mark.parametrize("name", ("sequences", "scores"))
def test_tokens_and_scores_of_such_calls_are_compared(bench, name):
    reach = importlib.import_module("reach")
    output = {"sequences": torch.tensor([[3, 4]]), "scores": (torch.tensor([[0.0, float("-inf")]]),)}
    other = output | {name: torch.tensor([[3, 5]]) if name == "sequences" else (torch.tensor([[0.1, float("-inf")]]),)}
    assert reach.are_equal(output, {**output}) and not reach.are_equal(output, other)


def test_a_ratio_below_its_floor_fails_the_run_by_name(run, capsys):
    small = ["bart-beam4", "--set", *CASES["bart-beam4"][0]]
    assert run(*small, floors={"bart-beam4": {"stock": 1e-6}})[0] == 0
    assert run(*small, floors={"bart-beam4": {"stock": 1e6}})[0] == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("bart-beam4: ")


@pytest.mark.parametrize(
    ("added", "missed"),
    [
        ({"stock": 80.0, "fastgen": 20.0}, []),
        ({"stock": 50.0, "fastgen": 20.0}, ["case: 2.50 against memory, below the floor of 4.00"]),
        ({"stock": 0.0, "fastgen": 0.0}, ["case: 0.00 against memory, below the floor of 4.00"]),
        ({}, []),
    ],
    ids=("less", "more", "nothing", "unknown"),
)
def test_a_floor_of_memory_is_the_ratio_of_what_is_added(bench, added, missed):
    result = {"case": "case", "ratios": {"stock": 2.0}, "equal": True, "added_mb": added}
    assert bench.failures(result, {"case": {"memory": 4.0}}) == missed


def test_outputs_that_differ_fail_the_run(run, monkeypatch, capsys):
    calls = importlib.import_module("calls")
    monkeypatch.setattr(calls.Work, "are_equal", lambda *_: False)
    assert run("bart-beam4", "--set", *CASES["bart-beam4"][0])[0] == 1
    assert capsys.readouterr().out.splitlines()[-1] == "bart-beam4: outputs differ"


@pytest.mark.parametrize(
    ("flags", "message"),
    (
        (["run", "bart"], "CASE 'bart': choose from bart-beam4, "),
        (["run", "fairseq/bart"], "CASE 'fairseq/bart': choose from bart-beam4, "),
        (["run", "bart-beam4", "--set", "lenght=6"], "--set 'lenght=6': write FIELD=VALUE, with a FIELD of model, "),
        (["run", "ngram", "--against", "CTranslate2"], "--against: of generate, prefix cases, not ngram"),
        (["run", "ngram", "--floors", "FLOORS"], "--floors FLOORS: ngram 'own': choose from own-4x32-2, "),
        (["run", "t5-beam4", "--against", "all", "--dtype", "bfloat16"], "--dtype float32 only, not cpu and bfloat16"),
    ),
)
def test_a_wrong_flag_is_named_with_what_is_accepted(bench, flags, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("FLOORS").write_text('{"ngram": {"own": {"fairseq": 1}}}')
    with pytest.raises(SystemExit):
        bench.main(flags)
    assert message in capsys.readouterr().err


def test_all_floors_belong_to_cases(bench):
    floors = json.loads((BENCHMARKS / "floors.json").read_text())
    for section, cases in floors.items():
        assert set(cases) <= set(bench.cases_of(section.removesuffix(" cuda"))), section


def test_a_file_of_results_keeps_other_cases_and_no_other_cpu(run, tmp_path, capsys):
    run("bart-beam4", "--set", *CASES["bart-beam4"][0])
    run("ngram/own-4x32-2")
    _, data = run("ngram/own-4x32-2")
    assert [result["case"] for result in data["results"]] == ["bart-beam4", "own-4x32-2"]
    (tmp_path / "results.json").write_text(json.dumps({**data, "cpu": {"name": "another"}}))
    with pytest.raises(SystemExit):
        run("ngram/own-4x32-2")
    assert "has results of another CPU" in capsys.readouterr().err


def test_ways_take_turns_and_the_first_rotates(bench):
    measure, order = importlib.import_module("measure"), []
    ways = {way: lambda way=way: order.append(way) for way in ("fastgen", "stock", "peer")}
    turns = list(measure.in_turns(ways, 2, measure.Options(), {}))
    assert order == ["fastgen", "stock", "peer", "stock", "peer", "fastgen"] and len(turns) == 2
    turns = [{"fastgen": 1.0, "stock": 2.0}, {"fastgen": 1.0, "stock": 4.0}]
    assert measure.statistics_of(turns)["ratios"] == {"stock": 3.0}


@pytest.mark.parametrize("version", ["SeamlessM4Tv2", "SeamlessM4T"])
def test_all_stages_of_seamless_are_timed(run, monkeypatch, version):
    stages = importlib.import_module("stages")
    name = "v2" if version.endswith("v2") else "v1"
    monkeypatch.setattr(stages, "SIZES", {**SIZES[version], "decoder_layers": 2})
    monkeypatch.setattr(stages, "FRAMES", 20)
    sizes = ["layers=2", "tokens=6"] + ["units=8"] * (name == "v1")
    _, data = run(f"seamless/{name}", "--set", *sizes)
    (result,) = data["results"]
    assert result["equal"] and result["tokens"] == 8
    for seconds in result["seconds"].values():
        parts = [seconds[stage] for stage in (*stages.STAGES, stages.REST)]
        assert min(parts) > 0 and sum(parts) == pytest.approx(seconds["end to end"])
    assert "as large, but 2 layers at most" in importlib.import_module("report").seamless_table(result)


@pytest.mark.parametrize("page", ["benchmarks.md", "papers.md", "dev/papers-other-machines.md"])
def test_pages_hold_the_measured_figures(bench, page):
    report = importlib.import_module("report")
    assert (report.DOCS / page).read_text(encoding="utf-8") == report.page(page)


def test_new_results_of_all_cases_make_tables(run, monkeypatch, tmp_path):
    report = importlib.import_module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for kind, case in (
        ("generate", "bart-beam4"),
        ("rollouts", "rollouts/g8"),
        ("papers-here/table1-t5", "bart-beam4"),
    ):
        _, data = run(case, "--set", *CASES[case][0])
        path = tmp_path / (f"{kind}.json" if "/" in kind else f"{kind}-here.json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(data))
        (tmp_path / "results.json").unlink()
    text = report.benchmark_tables()
    assert (
        "## Calls of `generate`\n" in text
        and "\n### " in text
        and "| BART-base, 4 × 512 tokens" in text
        and "8 rows each" in text
    )
    assert "| T5 | 12L-12L-768 |" in report.paper_tables()


@pytest.fixture
def papers(monkeypatch, tmp_path):
    """Parts whose runs only write their arguments, and a folder of results."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module, bench = map(importlib.import_module, ("papers", "bench"))
    program = (
        "import json, sys; name, out = sys.argv[2], sys.argv[sys.argv.index('--json') + 1]\n"
        "json.dump({'commit': %r, 'results': [], 'arguments': sys.argv[1:]}, open(out, 'w')); sys.exit(name == 'bad')"
    )
    (tmp_path / "bench.py").write_text(program % module.commit())
    monkeypatch.setattr(module, "__file__", str(tmp_path / "papers.py"))
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "PARTS", {name: module.Part((name,)) for name in ("good", "bad")})
    monkeypatch.setattr(bench.report, "write", lambda: None)
    return module, lambda *flags: bench.main(["papers", *flags])


def test_a_run_of_the_papers_skips_parts_measured_before(papers, capfd):
    module, main = papers
    assert main("--only", "good") == 0 and main() == 1 and main() == 0
    text = capfd.readouterr().out
    assert text.count("good: done before") == 2 and text.count("bad: done before") == 1 and "bad: failed" in text
    path = next(module.RESULTS.glob("papers-*/good.json"))
    path.write_text(path.read_text().replace(module.commit(), "another"))
    main("--only", "good")
    main("--only", "good", "--again")
    assert "done before" not in capfd.readouterr().out
    assert main("--again", "--seconds", "0") == 0
    assert capfd.readouterr().out.count("not measured, 0 seconds are over") == 2


def test_parts_of_the_papers_get_floors_and_the_device(papers, monkeypatch, capfd):
    module, main = papers
    assert main("--device", "cuda") == 0 and "no GPU was found" in capfd.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    main("--device", "cuda", "--only", "good", "--floors", "floors.json")
    arguments = json.loads((module.RESULTS / "papers-a-gpu" / "good.json").read_text())["arguments"]
    assert arguments[:5] == ["run", "good", "--device", "cuda", "--dtype"] and "floors.json" in arguments


def test_parts_of_the_papers_are_cases_that_exist(bench):
    parts = importlib.import_module("papers").PARTS
    tables = {name.removeprefix("table1-") for name in parts if "table1" in name}
    assert tables == {*importlib.import_module("report").TABLE_1}
    for part in parts.values():
        names, _, fields = " ".join(part.arguments).partition(" --set ")
        for kind, name in bench.find_cases([part.arguments[0]]):
            assert kind in names or kind == "generate"
            bench.with_fields(bench.cases_of(kind)[name], fields.split()[:1])
