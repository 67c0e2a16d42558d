"""Captured graphs, those of one model, and the static caches that they replay into."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hooks import captured_graphs, captures_of, holds_graphs, limits
from parity import same_tokens
from reports import capturing, replays
from tiny_models import padded, tiny
from torch import nn

from fastgen.optimizer.decoding import captures, graphs
from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.decoding.decode_step import StaticSteps
from fastgen.optimizer.decoding.graph_cache import MOST_BYTES, GraphCache
from fastgen.optimizer.decoding.graphs import CapturedGraph, CpuCapture, CudaCapture, StepState
from fastgen.optimizer.decoding.kv_cache import KVCache
from fastgen.optimizer.decoding.static_kv_cache import StaticKVCache, capacity_for
from fastgen.optimizer.transformers.checks import KNOWN
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN


def cache_of_one_layer(rows: int = 2) -> StaticKVCache:
    cache = KVCache(rows, 1)
    cache.add_layers([()], 8)
    cache.append(0, *torch.zeros(2, rows, 1, 3, 4))
    content = cache.content()
    static = StaticKVCache(content.spec(8))
    static.load(content)
    return static


def graph_of(rows: int = 2, key: int = 0) -> CapturedGraph:
    graph = CapturedGraph(lambda inputs: inputs["number"] + 1, cache_of_one_layer(rows), key=key)
    graph.step(1).capture({"number": torch.zeros(3)}, CpuCapture())
    return graph


def replayed(graph: CapturedGraph, inputs: Any) -> Any:
    (replay,) = graph.replays
    leaves = replay.fitting_leaves(inputs)
    return None if leaves is None else replay.run(leaves)


def test_inputs_that_no_replay_reads_are_not_copied():
    """Such inputs are the states of the encoder, which may still be an output."""
    graph = CapturedGraph(lambda inputs: (inputs["number"] + 1, inputs["states"]), cache_of_one_layer())
    states = torch.randn(1000)
    _, returned = graph.step(1).capture({"number": torch.zeros(3), "states": states}, CpuCapture())
    assert returned.data_ptr() == states.data_ptr()
    assert graph.nbytes < graph.cache.nbytes + states.nbytes
    others = torch.randn(1000)
    number, returned = replayed(graph, {"number": torch.ones(3), "states": others})
    assert torch.equal(number, torch.full((3,), 2.0)) and torch.equal(returned, others)
    alive = weakref.ref(others.untyped_storage())
    graph.end_call()
    assert replayed(graph, {"number": torch.ones(3), "states": torch.randn(999)}) is None
    del returned, others
    gc.collect()
    assert alive() is None


def test_graphs_used_least_recently_are_dropped(monkeypatch):
    graph_cache = GraphCache(torch.device("cpu"), torch.float32)
    with limits(most_graphs=3):
        for key in range(3):
            graph_cache.put(graph_of(key=key))
        graph_cache.put(graph_cache.entries.pop(0))
        graph_cache.put(graph_of(key=3))
    assert list(graph_cache.entries) == [2, 0, 3]
    monkeypatch.setitem(MOST_BYTES, "cpu", 2 * graph_of().nbytes)
    graph_cache.put(graph_of(key=4))
    assert list(graph_cache.entries) == [3, 4]
    graph_cache.put(graph_of(rows=20, key=5))  # larger than the bound: not kept
    assert list(graph_cache.entries) == [3, 4]


def test_a_gpu_keeps_a_part_of_free_memory_but_not_in_training(monkeypatch):
    graph, device = graph_of(), torch.device("cuda", 0)
    monkeypatch.setattr("fastgen.optimizer.decoding.graph_cache.CudaCapture", lambda device: None)
    monkeypatch.setattr("fastgen.optimizer.decoding.graph_cache.free_memory", lambda device: 3.0 * graph.nbytes)
    monkeypatch.setitem(MOST_BYTES, "cuda", 0)
    cache = GraphCache(device, torch.float32)
    cache.put(graph)  # a quarter of four times its size, of which it takes one
    assert list(cache.entries) == [0]
    cache.put(graph_of(key=1))  # 2 of 5: one too many
    assert list(cache.entries) == [1]
    cache.in_training = True
    cache.put(graph_of(key=2))
    assert not cache.entries


def test_graphs_make_room_for_a_call_that_needs_their_memory(monkeypatch):
    cache = GraphCache(torch.device("cpu"), torch.float32)
    nbytes = graph_of().nbytes
    for key in range(3):
        cache.put(graph_of(key=key))
    cache.device = torch.device("cuda", 0)
    free = "fastgen.optimizer.decoding.graph_cache.free_memory"
    monkeypatch.setattr(free, lambda device: (5 - len(cache.entries)) * nbytes)
    cache.make_room(3 * nbytes)  # half of all memory is less
    assert list(cache.entries) == [0, 1, 2]
    cache.make_room(2 * nbytes)
    assert list(cache.entries) == [2]
    cache.device = torch.device("cpu")
    cache.make_room(1 << 40)
    assert list(cache.entries) == [2]


def test_a_replay_gets_the_inputs_of_its_call_in_captured_shapes():
    graph = graph_of()
    assert replayed(graph, {"number": torch.arange(3.0)}).tolist() == [1, 2, 3]
    number = torch.zeros(3)
    assert replayed(graph, {"number": number}).tolist() == [1, 1, 1]
    number += 5  # the same tensor with another content
    assert replayed(graph, {"number": number}).tolist() == [6, 6, 6]
    assert replayed(graph, {"number": torch.zeros(4)}) is None


def test_graphs_whose_step_of_one_token_was_dropped_are_not_kept():
    cache, graph = GraphCache(torch.device("cpu"), torch.float32), graph_of()
    graph.step(4).capture({"number": torch.zeros(3)}, CpuCapture())
    cache.put(graph)
    assert list(cache.entries) == [0]
    cache.entries.clear()
    graph.step(1).drop()
    cache.put(graph)
    assert not cache.entries


def test_all_steps_of_a_refused_model_are_dropped(monkeypatch):
    """Also those of other numbers of tokens, which have not failed."""
    model = tiny("gpt2")
    with generate_call(model) as call:
        loop = SimpleNamespace(call=call, model=model, checks=SimpleNamespace(decoder=model, known_code=KNOWN))
        held, graph = captures.Captures(loop), graph_of()
        loop.mode = StaticSteps(held, graph)
        graph.step(4).capture({"number": torch.zeros(3)}, CpuCapture())
        assert len(graph.replays) == 2
        held.refuse("logits differ", warns=False)
    assert not graph.replays and held.graphs.refused


def test_a_step_with_other_inputs_is_dropped_until_the_next_call():
    graph, captures_of_call = graph_of(), captures_of(refused := [])
    step = graph.step(1)
    step.is_used = True
    assert step.run({"number": torch.zeros(4)}, captures_of_call).tolist() == [1, 1, 1, 1]
    assert step.state is StepState.DROPPED and graph.step(1) is step and not refused
    graph.begin(graph.cache.content())
    assert graph.step(1).state is StepState.NEW


def test_an_earlier_capture_is_replaced_for_other_inputs():
    graph = graph_of()
    step = graph.step(1)
    assert step.run({"number": torch.zeros(4)}, captures_of([])).tolist() == [1, 1, 1, 1]
    assert step.state is StepState.CAPTURED


@pytest.mark.usefixtures("captures")  # whose buffers may be small
@pytest.mark.parametrize("prompt_length", [0, 5])
def test_a_static_cache_holds_a_concatenation_at_fixed_addresses(prompt_length):
    torch.manual_seed(0)
    rows_per_input, rows = (3, 6) if prompt_length else (1, 2)
    cache = KVCache(2, rows_per_input)
    prompts = [((torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 3)),) if prompt_length else () for _ in range(2)]
    cache.add_layers(prompts, 12)
    generated = [(torch.randn(rows, 2, 5, 3), torch.randn(rows, 2, 5, 3)) for _ in range(2)]
    for layer, pair in enumerate(generated):
        cache.append(layer, *pair)
    content = cache.content()
    cache = StaticKVCache(content.spec(12))
    cache.buffers[0].fill_(torch.nan)  # left by an earlier call
    cache.load(content)
    assert cache.capacity == 12 and cache.padding == (3 if prompt_length else 0)
    addresses = [states.data_ptr() for layer in range(2) for pair in cache.segments(layer) for states in pair]
    for step in range(7):
        added = [(torch.randn(rows, 2, 1, 3), torch.randn(rows, 2, 1, 3)) for _ in range(2)]
        for layer, pair in enumerate(added):
            assert int(cache.seq_lengths[layer]) == prompt_length + cache.generated_length
            assert cache.mask().sum() == prompt_length + 5 + step + 1
            cache.append(layer, *pair)
        cache.advance()
        order = torch.randint(rows_per_input, (rows,)) + torch.arange(rows) // rows_per_input * rows_per_input
        cache.reorder(order)
        pairs = zip(generated, added)
        generated = [tuple(torch.cat(both, dim=2)[order] for both in zip(before, pair)) for before, pair in pairs]
        for layer, pair in enumerate(generated):
            whole = cache.copy(layer)
            assert all(torch.equal(held[:, :, prompt_length:], states) for held, states in zip(whole, pair))
            keys, _ = cache.read(layer)
            assert keys.shape[2] == (8 if prompt_length else 0) + 12 and not keys.isnan().any()
    after = [states.data_ptr() for layer in range(2) for pair in cache.segments(layer) for states in pair]
    assert after == addresses


def test_capacities_are_few_and_never_too_small():
    assert len({capacity_for(needed, 4096) for needed in range(1, 4097)}) < 40
    assert capacity_for(2, 500) == capacity_for(8, 500)  # a short call never grows
    for most in (20, 100, 5000):
        for needed in range(1, most + 1):
            assert needed <= capacity_for(needed, most) <= max(2 * needed, most) * 1.25 + 32


def test_logits_that_a_model_rules_out_hide_no_differences():
    expected = torch.tensor([[1.0, 2.0, torch.finfo(torch.float32).min, -torch.inf]])
    assert not graphs.differs_sync(expected + torch.tensor([1e-4, 0, 0, 0]), expected)
    assert graphs.differs_sync(expected + torch.tensor([0.1, 0, 0, 0]), expected)
    assert graphs.differs_sync(torch.tensor([[1.0, 2.0, 3.0, -torch.inf]]), expected)


def test_steps_are_captured_on_the_default_stream_of_a_gpu(monkeypatch):
    monkeypatch.setattr(captures, "graphs_of", lambda *models: SimpleNamespace(refused=[]))
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, is_cpu=False, is_cuda=False)
    monkeypatch.setattr(captures, "first_weight", lambda decoder: weight)
    streams = {"off": 0, "auto": 0, "on": 0, "another": 7}
    expected = {"off": {"CAPTURE_OFF"}, "auto": set(), "on": set(), "another": {"CUDA_STREAM"}}
    for case, codes in expected.items():
        stream = SimpleNamespace(cuda_stream=streams[case])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        with capturing("on" if case == "another" else case), generate_call("test") as call:
            model = nn.Module()
            checks = SimpleNamespace(call=call, model=model, decoder=model, known_code=KNOWN, capture=[], rows=[])
            assert captures.can_capture(checks, 1, 40) is (not codes)
        assert call.report.codes() == codes


def test_no_two_live_captures_share_a_stream(monkeypatch):
    """torch hands out streams in turn, and so the same one again."""
    numbers = iter([1, 1, 2, 1, 2, 3, 1, 2])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: SimpleNamespace(cuda_stream=next(numbers)))
    monkeypatch.setattr(graphs, "_captures", weakref.WeakSet())
    alive = [CudaCapture(torch.device("cuda")) for _ in range(3)]
    assert [capture.stream.cuda_stream for capture in alive] == [1, 2, 3]
    del alive[1]
    assert CudaCapture(torch.device("cuda")).stream.cuda_stream == 2


# The graphs of a model.

PROMPTS = padded(3, 7, 5)
BEAMS = {"num_beams": 4, "max_new_tokens": 14}
GREEDY = {"max_new_tokens": 14, "do_sample": False}


@pytest.fixture(name="captures")
def captures_small_steps():
    if not LAYERS_ARE_KNOWN:
        pytest.skip("nothing is captured with the static caches of this transformers")
    with capturing():
        yield


@pytest.mark.usefixtures("captures")
@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9 has one switch")
@pytest.mark.parametrize("switch", ("", "cuda.matmul", "mkldnn", "mkldnn.matmul"))
def test_each_precision_of_products_has_its_own_captures(monkeypatch, switch):
    model, before = tiny("gpt2"), graphs.torch_settings()
    owner = attrgetter(f"backends.{switch}" if switch else "backends")(torch)
    monkeypatch.setattr(owner, "fp32_precision", "tf32")
    assert replays(same_tokens(model, PROMPTS, **GREEDY))
    monkeypatch.undo()
    assert graphs.torch_settings() == before and replays(same_tokens(model, PROMPTS, **GREEDY))
    assert len({key[1] for key in captured_graphs(model)}) == 2


@pytest.mark.usefixtures("captures")
def test_a_second_thread_on_the_model_uses_no_graphs():
    model = tiny("gpt2")
    expected = model.generate(**PROMPTS, **BEAMS)
    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(model.generate, **PROMPTS, **BEAMS) for _ in range(4)]
    assert all(torch.equal(result.result(), expected) for result in results)
    assert not holds_graphs(model)


@pytest.mark.usefixtures("captures")
def test_graphs_are_freed_with_their_model():
    model = tiny("gpt2")
    same_tokens(model, PROMPTS, **BEAMS)
    buffers = weakref.ref(next(iter(captured_graphs(model).values())).cache)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and buffers() is None
