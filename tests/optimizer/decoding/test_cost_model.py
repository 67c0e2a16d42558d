"""Sharing starts if it pays, or as FASTGEN_SHARE says, and that is decided before anything that takes time."""

from dataclasses import replace
from math import ceil

import pytest
import torch
from hooks import costs, watched
from parity import assert_same
from reports import PREFILL, PROMPT, is_shared, left_alone_because
from tiny_models import BEAMS, SAMPLES, padded, tiny, token_ids
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

import fastgen
from fastgen.optimizer.decoding.captures import is_worth_capturing, is_worth_leaving
from fastgen.optimizer.decoding.cost_model import CPU, GPU, CostModel, ModelSize, Work, size_of
from fastgen.optimizer.decoding.faster_forwards import should_swap
from fastgen.optimizer.decoding.kv_cache import should_share
from fastgen.optimizer.transformers.adoption import Storage, plan_adoption
from fastgen.optimizer.transformers.checks import KNOWN, generate_call
from fastgen.optimizer.transformers.decode_step import is_worth_compacting
from fastgen.optimizer.transformers.token_loop import unwanted_drafts
from fastgen.testing import configured

COSTS = CostModel()
CUDA = torch.device("cuda")
GPT2_SMALL = ModelSize(modules=150, weights=85_000_000, step_weights=123_000_000, large=0, itemsize=4)
# As measured on an H200: 7.8 ms a step, a new graph worthwhile from 24 steps on.
LLAMA_8B_8_LAYERS = ModelSize(111, weights=1_745_000_000, step_weights=2_270_000_000, large=0, itemsize=2)
REPEATED = {"input_ids": token_ids(1, 9).expand(6, 9).contiguous()}


def should_prefill_once(size: ModelSize, tokens: int) -> bool:
    return COSTS.pays(size.tokens(tokens), COSTS.overhead_of_prefill_once(size))


def test_a_gpu_computes_beside_the_host():
    work = Work(modules=10, bytes=1e9)
    host, computed = COSTS.seconds(Work(modules=10)), COSTS.seconds(work.without_modules)
    assert COSTS.seconds(work) == pytest.approx(host + computed)
    assert COSTS.seconds(work, CUDA) == pytest.approx(max(10 * GPU.module, 1e9 / GPU.bytes))


def test_tiny_models_and_short_calls_look_for_no_drafts():
    demo = ModelSize(modules=98, weights=786_432, step_weights=914_432, large=0, itemsize=4)
    cases = ((GPT2_SMALL, 1, 8, []), (GPT2_SMALL, 8, 256, []), (GPT2_SMALL, 1, 7, ["FEW_STEPS"]))
    for size, rows, steps, codes in (*cases, (GPT2_SMALL, 9, 256, ["MANY_ROWS"]), (demo, 1, 256, ["TOO_SMALL"])):
        assert [reason.code for reason in unwanted_drafts(COSTS, size, rows, steps)] == codes
    with configured(repeatable=True):
        assert not unwanted_drafts(COSTS, GPT2_SMALL, 1, 8)
        assert [reason.code for reason in unwanted_drafts(COSTS, GPT2_SMALL, 2, 256)] == ["MANY_ROWS"]


