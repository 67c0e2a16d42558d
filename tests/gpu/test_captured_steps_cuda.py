"""Decode steps as CUDA graphs have the tokens of the unpatched library, in fp32 without TF32."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from auto_models import auto_model
from hooks import broken, watched
from parity import run_both
from reports import capturing
from tiny_models import inputs_of, tiny
from versions import needs_gpu

import fastgen
from fastgen.optimizer.decoding import graph_cache, graphs
from fastgen.optimizer.decoding.decode_step import LateFlags
from fastgen.optimizer.decoding.kv_cache import KVCache
from fastgen.optimizer.decoding.static_kv_cache import StaticKVCache
from fastgen.testing import configured

pytestmark = needs_gpu

GRAPH = graphs.CudaCapture.name
LONG = {"min_new_tokens": 12, "max_new_tokens": 40}  # otherwise some tiny models end immediately
BEAMS = {"num_beams": 4, **LONG}
GREEDY = {"do_sample": False, **LONG}
SAMPLES = {"do_sample": True, "num_return_sequences": 3, **LONG}
WAYS = pytest.mark.parametrize("arguments", [BEAMS, GREEDY, SAMPLES], ids=("beams", "greedy", "samples"))
NEVER = 9999  # an end that no row reaches, for which steps look
ENDS = {"eos_token_id": list(range(3, 90, 6))}


@pytest.fixture(autouse=True)
def _captured():
    with capturing():
        yield


def model_of(name: str) -> torch.nn.Module:
    return tiny(name).cuda()


def inputs_on_gpu(name: str, seed: int = 1) -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in inputs_of(name, 3, 7, 5, seed=seed).items()}


def replays(model: torch.nn.Module, inputs: dict[str, torch.Tensor], **arguments) -> int:
    state = torch.cuda.get_rng_state()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        torch.cuda.set_rng_state(state)
        return model.generate(**inputs, **arguments), torch.cuda.get_rng_state()

    (stock, after_stock), (fast, after_fast), report = run_both(call)
    assert torch.equal(stock, fast) and torch.equal(after_stock, after_fast)
    return report.kernels[GRAPH]


@WAYS
@pytest.mark.parametrize("share", ["always", "never"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart", "whisper"])
def test_tokens_of_cuda_graphs_are_those_of_the_library(name, share, arguments):
    model = model_of(name)
    with configured(share=share):
        for seed in range(3):
            assert replays(model, inputs_on_gpu(name, seed), **arguments)
            assert replays(model, inputs_on_gpu(name, seed), **arguments, **ENDS)


@WAYS
def test_cuda_graphs_see_weights_that_change_between_calls(arguments):
    model = model_of("llama")
    for _ in range(3):
        assert replays(model, inputs_on_gpu("llama"), **arguments)
        model.lm_head.weight.data.mul_(1.5)
        model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[1].mlp.up_proj.weight * 1.5)


@WAYS
def test_the_host_waits_for_no_step(monkeypatch, arguments):
    """Between the tenth and the thirtieth step, in which no buffers are outgrown, every synchronisation is an error."""
    exchange, steps = LateFlags.exchange, []

    def watched(self, flag):
        steps.append(1)
        if len(steps) in (10, 30):
            torch.cuda.set_sync_debug_mode("error" if len(steps) == 10 else "default")
        return exchange(self, flag)

    model = model_of("llama")
    inputs = inputs_on_gpu("llama")
    with capturing(smallest_capacity=64):
        model.generate(**inputs, **arguments, eos_token_id=NEVER)
        monkeypatch.setattr(LateFlags, "exchange", watched)
        try:
            model.generate(**inputs, **arguments, eos_token_id=NEVER)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == 40


@pytest.mark.parametrize("arguments", [BEAMS, GREEDY, SAMPLES], ids=("beams", "greedy", "samples"))
def test_finished_rows_leave_captured_steps_in_halves(arguments):
    """Later calls have the graphs of fewer rows."""
    model, left, captured = model_of("llama"), [], []
    inputs = {key: value.cuda() for key, value in inputs_of("llama", 3, 7, 5, 4, 6, 8, 3, 5).items()}
    more = {**arguments, "min_new_tokens": 3, "max_new_tokens": 60, "eos_token_id": list(range(3, 90, 15))}
    state = torch.cuda.get_rng_state()
    for _ in range(2):
        with watched("compact a step") as compactions, watched("capture a step") as captures:
            torch.cuda.set_rng_state(state)
            assert replays(model, inputs, **more) > 20
        left.append([len(call.args[2]) for call in compactions])
        captured.append(len(captures))
    rows = 8 * arguments.get("num_beams", arguments.get("num_return_sequences", 1))
    assert left[0] == left[1] and len(left[0]) > 1
    assert [rows, *left[0]] == sorted({rows, *left[0]}, reverse=True) and len(left[0]) <= 5
    assert captured[0] > len(left[0]) and not captured[1]


def test_a_long_call_with_ancestors_captures_once():
    """If the kernel of steps reads no spare capacity, the first cache has room for all tokens, and is kept."""
    model = model_of("llama")
    inputs = inputs_on_gpu("llama")
    more = {"do_sample": True, "num_return_sequences": 3, "min_new_tokens": 300, "max_new_tokens": 300}
    for captured in (1, 0):
        with watched("capture a step") as captures, configured(share="always"):
            assert replays(model, inputs, **more) > 250
        assert len(captures) == captured


def test_bounds_of_several_tokens_end_with_the_last():
    cache = KVCache(2, 1)
    cache.add_layers([(torch.randn(2, 2, 2, 5, 16).cuda().unbind(),)] * 2, 20)
    for layer in range(2):
        cache.append(layer, *torch.randn(2, 2, 2, 1, 16).cuda().unbind())
    static = StaticKVCache(cache.content().spec(20))
    static.load(cache.content())
    static.advance(3)
    assert [static.read(0, tokens)[0].bounds.last.item() for tokens in (1, 4)] == [4, 7]


def test_a_table_of_ancestors_gives_the_rows_of_a_reorder():
    cache = KVCache(2, 2)
    cache.add_layers([(torch.randn(2, 2, 2, 5, 64).half().cuda().unbind(),)] * 3, 20)
    for layer in range(3):
        cache.append(layer, *torch.randn(2, 4, 2, 1, 64).half().cuda().unbind())
    content = cache.content()
    caches = [StaticKVCache(content.spec(20), by_table) for by_table in (True, False)]
    for static in caches:
        static.load(content)
    table = caches[0].bounds[0].ancestors
    assert table.shape == (4, caches[0].capacity) and caches[1].bounds[0].ancestors is None
    for step, moves in enumerate([[1, 0, 2, 2], [0, 0, 3, 2], [1, 1, 3, 3], [0, 1, 2, 3], [1, 0, 3, 2]]):
        added, beam_idx = torch.randn(3, 2, 4, 2, 1, 64).half().cuda(), torch.tensor(moves).cuda()
        before = caches[0].buffers[0].clone()
        for static in caches:
            for layer in range(3):
                static.append(layer, *added[layer])
            static.advance()
            static.reorder(beam_idx, *[1] * (step == 2))  # of one layer: rows must be in order
        if step == 0:  # no row was moved
            assert torch.equal(caches[0].buffers[0][..., 0, :], before[..., 0, :]) and table[0, :2].tolist() == [1, 1]
        if step in (1, 4):
            for layer in range(3):
                assert all(map(torch.equal, *(static.copy(layer) for static in caches)))
                read, expected = (static.read(layer)[0].materialize() for static in caches)
                assert torch.equal(read, expected)
    grown = StaticKVCache(content.spec(20), by_table=True)
    grown.load(caches[0].content())
    assert all(map(torch.equal, grown.copy(2), caches[1].copy(2)))


WAITING = {
    "makes the host wait for the device": lambda: torch.ones(1, device="cuda").item(),
    "torch.tensor copies between": lambda: torch.tensor(data=[1.0], device="cuda"),
    "torch.as_tensor copies between": lambda: torch.as_tensor([1.0], device="cuda"),
    "torch.new_tensor copies between": lambda: torch.ones(3, device="cuda").new_tensor(1.0),
    "torch.__getitem__ copies between": lambda: torch.ones(2, 3, device="cuda")[..., [-2]],
    "torch.__setitem__ copies between": lambda: torch.ones(3, device="cuda").__setitem__([-2], 0.0),
}


def test_beams_of_a_mixture_of_experts_are_not_captured_in_fp32():
    """The library's products of groups read the groups' sizes on the host; samples are computed by other ones."""
    model = auto_model("MixtralForCausalLM").cuda()
    assert replays(model, inputs_on_gpu("llama"), **SAMPLES)
    assert not replays(model, inputs_on_gpu("llama"), **BEAMS)
    assert "grouped_mm" in str(fastgen.explain())


class Failing(graphs.CudaCapture):
    """A capture that synchronizes, which no check foresees."""

    def capture(self, run, rewind):
        def failing():
            if torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
            return run()

        return super().capture(failing, rewind)


@pytest.mark.parametrize("why", WAITING)
def test_a_forward_that_waits_is_not_captured(monkeypatch, why):
    class Waiting(graphs.CudaCapture):
        def capture(self, run, rewind):
            return super().capture(lambda: (run(), WAITING[why]())[0], rewind)

    monkeypatch.setattr(graph_cache, "CudaCapture", Waiting)
    model = model_of("gpt2")
    for _ in range(2):
        assert not replays(model, inputs_on_gpu("gpt2"), **BEAMS)
    assert why in str(fastgen.explain())
    torch.cuda.empty_cache()


def test_a_failed_capture_warns_once_and_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(graph_cache, "CudaCapture", Failing)
    model = model_of("gpt2")
    with pytest.warns(RuntimeWarning, match="fastgen does not capture the decode steps of a model"):
        assert not replays(model, inputs_on_gpu("gpt2"), **BEAMS)
    draw()
    torch.cuda.empty_cache()
    assert not replays(model, inputs_on_gpu("gpt2"), **SAMPLES)
    monkeypatch.undo()
    assert replays(model_of("llama"), inputs_on_gpu("llama"), **BEAMS)


def draw() -> torch.Tensor:
    return torch.multinomial(torch.ones(1, 5, device="cuda"), 1)


def test_other_threads_draw_numbers_during_a_capture(monkeypatch):
    drawn = []

    class Threaded(graphs.CudaCapture):
        def capture(self, run, rewind):
            def with_a_thread():
                if torch.cuda.is_current_stream_capturing():
                    with ThreadPoolExecutor(1) as threads:
                        drawn.append(threads.submit(draw).result())
                return run()

            return super().capture(with_a_thread, rewind)

    monkeypatch.setattr(graph_cache, "CudaCapture", Threaded)
    with capturing():
        model_of("llama").generate(**inputs_on_gpu("llama"), **BEAMS)
    assert drawn and fastgen.explain().replays


@WAYS
def test_calls_under_a_default_device_are_captured_steps(arguments):
    """Some models' pages say `torch.set_default_device("cuda")`: what belongs to the host must name it."""
    model = model_of("llama")
    with torch.device("cuda"):
        assert replays(model, inputs_on_gpu("llama"), **arguments, no_repeat_ngram_size=3)


