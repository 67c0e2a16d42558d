"""Products through oneDNN and the skinny GEMM: the same numbers, used only if they are the fastest."""

import json
import os
import pwd
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from architecture_parity import measure
from architectures import BY_NAME
from hooks import ANY_SIZE, costs, force, replaced
from python_process import run_code
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

import fastgen
from fastgen.ops import cpu_linear, measurements, simd
from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.decoding.cost_model import size_of
from fastgen.optimizer.decoding.faster_forwards import faster_forwards
from fastgen.optimizer.transformers.call import forwards
from fastgen.optimizer.transformers.checks import KNOWN
from fastgen.testing import configured

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


no_skinny_gemm = pytest.mark.skipif(bool(simd.machine_reasons()), reason=f"skinny GEMM: {simd.machine_reasons()}")


@pytest.fixture(params=[cpu_linear.ONEDNN, pytest.param(cpu_linear.SKINNY_GEMM, marks=no_skinny_gemm)])
def everywhere(request):
    """Sends all products this way; returns the name they are counted under."""
    with force(request.param), costs(**ANY_SIZE):
        yield f"cpu_linear, {request.param}"


@pytest.mark.parametrize("rows", [(2, 1), (4, 1), (3, 5), (64, 1), (200,)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_products_are_those_of_torch(rows, with_bias, kind, everywhere):
    torch.manual_seed(0)
    states = torch.randn(*rows, 48)
    module = nn.Linear(48, 1003, with_bias) if kind == "linear" else Conv1D(1003, 48)
    with torch.no_grad():
        expected = module(states)
        with generate_call("test") as call, faster_forwards(call, {module: module.modules()}, forwards()):
            output = module(states)
    assert call.report.kernels == {everywhere: 1}
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-4)


def test_models_in_float64_keep_their_forwards():
    assert size_of(nn.Linear(1024, 1024), KNOWN).large == 1 << 20
    assert size_of(nn.Linear(1024, 1024).bfloat16(), KNOWN).large == 1 << 20
    assert size_of(nn.Linear(1024, 1024).half(), KNOWN).large == 1 << 20
    assert size_of(nn.Linear(1024, 1024).double(), KNOWN).large == 0


@no_skinny_gemm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_products_of_half_the_bytes_are_rounded_once(kind, dtype, everywhere):
    if everywhere.removeprefix("cpu_linear, ") not in cpu_linear.gemm_backends(dtype):
        pytest.skip(f"{everywhere} has no products in {dtype} on this CPU")
    torch.manual_seed(0)
    states = torch.randn(3, 5, 48).to(dtype)
    module = (nn.Linear(48, 1003) if kind == "linear" else Conv1D(1003, 48)).to(dtype)
    with torch.no_grad():
        exact = module.double()(states.double())
        module.to(dtype)
        with generate_call("test") as call, faster_forwards(call, {module: module.modules()}, forwards()):
            output = module(states)
    assert call.report.kernels == {everywhere: 1} and output.dtype == dtype
    torch.testing.assert_close(output.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gpt2", "greedy"),
        ("bart", "beam search"),
        ("t5", "sampling"),
        ("whisper", "beam search"),
        ("llama", "sampling"),
    ],
)
def test_generation_uses_each_backend_with_the_same_tokens(name, mode, everywhere):
    architecture = BY_NAME[name]
    parity = measure(architecture.model(), architecture.inputs(), mode)
    assert parity.tokens_equal
    assert parity.largest_score_difference < 1e-4
    assert parity.report.kernels[everywhere] > 0


def test_machines_without_onednn_keep_torchs_products(everywhere):
    architecture = BY_NAME["gpt2"]
    with replaced("reasons against oneDNN", lambda *args: ["this build of torch has no oneDNN"]):
        assert measure(architecture.model(), architecture.inputs(), "greedy").report.kernels[everywhere] == 0


