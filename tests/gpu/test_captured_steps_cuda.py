"""Decode steps as CUDA graphs: the tokens of the unpatched library, in fp32 without TF32."""

from __future__ import annotations

import threading

import pytest
import torch
from capturing import capturing
from parity import padded, run_both, tiny, whisper
from sharing import sharing

from fastgen.optimizer.decoding import graphs
from fastgen.optimizer.transformers.decode_step import LateStopCheck

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was captured on a GPU"),
]

GRAPH = "decode step, CUDA graph"
BEAMS = {"num_beams": 4, "max_new_tokens": 40}
GREEDY = {"max_new_tokens": 40, "do_sample": False}
SAMPLES = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 40}
WAYS = pytest.mark.parametrize("arguments", [BEAMS, GREEDY, SAMPLES], ids=("beams", "greedy", "samples"))
ENDS = {"eos_token_id": list(range(3, 90, 6))}


@pytest.fixture(autouse=True)
def _exact_and_captured(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with capturing():
        yield


def model_of(name: str) -> torch.nn.Module:
    if name == "whisper":
        return whisper().cuda()
    return tiny(name, "seq2seq" if name in ("t5", "bart") else "causal").cuda()


def inputs_of(name: str, seed: int = 1) -> dict[str, torch.Tensor]:
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(seed)).cuda()}
    inputs = padded(3, 7, 5, side="right" if name in ("t5", "bart") else "left", seed=seed)
    return {key: value.cuda() for key, value in inputs.items()}


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
    with sharing(share):
        for seed in range(3):
            assert replays(model, inputs_of(name, seed), **arguments)
            assert replays(model, inputs_of(name, seed), **arguments, **ENDS)


@WAYS
def test_cuda_graphs_see_weights_that_change_between_calls(arguments):
    model = model_of("llama")
    for _ in range(3):
        assert replays(model, inputs_of("llama"), **arguments)
        model.lm_head.weight.data.mul_(1.5)
        model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[1].mlp.up_proj.weight * 1.5)


@WAYS
def test_the_host_waits_for_no_step(monkeypatch, arguments):
    """Between the tenth and the thirtieth step, in which no buffers are outgrown, every synchronisation is an error."""
    exchange, steps = LateStopCheck.exchange, []

    def watched(self, flag):
        steps.append(1)
        if len(steps) in (10, 30):
            torch.cuda.set_sync_debug_mode("error" if len(steps) == 10 else "default")
        return exchange(self, flag)

    model = model_of("llama")
    inputs = inputs_of("llama")
    with capturing(smallest_capacity=64):
        model.generate(**inputs, **{**arguments, "eos_token_id": None})
        monkeypatch.setattr(LateStopCheck, "exchange", watched)
        try:
            model.generate(**inputs, **{**arguments, "eos_token_id": None})
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == 40


class Reading(graphs.CudaCapture):
    """As if the forward read the device."""

    def record(self, run, expect_again):
        return super().record(lambda: (run(), torch.ones(1, device="cuda").item())[0], expect_again)


def test_a_cuda_capture_that_fails_is_said_once_and_the_tokens_are_right(monkeypatch):
    monkeypatch.setattr(graphs, "CudaCapture", Reading)
    model = model_of("gpt2")
    with pytest.warns(RuntimeWarning, match="fastgen does not capture the decode steps of a model"):
        assert not replays(model, inputs_of("gpt2"), **BEAMS)
    assert not replays(model, inputs_of("gpt2"), **BEAMS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
def test_half_precision_is_captured(name, dtype):
    model = model_of(name).to(dtype)
    for _ in range(2):
        _, _, report = run_both(lambda: model.generate(**inputs_of(name), **BEAMS))
        assert report.kernels[GRAPH]


def test_threads_on_one_model_and_on_two():
    models = [model_of("gpt2"), model_of("llama")]
    expected = [model.generate(**inputs_of("gpt2"), **BEAMS) for model in models]
    results = {}

    def work(index: int) -> None:
        results[index] = [models[index % 2].generate(**inputs_of("gpt2"), **BEAMS) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(tokens, expected[index % 2]) for index, found in results.items() for tokens in found)


def test_between_calls_no_more_is_kept_than_the_bounds_allow(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    model = model_of("gpt2")
    for max_new_tokens in range(10, 100, 10):
        model.generate(**inputs_of("gpt2"), **{**BEAMS, "max_new_tokens": max_new_tokens})
        assert len(graphs._known[model].entries) <= 2