class Exhausting(graphs.CudaCapture):
    """A capture in which the allocator has no memory left."""

    def capture(self, run, rewind):
        def exhausting():
            if torch.cuda.is_current_stream_capturing():
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            return run()

        return super().capture(exhausting, rewind)


def test_a_capture_that_exhausts_the_allocator_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(graph_cache, "CudaCapture", Exhausting)
    model = model_of("gpt2")
    assert not replays(model, inputs_on_gpu("gpt2"), **BEAMS)
    assert "OUT_OF_MEMORY" in fastgen.explain().codes()
    monkeypatch.undo()
    torch.cuda.empty_cache()
    assert replays(model_of("gpt2"), inputs_on_gpu("gpt2"), **BEAMS)


@WAYS
@pytest.mark.parametrize("part", ["grow a static cache", "fill a static cache"])
def test_captured_steps_without_memory_become_eager(part, arguments):
    model = model_of("llama")
    with broken(part, torch.cuda.OutOfMemoryError) as attempts:
        replayed = replays(model, inputs_on_gpu("llama"), **arguments)
    assert attempts and bool(replayed) == part.startswith("grow") and replayed < 39
    assert "OUT_OF_MEMORY" in fastgen.explain().codes()
    torch.cuda.empty_cache()
    assert replays(model_of("llama"), inputs_on_gpu("llama"), **arguments) > replayed