def test_types_strides_and_gradients_decide_who_multiplies():
    states, weight = torch.randn(4, 1024), torch.randn(1024, 1024)
    assert not cpu_linear.can_multiply(states, weight, None)  # gradients are recorded
    with torch.no_grad():
        assert cpu_linear.can_multiply(states, weight, None)
        assert not cpu_linear.can_multiply(states, weight[:100], None)
        assert cpu_linear.can_multiply(states[:1], weight, None)
        assert not cpu_linear.can_multiply(states.t().contiguous().t(), weight, None)
        assert not cpu_linear.can_multiply(states.double(), weight.double(), None)
        assert not cpu_linear.can_multiply(states, weight.bfloat16(), None)
        assert cpu_linear.can_multiply(states.bfloat16(), weight.bfloat16(), None)
        assert cpu_linear.can_multiply(states.half(), weight.half(), None)
        assert not cpu_linear.can_multiply(states, weight, torch.randn(1, 1024))
        assert not cpu_linear.can_multiply(states[:, :100], weight, None)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not cpu_linear.can_multiply(states, weight, None)


def file_of_products() -> Path:
    return measurements.path(cpu_linear.KIND, cpu_linear._cpu())


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """The seconds of each backend, what was measured, and the backends; no measurement is stored yet."""
    seconds = {cpu_linear.BLAS: 1.0, cpu_linear.ONEDNN: 0.5, cpu_linear.SKINNY_GEMM: 0.7}
    backends = {name: partial(functional.linear) for name in seconds}
    measured = []

    def timed(function, rows, weight, bias):
        name = next(name for name, way in backends.items() if way is function)
        measured.append((name, tuple(rows.shape)))
        return seconds[name]

    monkeypatch.setattr(cpu_linear, "gemm_backends", lambda dtype: backends)
    monkeypatch.setattr(cpu_linear, "seconds_of", timed)
    monkeypatch.setattr(cpu_linear, "SECONDS", float("inf"))  # all rounds, however slow the machine is
    later_process()
    with configured(cache=str(tmp_path / "new folder")):
        yield seconds, measured, backends
    later_process()


WEIGHT = torch.zeros(1024, 512)
KIND = cpu_linear.GemmShape(4, 512, 1024, False, False, "torch.float32", torch.get_num_threads())


def fastest(rows: int = 3, weight: torch.Tensor = WEIGHT, bias: torch.Tensor | None = None) -> str:
    states = torch.zeros(rows, weight.shape[1], dtype=weight.dtype)
    with torch.no_grad():
        return cpu_linear.fastest(states, weight, bias, lambda: [torch.zeros(9)])


def later_process() -> None:
    cpu_linear.MEASURED.clear()


def test_the_skinny_gemm_multiplies_many_rows_without_onednn(timed):
    seconds, measured, backends = timed
    del backends["oneDNN"]
    seconds["skinny GEMM"] = 0.5
    assert fastest(1000) == "skinny GEMM" and {name for name, _ in measured} == {"BLAS", "skinny GEMM"}


def test_each_shape_is_measured_once_in_all_processes(timed):
    seconds, measured, _ = timed
    bias = torch.zeros(1024)
    assert fastest(3) == fastest(4) == "oneDNN"  # both count as 4 rows
    turns = [(name, (4, 512)) for name in ("BLAS", "oneDNN", "skinny GEMM") for _ in range(cpu_linear.TURNS)]
    assert measured == turns * cpu_linear.ROUNDS
    seconds["oneDNN"] = 0.8
    assert fastest(3) == "oneDNN" and fastest(5) == fastest(3, WEIGHT.t()) == "skinny GEMM"
    seconds |= {"oneDNN": 0.95, "skinny GEMM": 0.95}  # too little to be more than chance
    assert fastest(3, bias=bias) == fastest(3, WEIGHT.bfloat16()) == "BLAS"
    assert fastest(1000) == "BLAS" and measured[-1][1] == (cpu_linear.MOST_ROWS, 512)
    assert ("skinny GEMM", (cpu_linear.MOST_ROWS, 512)) not in measured
    measured.clear()
    later_process()
    assert fastest(4) == "oneDNN" and fastest(8) == fastest(3, WEIGHT.t()) == "skinny GEMM"
    assert fastest(3, bias=bias) == fastest(300) == "BLAS" and not measured
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert fastest(4) == "BLAS" and measured
    finally:
        torch.set_num_threads(threads)


