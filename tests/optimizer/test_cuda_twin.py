"""On a twin of a GPU its tests pass, no captured step makes the host wait, and eager steps launch no more.

torch's `FakeTensorMode` is no substitute: without CUDA it cannot index tensors of a GPU, and whatever it finds with the
twin's library loaded, the twin finds in a whole call.
"""

import json
import os
import re
from importlib.util import find_spec

import pytest
import torch
from architectures import BY_NAME
from cuda_twin import compiled
from host_compiler import needs_compiler
from made_once import made_once
from python_process import REPOSITORY, run_python

HELPERS = REPOSITORY / "tests" / "helpers"
HAS_FAIRSEQ = find_spec("fairseq") is not None
# The most launches of a captured step: those of its graph, which is one, of what chooses tokens, and of reorders; and
# those of an eager step with shared prompts, whose attention in segments launches more. At most 10 % above the counts.
LAUNCHES = {
    "BART, beam 4": (62, 156),
    "Llama, beam 4": (68, 198),
    "Llama, beam 4, no 3-gram twice": (86, 217),
    "Llama, 16 samples": (24, 149),
    "Llama, greedy": (14, 113),
    "fairseq, beam 4": (57, 106),
}
LOOPS = [loop for loop in LAUNCHES if HAS_FAIRSEQ or "fairseq" not in loop]

# Left out: what a GPU rounds otherwise than a CPU (most of half precision), what the twin does not have (kernels in
# CUDA, and in Triton those of checksums and attention, cuDNN's LSTM, `torch.cuda.graph`, streams that sleep, a second
# GPU, a bound of a process's memory, errors of a device), and models that other tests cover.
LEFT_OUT = "outlives or half or second_gpu or ancestors or tokens_of and (gpt2 or t5 or whisper)"
COMMANDS, NGRAMS = "plain_loop or resumed", "bans_as_defined and torch or first_kernel"
TESTS = f"captured_steps and not ({LEFT_OUT}) or {COMMANDS} or {NGRAMS} or log_probs"
FAIRSEQ = "fairseq and (hypotheses or first_words or halves) and not lstm"
IN_ONE_KERNEL = "ancestors or (beams and tokens_of and (llama or bart)) or hypotheses_of_cuda_graphs"
ARCHITECTURES = "test_fp32_tokens_and_scores"  # the twin refuses tensors of a CPU among a GPU's
OF_FAIRSEQ = ["fairseq_parity"] * HAS_FAIRSEQ
RUNS = {  # files, which of their tests, at least how many, whether attention is one kernel
    "torch": (["captured_steps", "cli", "no_repeat_ngram", "token_log_probs"], TESTS, 40, "0"),
    "fairseq": (OF_FAIRSEQ, FAIRSEQ, 70, "0"),
    "kernel": (["captured_steps", *OF_FAIRSEQ], IN_ONE_KERNEL, 5, "1"),
    "architectures": (["parity"], ARCHITECTURES, 90, "0"),
}
FEW = ["gpt2", "llama", "bart", "t5", "whisper", "qwen3_next", "mamba"]
# Captures begin and fail: the forward reads the device (xglm), copies an index to it (falcon), or takes no mask that is
# longer than its keys.
REFUSED = {"bloom", "falcon", "falcon-alibi", "xglm"}

needs_fairseq = pytest.mark.skipif(not HAS_FAIRSEQ, reason="fairseq is not installed")

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA: the twin is for builds without it"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The compiled cuda_twin.cpp."""
    return made_once(tmp_path_factory.getbasetemp(), "cuda_twin", compiled) / "libcuda_twin.so"


@pytest.fixture(scope="module")
def steps(library, tmp_path_factory):
    """The counts that cuda_twin_steps.py prints."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "FASTGEN_STRICT": "1",
        "FASTGEN_CACHE": str(tmp_path_factory.mktemp("cache")),
    }
    done = run_python(str(HELPERS / "cuda_twin_steps.py"), str(library), path=HELPERS, **environment)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "run",
    [
        pytest.param("torch", marks=pytest.mark.slow),
        pytest.param("fairseq", marks=[needs_fairseq, pytest.mark.slow]),
        "kernel",
        pytest.param("architectures", marks=pytest.mark.slow),
    ],
)
def test_the_tests_of_a_gpu_pass_on_its_twin(library, run):
    names, tests, count, kernels = RUNS[run]
    files = [str(REPOSITORY / "tests" / "gpu" / f"test_{name}_cuda.py") for name in names]
    environment = {"OMP_NUM_THREADS": "1", "FASTGEN_STRICT": "1", "CUDA_TWIN": str(library)}
    plugins = ("-p", "cuda_twin", "-p", "no:cacheprovider")
    options = {"path": HELPERS, "CUDA_TWIN_KERNELS": kernels, **environment}
    done = run_python("-m", "pytest", "-q", *plugins, *files, "-k", tests, **options)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert not done.returncode and passed and int(passed[1]) >= count and "skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, id="few", marks=pytest.mark.covered_by_slow),
        pytest.param([*BY_NAME], id="all", marks=pytest.mark.slow),
    ],
)
def test_steps_of_architectures_are_captured(library, names):
    script = str(HELPERS / "cuda_twin_architectures.py")
    done = run_python(script, str(library), *names, path=HELPERS, OMP_NUM_THREADS="1")
    assert not done.returncode, done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])
    replayed = [name for name, (replays, _) in steps.items() if replays]
    others = {name: reasons for name, (replays, reasons) in steps.items() if not replays}
    refused = {name: reasons for name, reasons in others.items() if "CAPTURE_REFUSED" in reasons}
    assert refused.keys() <= REFUSED, refused
    assert all(others.values()), others
    assert set(replayed).issuperset(FEW) and len(replayed) >= len(names) * 0.6, others


@pytest.mark.xdist_group("cuda_twin")
@pytest.mark.parametrize("loop", LOOPS)
def test_the_host_waits_for_no_captured_step(steps, loop):
    assert steps[loop]["stock"]["waits"] >= 1
    for way in ("on", "on, shared"):
        assert steps[loop][way]["replayed"] > 40
        assert steps[loop][way]["waits"] <= 0
    assert steps[loop]["on, shared"]["shares"] is (loop != "Llama, greedy")


@pytest.mark.xdist_group("cuda_twin")
@pytest.mark.parametrize("loop", LOOPS)
def test_eager_steps_launch_no_more_than_the_library(steps, loop):
    assert 90 < steps[loop]["off"]["launches"] <= steps[loop]["stock"]["launches"]


@pytest.mark.xdist_group("cuda_twin")
@pytest.mark.parametrize("loop", LOOPS)
def test_steps_launch_no_more_than_was_counted(steps, loop):
    captured, shared = LAUNCHES[loop]
    assert steps[loop]["on"]["launches"] <= captured
    assert steps[loop]["on, shared"]["launches"] <= captured
    assert steps[loop]["off, shared"]["launches"] <= shared


@pytest.mark.xdist_group("cuda_twin")
@pytest.mark.parametrize("loop", LOOPS)
def test_the_host_waits_no_more_for_eager_steps(steps, loop):
    """The loop for fairseq reads flags a step late; eager steps of transformers wait as often as the library's."""
    for way in ("off", "off, shared"):
        assert steps[loop][way]["waits"] <= (0 if "fairseq" in loop else steps[loop]["stock"]["waits"])