def test_steps_with_more_keys_than_are_kept_are_captured_steps(monkeypatch):
    monkeypatch.setitem(graph_cache.MOST_BYTES, "cuda", 1 << 10)
    model = model_of("llama").train()  # otherwise more is kept if it is free
    for _ in range(2):
        assert replays(model, inputs_on_gpu("llama"), **BEAMS)
        assert not graph_cache._graph_caches[model].entries


@pytest.mark.parametrize("missing, unused", [(0, 0), (1, 0), (1, 1)])
def test_captures_need_free_memory_for_twice_the_keys(monkeypatch, missing, unused):
    """Filling a static cache copies them. unused: bytes that torch's allocator holds and has not handed out."""
    model = model_of("llama")
    config, rows, positions = model.config, 3 * BEAMS["num_beams"], 7 + 1
    width = config.num_key_value_heads * config.head_dim
    free = 2 * (2 * config.num_hidden_layers * rows * positions * width * model.dtype.itemsize) - missing
    memory = {"mem_get_info": (free, 1 << 36), "memory_reserved": 4096 + unused, "memory_allocated": 4096}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    is_captured = bool(replays(model, inputs_on_gpu("llama"), **BEAMS))
    assert is_captured is (missing <= unused)
    assert ("KV_CACHE_TOO_LARGE" in fastgen.explain().codes()) is not is_captured


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9 has one switch")
def test_captured_steps_accept_the_newer_switch_for_tf32(monkeypatch):
    """Rounding decides between close tokens then, so they are not compared."""
    model = model_of("llama")
    assert replays(model, inputs_on_gpu("llama"), **BEAMS)
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    model.generate(**inputs_on_gpu("llama"), **BEAMS)
    assert fastgen.explain().replays and len(graph_cache._graph_caches[model].entries) > 1
    monkeypatch.undo()
    assert replays(model, inputs_on_gpu("llama"), **BEAMS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs: nothing was captured on a second one")
@WAYS
def test_captured_steps_of_a_model_on_the_second_gpu(arguments):
    model = tiny("llama").to("cuda:1")
    inputs = {key: value.to("cuda:1") for key, value in inputs_of("llama", 3, 7, 5).items()}
    for _ in range(2):
        both = run_both(lambda: seeded(model, inputs, **arguments))
        assert torch.equal(both.stock, both.fast) and both.report.kernels[GRAPH]
    assert torch.cuda.current_device() == 0


def seeded(model: torch.nn.Module, inputs: dict[str, torch.Tensor], **arguments) -> torch.Tensor:
    torch.cuda.manual_seed_all(0)
    return model.generate(**inputs, **arguments)


def test_a_graph_outlives_another_of_its_stream():
    """cuBLAS has one workspace for a stream."""
    model = model_of("llama").to(torch.bfloat16)
    short, long = (
        inputs_on_gpu("llama", 1),
        {key: value.repeat(3, 1) for key, value in inputs_on_gpu("llama", 2).items()},
    )
    assert replays(model, short, **BEAMS) and replays(model, long, **BEAMS)
    graph_cache._graph_caches[model].entries.popitem(last=False)
    gc.collect()
    torch.cuda.empty_cache()
    blocks = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    assert replays(model, long, **BEAMS)
    assert all(block.isnan().all() for block in blocks)


def test_the_graphs_of_a_model_share_one_pool(monkeypatch):
    handle, handles = torch.cuda.graph_pool_handle, []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: handles.append(handle()) or handles[-1])
    model = model_of("llama")
    for arguments in (BEAMS, GREEDY):
        assert replays(model, inputs_on_gpu("llama"), **arguments)
    assert len(graph_cache._graph_caches[model].entries) > 1 and len(handles) == 1