def test_first_of_two_processes_that_measure_decides(timed, monkeypatch):
    """Workers and shards that start together compute the same bits."""
    measure = cpu_linear._measured

    def other_is_first(shape, *tensors):
        cpu_linear.store(shape, "skinny GEMM", timed[2])
        return measure(shape, *tensors)

    monkeypatch.setattr(cpu_linear, "_measured", other_is_first)
    assert fastest() == fastest() == "skinny GEMM"


def test_other_backends_are_measured_again(timed):
    assert fastest() == "oneDNN" and not is_measured_again(timed)
    del timed[2]["skinny GEMM"]
    later_process()
    timed[1].clear()
    assert fastest() == "oneDNN" and timed[1]


def test_a_backend_with_wrong_products_is_not_used(timed, caplog):
    backends = timed[2]
    backends["oneDNN"] = lambda rows, weight, bias: functional.linear(rows, weight, bias) * 1.01
    assert fastest(9, torch.full((1024, 512), torch.nan)) == "skinny GEMM"
    backends["oneDNN"] = lambda rows, weight, bias: functional.linear(rows, weight, bias) + 1
    assert fastest(weight=torch.ones(1024, 512)) == "skinny GEMM"
    assert "products of the kind 'oneDNN' are wrong for (1024, 512) and not used" in caplog.text
    backends["skinny GEMM"] = lambda rows, weight, bias: functional.linear(rows, weight, bias) * torch.nan
    assert fastest(5, torch.ones(1024, 512)) == "BLAS"


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 3e38])
def test_a_weight_that_is_not_finite_rejects_no_backend(timed, caplog, part, number):
    parts = {"weight": torch.ones(1024, 512), "bias": torch.ones(1024)}
    parts[part][3] = number
    before = torch.get_rng_state()
    assert fastest(3, **parts) == "oneDNN" and not caplog.text
    later_process()
    assert fastest(3, torch.ones(1024, 512), torch.ones(1024)) == "oneDNN"
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_errors_are_judged_by_the_size_of_the_numbers(timed, size):
    backends, weight, bias = timed[2], torch.full((1024, 512), size), torch.full((1024,), 100 * size)
    backends["oneDNN"] = lambda *tensors: functional.linear(*tensors) * 1.001
    backends["skinny GEMM"] = lambda *tensors: functional.linear(*tensors) * 1.00001
    assert fastest(3, weight) == "skinny GEMM"
    backends["skinny GEMM"] = lambda rows, weight, bias: functional.linear(rows, weight)
    assert fastest(3, weight, bias) == "BLAS"


CAPABILITY = torch.backends.cpu.get_cpu_capability()
FIELD = f"fastest of BLAS, oneDNN, skinny GEMM, kernels {simd.VERSION}, {CAPABILITY}"
UNKNOWN = json.dumps({"product": KIND._asdict(), FIELD: "another"}).encode()
EARLIER = json.dumps({"product": KIND._asdict(), "fastest of BLAS, oneDNN, skinny GEMM": "BLAS"}).encode()


@pytest.mark.parametrize(
    "damage",
    [b"{", b"[1]", b"1", b'{"product": {"rows": 4}}', b"\xff", b'{"product": null}', UNKNOWN, EARLIER, b"[" * 100_000],
)
def test_damaged_lines_are_measured_again(timed, damage):
    assert fastest() == "oneDNN"
    [line] = file_of_products().read_bytes().splitlines()
    file_of_products().write_bytes(damage + b"\n" + line + b"\n")
    timed[1].clear()
    later_process()
    assert fastest() == "oneDNN" and not timed[1]
    file_of_products().write_bytes(damage + line[:40])
    later_process()
    assert fastest() == "oneDNN" and timed[1]