@pytest.mark.xdist_group("cuda_twin")
def test_graphs_begin_with_the_second_step_by_default(steps):
    """A call's prefill and two steps are eager, because many calls end early."""
    assert steps["forwards before a capture"] == 3


@pytest.mark.xdist_group("cuda_twin")
def test_a_layer_launches_less_with_small_kernels(steps):
    launches = steps["a Llama layer"]
    assert launches["Liger"] <= 20 < launches["torch"]


@pytest.mark.xdist_group("cuda_twin")
@pytest.mark.parametrize("loop", [name for name in LOOPS if "beam" in name])
def test_a_reorder_by_table_launches_less(steps, loop):
    assert steps[loop]["kernel"]["launches"] <= steps[loop]["on"]["launches"] - 2
    assert steps[loop]["kernel"]["waits"] <= steps[loop]["on"]["waits"]


# The first call has a case that raises; in the second one it does not, but those of parts that have ended would.
DRY_RUN = """
import json, sys
from pathlib import Path
from unittest import mock
import cuda_twin
cuda_twin.install(sys.argv[1])
import gpu_check

def fail():
    raise ValueError("it is to fail\\nin this call")

def check(*failing):
    with mock.patch.dict(gpu_check.PARTS, dict.fromkeys(failing, lambda options: {"failing": fail})):
        return gpu_check.main(["--dry", "--in-process", "--page", "page.md"])

assert check("attention") == 1
results = json.loads(Path("gpu-check.json").read_text())
assert list(results) == ["environment", *gpu_check.PARTS]
assert results["attention"] == {"failing": {"error": "ValueError: it is to fail"}}
del results["attention"]
Path("gpu-check.json").write_text(json.dumps(results))
with mock.patch.object(gpu_check.gpu_models, "_times", fail):
    assert check() == 0
"""


@pytest.mark.slow
def test_a_dry_run_of_gpu_check_writes_each_part(library, tmp_path):
    page_file = tmp_path / "page.md"
    page_file.write_text("before\n<!-- gpu-check: begin -->\nold\n<!-- gpu-check: end -->\nafter\n")
    path = os.pathsep.join([str(HELPERS), str(REPOSITORY / "tools")])
    environment = {"OMP_NUM_THREADS": "1", "CUDA_TWIN": str(library)}
    done = run_python("-c", DRY_RUN, str(library), path=path, cwd=tmp_path, **environment)
    assert not done.returncode, done.stdout + done.stderr
    results, page = json.loads((tmp_path / "gpu-check.json").read_text()), page_file.read_text()
    parts = ["environment", "smoke", "profile", "generate", "tests", "parity", "rates", "sanitize", "attention"]
    assert list(results) == parts
    assert len(results["smoke"]) == 6 and all(test["status"] == 0 for test in results["smoke"].values())
    assert all(len(kernels) > 5 and kernels["us_of_a_step"] > 0 for kernels in results["profile"].values())
    assert all(way["equal_tokens"] == 1 for ways in results["generate"].values() for way in ways.values())
    assert len(results["generate"]) == 10 + HAS_FAIRSEQ
    assert all(ways["fastgen"]["replayed"] for ways in results["generate"].values())
    for case, cell in results["parity"].items():
        assert cell["replayed"] and (cell["equal"] == 4 or "bfloat16" in case)
    assert all(ways.keys() == {"stock", "torch's products", "fastgen"} for ways in results["attention"].values())
    assert "no-repeat n-gram (CUDA: " in page
    assert results["rates"].keys() == {"eager", "in a graph"} and "according to the rates of an H200" in page
    assert results["tests"]["all"]["status"] == 0 and "1 passed" in page
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page and "dry run" in page