def test_rows_leave_captured_steps_if_their_keys_take_long():
    """Half of the rows: of BART-large, 128 inputs with 4 beams and 1,024 tokens; of Llama-8B, 4 inputs, 16 samples."""
    bart = ModelSize(340, weights=200_000_000, step_weights=255_000_000, large=0, itemsize=2)
    llama = ModelSize(450, weights=7_000_000_000, step_weights=7_500_000_000, large=0, itemsize=2)
    cases = (bart, 512, 7.3e9, 60, True), (bart, 512, 7.3e9, 60, False), (bart, 512, 7.3e9, 400, False)
    cases += (llama, 64, 1.6e9, 100, True), (llama, 64, 1.6e9, 300, True), (llama, 64, 1.6e9, 300, False)
    worth = [
        is_worth_leaving(COSTS, size, rows, rows // 2, nbytes, steps, is_captured, CUDA)
        for size, rows, nbytes, steps, is_captured in cases
    ]
    assert worth == [True, False, True, False, True, False]


@pytest.fixture
def nothing_is_compared():
    with watched("compare a model") as models, watched("compare rows") as rows:
        yield
    assert not models and not rows


@pytest.mark.parametrize("name", ("llama", "gpt2", "bart"))
def test_small_calls_are_left_alone_before_any_comparison(name, nothing_is_compared):
    model = tiny(name)
    for arguments in (BEAMS, SAMPLES):
        report = assert_same(model, padded(9, 5), **arguments)
        assert left_alone_because(report, "TOO_SMALL")
    assert left_alone_because(assert_same(model, REPEATED, max_new_tokens=3), "TOO_SMALL")


def test_the_reason_gives_the_numbers():
    size = ModelSize(modules=10, weights=2000, step_weights=0, large=0, itemsize=4)
    assert not should_prefill_once(size, 50) and should_prefill_once(size, 50_000)
    model = tiny("llama")
    model.generate(**padded(9, 5), **BEAMS)
    [reason] = [reason for _, reason in fastgen.explain().not_done if reason.code == "TOO_SMALL"]
    size = size_of(model, KNOWN)
    saved, overhead = (COSTS.seconds(work) * 1e3 for work in (size.tokens(36), COSTS.overhead_of_prefill_once(size)))
    assert reason.detail == f"computing 36 tokens fewer saves about {saved:.2f} ms, but costs {overhead:.2f} ms"


@pytest.mark.parametrize(("rows", "arguments"), [(64, {"num_beams": 2}), (65, {})], ids=("beams", "equal rows"))
def test_few_steps_are_left_alone_if_the_prefill_saves_little(rows, arguments):
    """64 rows of a prompt can be saved: by the first of two beams, or by one of 65 equal rows."""
    model = tiny("gpt2")
    size = size_of(model, KNOWN)
    length = next(length for length in range(1, 200) if should_prefill_once(size, 64 * length))
    for added, is_left in ((-1, True), (0, False)):
        prompt = {"input_ids": token_ids(1, length + added).expand(rows, -1).contiguous()}
        report = assert_same(model, prompt, max_new_tokens=1, **arguments)
        assert is_left == left_alone_because(report, "TOO_SMALL", "the call") and is_left != (PREFILL in report.shared)


def test_a_single_row_of_few_steps_may_gain_otherwise():
    """Nothing of its prefill is shared, but its forwards may be faster."""
    with costs(prefill_overhead=1e-9):
        report = assert_same(tiny("gpt2"), {"input_ids": token_ids(1, 9)}, max_new_tokens=1)
    assert not left_alone_because(report, "TOO_SMALL", "the call")


def test_the_same_model_shares_longer_prompts_of_more_rows():
    report = assert_same(tiny("gpt2"), {"input_ids": token_ids(16, 60)}, **SAMPLES)
    assert report.shared[0] == PREFILL


MORE_BEAMS = BEAMS | {"num_beams": 8}


def test_encoder_outputs_are_shared_if_they_are_long():
    model = tiny("bart", max_position_embeddings=4096)
    with torch.no_grad():
        assert assert_same(model, {"input_ids": token_ids(4, 40)}, **MORE_BEAMS).shared == []
        assert assert_same(model, {"input_ids": token_ids(4, 4000)}, **MORE_BEAMS | {"max_new_tokens": 2}).shared


def test_always_and_never_ignore_the_costs():
    model = tiny("llama")
    with configured(share="always"):
        assert is_shared(assert_same(model, padded(9, 5), **BEAMS), PROMPT)
    with configured(share="never"):
        assert left_alone_because(assert_same(model, {"input_ids": token_ids(8, 60)}, **SAMPLES), "SHARE_NEVER")


def test_rows_that_the_caller_repeated_are_compared_once(share_always):
    with watched("compare rows") as comparisons:
        tiny("llama").generate(**REPEATED, max_new_tokens=3)
    assert len(comparisons) == 1


def test_the_size_counts_the_weights_that_tokens_multiply():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 16), nn.Linear(8, 100, bias=False), nn.LayerNorm(8))
    assert size_of(model, KNOWN) == ModelSize(modules=5, weights=128, step_weights=928, large=0, itemsize=4)