def test_answers_are_stored_in_the_configured_or_users_cache(monkeypatch):
    with configured(cache="/here"):
        assert file_of_products().parent == Path("/here")
    with configured(cache=None):
        monkeypatch.setenv("XDG_CACHE_HOME", "/there")
        assert file_of_products().parent == Path("/there/fastgen")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert file_of_products().parent == Path.home() / ".cache" / "fastgen"


def is_measured_again(timed) -> bool:
    """Returns whether two processes measure, each for itself."""
    for _ in range(2):
        timed[1].clear()
        later_process()
        assert fastest() == "oneDNN"
    return bool(timed[1])


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_pipe_instead_of_the_measurements_does_not_block(timed, has_reader):
    file_of_products().parent.mkdir()
    os.mkfifo(file_of_products())
    reader = os.open(file_of_products(), os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    assert is_measured_again(timed)
    if reader is not None:
        assert os.read(reader, 100) == b""
        os.close(reader)


@pytest.mark.parametrize("is_link", [False, True])
def test_a_link_or_a_file_too_large_is_neither_read_nor_written(timed, tmp_path, is_link):
    assert fastest() == "oneDNN" and not is_measured_again(timed)
    if is_link:
        file_of_products().rename(tmp_path / "elsewhere")
        file_of_products().symlink_to(tmp_path / "elsewhere")
    else:
        os.truncate(file_of_products(), measurements.MAX_BYTES + 1)
    size = file_of_products().stat().st_size
    assert is_measured_again(timed) and file_of_products().stat().st_size == size


@pytest.mark.parametrize("cache", [None, "~nobody-has-this-name/x", "file/folder"])
def test_a_user_without_a_writable_folder_measures_again(timed, monkeypatch, tmp_path, cache):
    """Users without a home folder are usual in containers: HOME is not set, and the user's number has no name."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError("uid not found")))
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with configured(cache=cache):
        assert is_measured_again(timed) and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(("name", "owner", "product"), [("llama", functional, "linear"), ("gpt2", torch, "addmm")])
def test_a_product_that_user_code_replaced_is_called(name, owner, product, everywhere, monkeypatch):
    original, calls = getattr(owner, product), []

    def counting(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(owner, product, counting)
    architecture = BY_NAME[name]
    with fastgen.disabled():
        architecture.model().generate(**architecture.inputs(), max_new_tokens=3)
    expected = len(calls)
    architecture.model().generate(**architecture.inputs(), max_new_tokens=3)
    assert len(calls) == 2 * expected > 0


MULTIPLIES_IN_BF16 = """
import torch
from fastgen.ops import cpu_linear
rows, weight = torch.randn(4, 512).to(torch.bfloat16), torch.randn(1024, 512).to(torch.bfloat16)
with torch.no_grad():
    way = cpu_linear.fastest(rows, weight, None, list)
    torch.testing.assert_close(cpu_linear.gemm_backends(rows.dtype)[way](rows, weight, None), rows @ weight.t())
print(*cpu_linear.gemm_backends(rows.dtype), sep=", ")
"""


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the CPU has no AVX2")
def test_a_backend_that_has_no_product_in_bf16_is_left_out(tmp_path):
    """oneDNN on CPUs with AVX2: it raises."""
    avx2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "FASTGEN_CACHE": str(tmp_path)}
    assert run_code(MULTIPLIES_IN_BF16, **avx2).split("\n")[0] in ("BLAS", "BLAS, skinny GEMM")


def test_all_backends_are_measured_for_real(tmp_path):
    later_process()
    with configured(cache=str(tmp_path)):
        backend = fastest(weight=torch.ones(1024, 512))
        assert dict(cpu_linear.stored()) == {KIND: backend}
    later_process()