def test_a_pool_without_graphs_is_created_anew():
    model = model_of("llama")
    assert replays(model, inputs_on_gpu("llama"), **BEAMS)
    graph_cache._graph_caches[model].entries.clear()
    gc.collect()
    torch.cuda.empty_cache()
    assert replays(model, inputs_on_gpu("llama"), **BEAMS)


def test_four_models_capture_in_four_threads():
    models = [model_of("llama") for _ in range(4)]
    expected = models[0].generate(**inputs_on_gpu("llama"), **BEAMS)
    for model in models:
        graph_cache._graph_caches.pop(model, None)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda model: model.generate(**inputs_on_gpu("llama"), **BEAMS), models))
    assert all(torch.equal(tokens, expected) for tokens in results)
    assert not any(graph_cache._graph_caches[model].refused for model in models)


def test_a_replay_copies_no_states_of_the_encoder():
    """No step reads them, because their keys are in the cache."""
    model = model_of("bart")
    with torch.inference_mode():
        for seed in range(3):
            assert replays(model, inputs_on_gpu("bart", seed), **BEAMS)
    for graph in graph_cache._graph_caches[model].entries.values():
        assert any(buffer.shape[-1] == model.config.d_model for buffer in graph.step(1).replay._unread.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
def test_steps_in_half_precision_are_cuda_graphs(name, dtype):
    model = model_of(name).to(dtype)
    for _ in range(2):
        _, _, report = run_both(lambda: model.generate(**inputs_on_gpu(name), **BEAMS))
        assert report.kernels[GRAPH]


def test_cuda_graphs_serve_threads_on_one_model_and_on_two():
    models = [model_of("gpt2"), model_of("llama")]
    expected = [model.generate(**inputs_on_gpu("gpt2"), **BEAMS) for model in models]

    def work(index: int) -> bool:
        outputs = [models[index % 2].generate(**inputs_on_gpu("gpt2"), **BEAMS) for _ in range(5)]
        return all(torch.equal(tokens, expected[index % 2]) for tokens in outputs)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_no_more_cuda_graphs_are_kept_than_allowed(monkeypatch):
    monkeypatch.setattr(graph_cache, "MOST_GRAPHS", 2)
    model = model_of("gpt2")
    for max_new_tokens in range(10, 100, 10):
        model.generate(**inputs_on_gpu("gpt2"), **{**BEAMS, "max_new_tokens": max_new_tokens})
        assert len(graph_cache._graph_caches[model].entries) <= 2