def test_a_graph_pays_if_steps_are_many_and_short():
    size = GPT2_SMALL
    assert is_worth_capturing(COSTS, size, 1, 40, False, torch.device("cpu"))
    assert not is_worth_capturing(COSTS, size, 1, 16, False, torch.device("cpu"))
    assert is_worth_capturing(COSTS, size, 1, 16, True, torch.device("cpu"))
    assert not is_worth_capturing(COSTS, size, 256, 40, True, torch.device("cpu"))
    assert is_worth_capturing(COSTS, size, 256, 2000, False, torch.device("cpu"))


@pytest.mark.parametrize(("size", "new", "existing"), [(GPT2_SMALL, 21, 4), (LLAMA_8B_8_LAYERS, 24, 4)])
def test_a_graph_pays_on_a_gpu_if_the_host_is_slower(size, new, existing):
    for is_captured, least in ((False, new), (True, existing)):
        pays = {steps: is_worth_capturing(COSTS, size, 1, steps, is_captured, CUDA) for steps in range(1, 50)}
        assert [steps for steps, gains in pays.items() if gains] == list(range(least, 50))
    assert is_worth_capturing(COSTS, size, 256, 40, True, CUDA)
    assert not is_worth_capturing(COSTS, size, 100_000, 1000, True, CUDA)  # the device takes longer


def test_the_size_is_measured_once_per_dtype():
    model = nn.Linear(1024, 1024)
    with watched("measure a model") as measurements:
        for dtype, large in ((torch.float32, 1 << 20), (torch.float32, 1 << 20), (torch.float64, 0)):
            assert size_of(model.to(dtype), KNOWN).large == large
    assert len(measurements) == 2


def test_weights_of_an_encoder_do_not_count():
    few, many = (tiny("bart", encoder_layers=layers) for layers in (1, 4))
    assert size_of(few, KNOWN).weights == size_of(many, KNOWN).weights
    assert size_of(few, KNOWN).modules < size_of(many, KNOWN).modules


def fake_keys(*shape: int, **kind) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, **kind)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)])
@pytest.mark.parametrize(("is_cross", "part"), [(False, 1), (True, 4)])
@pytest.mark.parametrize(
    ("steps", "least"),
    [
        ({}, {4: 240_000_000, 2: 240_000_000}),
        ({"is_captured": True}, {4: 25_000_000, 2: 1_000_000}),
        ({"is_captured": True, "kernels": False}, {4: 25_000_000, 2: 25_000_000}),
    ],
    ids=("eager", "captured", "captured, without kernels"),
)
def test_bytes_saved_decide_about_sharing_on_a_gpu(dtype, size, is_cross, part, steps, least):
    length, gpu = least[size] / part / (2 * 3 * 2 * 5 * 10 * size), {"dtype": dtype, "device": "cuda"}
    call = {"rows_per_copy": 4, "is_cross": is_cross, "is_captured": steps.get("is_captured", False)}
    with configured(share="auto", cuda_kernels=steps.get("kernels", True)):
        assert should_share(COSTS, fake_keys(2, 5, int(1.01 * length), 10, **gpu), **call)
        assert not should_share(COSTS, fake_keys(2, 5, int(0.99 * length), 10, **gpu), **call)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("is_cross", "least"), [(False, 1 << 19), (True, 1 << 17)])
def test_elements_of_keys_decide_about_sharing_on_a_cpu(dtype, is_cross, least):
    length = least / (4 * 8 * 16)
    with configured(share="auto"):
        for is_captured in (False, True):
            call = {"rows_per_copy": 2, "is_cross": is_cross, "is_captured": is_captured}
            assert should_share(COSTS, fake_keys(4, 8, int(1.01 * length), 16, dtype=dtype), **call)
            assert not should_share(COSTS, fake_keys(4, 8, int(0.99 * length), 16, dtype=dtype), **call)


def test_rates_are_those_of_a_cpu_or_of_an_h200():
    read = {name: COSTS.seconds(Work(bytes=1e9), torch.device(name)) for name in ("cpu", "cuda", "mps")}
    assert read == {"cpu": 1e9 / CPU.bytes, "cuda": 1e9 / GPU.bytes, "mps": 1e9 / GPU.bytes}
    assert str(CPU) == "16.8 µs a launch, 52 µs a module, 20 GB/s, 40 G multiply-adds/s"


@pytest.mark.parametrize(("rate", "part"), [({"bytes": GPU.bytes / 10}, 0.1), ({"launch": GPU.launch / 2}, 0.5)])
def test_rates_move_the_break_even(rate, part):
    slower, length = CostModel(rates=replace(GPU, **rate)), 240_000_000 * part / (2 * 3 * 2 * 5 * 10 * 4)
    with configured(share="auto"):
        assert should_share(slower, fake_keys(2, 5, int(1.01 * length), 10, device="cuda"), rows_per_copy=4)
        assert not should_share(slower, fake_keys(2, 5, int(0.99 * length), 10, device="cuda"), rows_per_copy=4)


@pytest.mark.parametrize(("modules", "weights"), [(10, 700), (33, 40_000), (150, 85_000_000), (400, 7_000_000_000)])
def test_the_break_even_of_a_prefill_is_that_of_small_calls(modules, weights):
    """In multiply-adds, 4 million and 1 million for each module (benchmarks/small.py)."""
    size, least = ModelSize(modules, weights, weights, 0, 4), (4 + modules) * (1 << 20) / weights
    with configured(share="auto"):
        assert should_prefill_once(size, ceil(1.01 * least))
        assert not should_prefill_once(size, int(0.99 * least))


def test_large_weights_are_65_536_a_module():
    for steps, least in ((20, 1 << 16), (None, 1 << 16), (1, 1 << 18)):
        large, small = (ModelSize(50, 0, 0, int(part * 50 * least), 4) for part in (1.01, 0.99))
        assert should_swap(COSTS, large, steps) and not should_swap(COSTS, small, steps)
    assert not should_swap(COSTS, ModelSize(1, 0, 0, 0, 4), 20)


def test_batches_are_compacted_if_many_rows_and_steps_are_saved():
    size = ModelSize(
        modules=10, weights=1_000_000, step_weights=0, large=0, itemsize=4
    )  # the overhead is that of 15 tokens
    assert is_worth_compacting(COSTS, size, leaving=4, rows=32, steps_done=20, steps_left=20)
    assert not is_worth_compacting(COSTS, size, leaving=3, rows=32, steps_done=20, steps_left=20)
    assert not is_worth_compacting(COSTS, size, leaving=4, rows=32, steps_done=20, steps_left=3)
    assert is_worth_compacting(COSTS, size, leaving=4, rows=32, steps_done=1, steps_left=20)  # eight steps are expected


def test_keys_are_written_in_place_if_they_are_many():
    keys = torch.empty(2, 8, 32, 16)  # with 4 rows of an input, 4 * 2 * 8 * 16 elements a position
    cache = DynamicCache()
    cache.update(keys, keys, 0)
    with generate_call(tiny("llama")) as call, configured(share="never"):
        plans = [plan_adoption(cache, 4, limit, call) for limit in (190, 192)]
    assert [plan.storage for [plan] in plans] == [Storage.LIBRARYS, Storage.REPEATED]
