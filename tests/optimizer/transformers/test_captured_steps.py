"""Decode steps that are captured give the library's tokens; what was captured is used again, and never when stale."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from capturing import capturing, not_captured_because, replays
from parity import padded, run_both, tiny, token_ids, whisper
from sharing import sharing
from torch import nn
from transformers import LogitsProcessor
from versions import needs_peft

from fastgen.ops.tracing import Diverged
from fastgen.optimizer.decoding import graphs
from fastgen.optimizer.decoding.call import GenerateCall, generate_call
from fastgen.optimizer.decoding.cost_model import CostModel
from fastgen.optimizer.decoding.graphs import CapturedGraph, CpuCapture, GraphCache, GraphState
from fastgen.optimizer.decoding.kv_cache import KVCache
from fastgen.optimizer.decoding.report import Report
from fastgen.optimizer.decoding.static_kv_cache import StaticKVCache, capacity_for
from fastgen.optimizer.transformers import decode_step
from fastgen.optimizer.transformers.checks import KNOWN, CallChecks, LoopArguments
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN
from fastgen.optimizer.transformers.decode_step import LateStopCheck
from fastgen.testing import broken, captured_graphs, costs, errors_noted, holds_graphs, limits, replaced, watched

MODELS = ("gpt2", "llama", "llama-eager", "t5", "bart", "whisper")
BEAMS = {"num_beams": 4, "max_new_tokens": 14}
GREEDY = {"max_new_tokens": 14, "do_sample": False}
SAMPLES = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 14}
ENDS = {"eos_token_id": list(range(3, 90, 6))}

pytestmark = pytest.mark.skipif(
    not LAYERS_ARE_KNOWN, reason="nothing is captured with the static caches of this transformers"
)


@pytest.fixture(autouse=True)
def _recording():
    with capturing():
        yield


@pytest.fixture(params=("always", "never"))
def shared(request):
    """Prompts are kept once per input, or for each row."""
    with sharing(request.param):
        yield


def model_of(name: str) -> nn.Module:
    if name == "whisper":
        return whisper()
    if name == "llama-eager":
        return tiny("llama", attn_implementation="eager")
    return tiny(name, "seq2seq" if name in ("t5", "bart") else "causal")


def inputs_of(name: str, rows: int = 3, seed: int = 1) -> dict[str, torch.Tensor]:
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 40, generator=torch.Generator().manual_seed(seed))}
    lengths = (3, 7, 5, 6)[:rows]
    return padded(*lengths, side="right" if name in ("t5", "bart") else "left", seed=seed)


def captured(model: nn.Module, inputs: dict[str, torch.Tensor], **arguments) -> int:
    """How many steps of this generate were replays; its tokens and random numbers are those of the library."""
    stock, fast, report = run_both(lambda: model.generate(**inputs, **arguments))
    assert torch.equal(stock, fast)
    return replays(report)


@pytest.mark.parametrize("arguments", [BEAMS, GREEDY, SAMPLES], ids=("beams", "greedy", "samples"))
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_library(name, arguments, shared):
    model = model_of(name)
    for rows in (1, 3):
        assert captured(model, inputs_of(name, rows), **arguments, min_new_tokens=6)


@pytest.mark.parametrize("arguments", [BEAMS, GREEDY, SAMPLES], ids=("beams", "greedy", "samples"))
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_every_step_after_the_first_is_a_replay_and_buffers_are_outgrown(name, arguments):
    model = model_of(name)
    arguments = {**arguments, "max_new_tokens": 40, "eos_token_id": None}
    replayed = captured(model, inputs_of(name), **arguments)
    assert len(captured_graphs(model)) > 1
    assert replayed == 39 - len(captured_graphs(model))  # the steps from which they were made


@pytest.mark.parametrize(
    "options",
    [
        {**BEAMS, "early_stopping": True},
        {**BEAMS, "early_stopping": "never", "length_penalty": 0.0},
        {**BEAMS, "num_return_sequences": 4, "length_penalty": -1.0},
        {**BEAMS, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
        {**BEAMS, "repetition_penalty": 1.4},
        {**GREEDY, "no_repeat_ngram_size": 1, "repetition_penalty": 1.3},
        {**GREEDY, "min_length": 10},
        {**SAMPLES, "temperature": 0.7, "top_k": 9},
        {**SAMPLES, "top_p": 0.8, "min_new_tokens": 5},
    ],
)
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_inputs_end_at_different_steps(name, options):
    model = model_of(name)
    assert sum(captured(model, inputs_of(name, seed=seed), **{**options, **ENDS}) for seed in range(4))


@pytest.mark.parametrize("arguments", [BEAMS, GREEDY, SAMPLES], ids=("beams", "greedy", "samples"))
def test_the_end_is_seen_one_step_late_and_that_step_undone(arguments):
    model = model_of("llama")
    as_on_a_gpu = replaced("wait for a flag", lambda original, device: True)
    with watched("check for the end, a step late") as checks, as_on_a_gpu:
        for seed in range(8):
            captured(model, inputs_of("llama", seed=seed), **{**arguments, **ENDS, "early_stopping": True})
    assert any(check.result for check in checks)


class Counting(LogitsProcessor):
    """Counts its calls, as a program might."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


@pytest.mark.parametrize("arguments", [BEAMS, GREEDY, SAMPLES], ids=("beams", "greedy", "samples"))
def test_a_processor_of_the_program_sees_no_step_too_many(arguments):
    model, calls = model_of("llama"), []
    for seed in range(6):
        inputs = inputs_of("llama", seed=seed)

        def call(inputs=inputs):
            counting = Counting()
            options = {**arguments, **ENDS, "early_stopping": True}
            tokens = model.generate(**inputs, **options, logits_processor=[counting])
            calls.append(counting.calls)
            return tokens

        stock, fast, _ = run_both(call)
        assert torch.equal(stock, fast) and calls[-1] == calls[-2]
    assert len(set(calls)) > 1


def test_later_calls_use_the_recordings_of_earlier_ones():
    for name in ("gpt2", "t5"):
        model = model_of(name)
        with watched("capture a step") as captures:
            for seed in range(3):
                assert captured(model, inputs_of(name, seed=seed), **BEAMS)
                if not seed:
                    first = len(captures)
        assert len(captures) == first and first


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "t5"])
def test_inputs_of_other_lengths_use_them_too(name, shared):
    model = model_of(name)
    with capturing(smallest_capacity=64):
        for lengths in ((2, 5), (3, 9), (14, 6), (4, 1)):
            inputs = padded(*lengths, side="right" if name in ("t5", "bart") else "left")
            for arguments in (BEAMS, SAMPLES):
                assert captured(model, inputs, **arguments, min_new_tokens=8)
        assert len(captured_graphs(model)) == 2  # of other numbers of rows


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_in_inference_mode_and_out_of_it(name):
    model = model_of(name)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert captured(model, inputs_of(name), **BEAMS)


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(1.5)


def through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(1.5)


def other_data(weight: nn.Parameter) -> None:
    weight.data = weight.data * 1.5


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9 has one switch")
@pytest.mark.parametrize("switch", ["", "cuda.matmul", "mkldnn", "mkldnn.matmul"])
def test_each_precision_of_products_has_its_own_captures(monkeypatch, switch):
    model, before = model_of("gpt2"), graphs.torch_settings()
    owner = attrgetter(f"backends.{switch}" if switch else "backends")(torch)
    monkeypatch.setattr(owner, "fp32_precision", "tf32")
    assert captured(model, inputs_of("gpt2"), **GREEDY)
    monkeypatch.undo()
    assert graphs.torch_settings() == before and captured(model, inputs_of("gpt2"), **GREEDY)
    assert len({key[1] for key in captured_graphs(model)}) == 2


@pytest.mark.parametrize("change", [in_place, through_data, other_data])
def test_weights_that_change_between_calls(change):
    model = model_of("llama")
    for _ in range(3):
        assert captured(model, inputs_of("llama"), **BEAMS)
        change(model.lm_head.weight)
        change(model.model.layers[1].self_attn.k_proj.weight)


def replace_a_parameter(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)


def replace_a_buffer(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def add_a_hook(model: nn.Module) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    model.eval()


def add_an_adapter(model: nn.Module) -> None:
    import peft

    model.add_adapter(peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model.eval()


def change_the_configuration(model: nn.Module) -> None:
    model.config.some_switch = True


@pytest.mark.parametrize(
    "change",
    [
        replace_a_parameter,
        replace_a_buffer,
        add_a_hook,
        pytest.param(add_an_adapter, marks=needs_peft),
        change_the_configuration,
    ],
)
def test_recordings_of_another_state_are_dropped(change):
    model = model_of("llama")
    inputs = inputs_of("llama")
    captured(model, inputs, **BEAMS)
    before = set(map(id, captured_graphs(model).values()))
    kept = list(captured_graphs(model).values())
    change(model)
    captured(model, inputs, **BEAMS)
    assert kept and before.isdisjoint(map(id, captured_graphs(model).values()))


@needs_peft
def test_an_adapter_that_is_switched_off_drops_them_too():
    model = model_of("llama")
    add_an_adapter(model)
    captured(model, inputs_of("llama"), **BEAMS)
    kept = list(captured_graphs(model).values())
    model.disable_adapters()
    captured(model, inputs_of("llama"), **BEAMS)
    assert kept and not set(map(id, kept)) & set(map(id, captured_graphs(model).values()))


def test_training_and_foreign_hooks_leave_the_steps_to_the_library():
    model = model_of("gpt2")
    assert captured(model, inputs_of("gpt2"), **GREEDY)
    model.train().transformer.drop.p = 0.1
    report = run_both(lambda: model.generate(**inputs_of("gpt2"), **GREEDY)).report
    assert not_captured_because(report, "TRAINING", "transformer.drop is in training mode with p=0.1")
    model.eval()
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    assert not captured(model, inputs_of("gpt2"), **GREEDY)
    handle.remove()
    assert captured(model, inputs_of("gpt2"), **GREEDY)


def wrong_capture(capture, self, run, rewind):
    """Replays give what the function gives, and one more."""
    output, replay, *others = capture(self, run, rewind)

    def wrong_replay():
        outputs = replay()
        outputs.logits = outputs.logits + torch.arange(outputs.logits.shape[-1])
        return outputs

    return output, wrong_replay, *others


def failing_capture(capture, self, run, rewind):
    """As where the forward reads the device."""
    run()
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("right", [0, 1], ids=("first capture", "second capture"))
@pytest.mark.parametrize("by", [wrong_capture, failing_capture])
@pytest.mark.parametrize("arguments", [BEAMS, SAMPLES], ids=("beams", "samples"))
def test_a_capture_that_fails_is_said_once_and_the_tokens_are_right(by, arguments, right):
    model, inputs, captures = model_of("gpt2"), inputs_of("gpt2"), []

    def capture(original, *args):
        captures.append(args)
        return original(*args) if len(captures) <= right else by(original, *args)

    with (
        replaced("capture kernels", capture),
        pytest.warns(RuntimeWarning, match="fastgen does not capture the decode steps of a model: GPT2LMHeadModel: "),
    ):
        replayed = captured(model, inputs, **arguments)
    assert bool(replayed) == bool(right)
    stock, fast, report = run_both(lambda: model.generate(**inputs, **arguments))  # a second warning would raise
    assert torch.equal(stock, fast) and not_captured_because(report, "CAPTURE_REFUSED", "GPT2LMHeadModel: ")
    assert not captured_graphs(model)


@pytest.mark.parametrize("arguments", [BEAMS, SAMPLES], ids=("beams", "samples"))
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hosts_that_refuse_static_caches_leave_steps_eager(name, arguments, shared):
    model = model_of(name)
    model.config.layer_types = None  # which is read for masks of static caches only
    for _ in range(2):
        stock, fast, report = run_both(lambda: model.generate(**inputs_of(name), **arguments))
        assert torch.equal(stock, fast)
        assert not_captured_because(report, "CAPTURE_REFUSED", "TypeError: 'NoneType' object is not iterable")
    assert not holds_graphs(model)


@pytest.mark.parametrize("arguments", [BEAMS, GREEDY, SAMPLES], ids=("beams", "greedy", "samples"))
@pytest.mark.parametrize("removed", [0, 1, 2])
def test_layers_that_keep_their_numbers_when_one_is_removed(removed, arguments, shared):
    model = tiny("llama", num_hidden_layers=3)
    del model.model.layers[removed]
    stock, fast, report = run_both(lambda: model.generate(token_ids(2, 9), **arguments))
    assert torch.equal(stock, fast) and not_captured_because(report, "LAYER_EMPTY")


@needs_peft
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_of_an_adapter_leave_steps_eager(kind, shared):
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model, input_ids = peft.get_peft_model(tiny("llama"), config).eval(), token_ids(3, 16)
    input_ids[:, :8] = input_ids[:1, :8]
    mask = torch.ones_like(input_ids)
    mask[2, :2] = 0
    for inputs in ({}, {"attention_mask": mask}):
        for options in (BEAMS, GREEDY):
            call = partial(model.generate, input_ids=input_ids, **inputs, **options)
            stock, fast, report = run_both(call)
            assert torch.equal(stock, fast) and not_captured_because(report, "CAPTURE_REFUSED", "KeyError")


@pytest.mark.parametrize("arguments", [BEAMS, SAMPLES], ids=("beams", "samples"))
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
def test_autocast_that_begins_inside_a_forward_is_told(name, arguments):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        model = accelerator.unwrap_model(accelerator.prepare(model_of(name)), keep_fp32_wrapper=True)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    for _ in range(2):
        stock, fast, report = run_both(lambda: model.generate(**inputs_of(name), **arguments))
        assert torch.equal(stock, fast) and not_captured_because(report, "AUTOCAST", "inside the forward")


@pytest.mark.parametrize("arguments", [BEAMS, GREEDY], ids=("beams", "greedy"))
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_where_buffers_cannot_grow_eager_steps_go_on(name, arguments):
    model, arguments = model_of(name), {**arguments, "max_new_tokens": 40, "eos_token_id": None}
    with broken("grow a static cache", TypeError):  # when the first buffers are full
        stock, fast, report = run_both(lambda: model.generate(**inputs_of(name), **arguments))
    assert torch.equal(stock, fast) and 0 < replays(report) < 39 and "CAPTURE_REFUSED" in report.codes()


@pytest.mark.parametrize("arguments", [BEAMS, GREEDY], ids=("beams", "greedy"))
def test_growth_without_memory_means_eager_steps(arguments):
    model, arguments = model_of("gpt2"), {**arguments, "max_new_tokens": 40, "eos_token_id": None}
    with broken("grow a static cache", torch.cuda.OutOfMemoryError):
        stock, fast, report = run_both(lambda: model.generate(**inputs_of("gpt2"), **arguments))
    assert torch.equal(stock, fast) and 0 < replays(report) < 39 and "OUT_OF_MEMORY" in report.codes()


@pytest.mark.parametrize("arguments", [BEAMS, GREEDY, SAMPLES], ids=("beams", "greedy", "samples"))
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_compaction_without_memory_means_eager_steps(name, arguments):
    model, arguments = model_of(name), {**arguments, "max_new_tokens": 40, **ENDS}
    at_once = costs(min_leaving=0.0, min_steps_expected=1, prefill_cost=-(1 << 40))
    failing = broken("grow a static cache", torch.cuda.OutOfMemoryError)
    with capturing(smallest_capacity=64), at_once, failing as changes:
        for seed in range(4):
            stock, fast, _ = run_both(lambda seed=seed: model.generate(**inputs_of(name, seed=seed), **arguments))
            assert torch.equal(stock, fast)
    assert changes


def test_a_later_capture_without_memory_means_eager_steps():
    model = model_of("gpt2")
    arguments = {**BEAMS, "max_new_tokens": 40, "eos_token_id": None}
    with broken("capture kernels", torch.cuda.OutOfMemoryError, after=1):
        stock, fast, report = run_both(lambda: model.generate(**inputs_of("gpt2"), **arguments))
    assert torch.equal(stock, fast) and 0 < replays(report) < 39
    report = run_both(lambda: model.generate(**inputs_of("gpt2"), **arguments)).report
    assert not_captured_because(report, "OUT_OF_MEMORY")  # it is not tried again


@pytest.mark.parametrize("num_beams", [1, 3])
def test_after_an_error_the_library_begins_anew(num_beams):
    model = model_of("llama")
    with broken("static step", TypeError("ours")), errors_noted() as errors:
        for _ in range(2):
            assert not captured(model, inputs_of("llama"), **{**GREEDY, "num_beams": num_beams})
    assert errors == ["ours", "ours"]
    assert not holds_graphs(model) and not captured_graphs(model)


def test_without_memory_for_the_buffers_the_call_goes_on_with_its_own_cache():
    model = model_of("gpt2")
    with broken("fill a static cache", torch.cuda.OutOfMemoryError) as attempts:
        for _ in range(2):
            stock, fast, report = run_both(lambda: model.generate(**inputs_of("gpt2"), **BEAMS))
            assert torch.equal(stock, fast) and not_captured_because(report, "OUT_OF_MEMORY")
    assert len(attempts) == 1 and not holds_graphs(model)


def test_other_models_are_left_as_they_are():
    model = tiny("roformer")
    stock, fast, report = run_both(lambda: model.generate(**inputs_of("roformer"), **GREEDY))
    assert torch.equal(stock, fast) and not_captured_because(report, "MAY_SYNC", "RoFormerForCausalLM.forward")


@pytest.mark.parametrize("arguments", [BEAMS, SAMPLES], ids=("beams", "samples"))
def test_nothing_is_captured_where_it_is_not_wanted(arguments):
    model = model_of("gpt2")
    with capturing("off"):
        stock, fast, report = run_both(lambda: model.generate(**inputs_of("gpt2"), **arguments))
        assert torch.equal(stock, fast) and not_captured_because(report, "CAPTURE_OFF")


def test_steps_are_captured_on_the_default_stream_of_a_gpu(monkeypatch):
    monkeypatch.setattr(graphs, "graphs_of", lambda *models: SimpleNamespace(refused=[]))
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, is_cpu=False, is_cuda=False)
    monkeypatch.setattr(graphs, "first_weight", lambda decoder: on_gpu)
    streams = {"off": 0, "auto": 0, "on": 0, "another": 7}
    expected = {"off": {"CAPTURE_OFF"}, "auto": set(), "on": set(), "another": {"CUDA_STREAM"}}
    for case, codes in expected.items():
        stream = SimpleNamespace(cuda_stream=streams[case])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        with capturing("on" if case == "another" else case), generate_call("test") as call:
            model = nn.Module()
            checks = SimpleNamespace(call=call, model=model, decoder=model, known=KNOWN, capture=[], rows=[])
            assert graphs.can_capture(checks, 1, 40) is (not codes)
        assert call.report.codes() == codes


def test_on_a_cpu_a_recording_has_to_save_what_it_costs():
    model = model_of("gpt2")
    with capturing("auto"):
        assert captured(model, inputs_of("gpt2"), **{**GREEDY, "max_new_tokens": 40, "eos_token_id": None})
        with costs(saved_per_module=1):
            report = run_both(lambda: model.generate(**inputs_of("gpt2"), **BEAMS)).report
        assert not_captured_because(report, "NOT_WORTH_CAPTURING", "14 steps of 12 rows would save less")


class AfterManySteps(CostModel):
    def should_capture(self, size, rows, steps, is_captured, device_type):
        return is_captured or steps >= 40


def test_calls_too_short_for_a_recording_get_one_when_there_are_several():
    model = model_of("gpt2")
    with capturing("auto", smallest_capacity=64), costs(AfterManySteps):
        counts = [captured(model, inputs_of("gpt2"), **{**GREEDY, "eos_token_id": None}) for _ in range(5)]
    assert counts == [0, 0, 0, 12, 13]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_in_half_precision_steps_are_captured_without_padding(name, options, dtype):
    model = model_of(name).to(dtype)
    inputs = {key: value[:1, -7:] for key, value in inputs_of(name).items()}
    stock, fast, report = run_both(lambda: model.generate(**inputs, **options))
    assert replays(report) and torch.equal(stock, fast)
    found = captured_graphs(model).values()
    assert found and not any(graph.cache.padding for graph in found)


@pytest.mark.parametrize("name", MODELS)
def test_later_calls_look_at_no_module_of_a_model_that_is_as_it_was(name, shared):
    """Neither what the loops nor what the forwards on its modules leave in it counts as a change."""
    model, inputs = model_of(name), inputs_of(name)
    for _ in range(2):
        model.generate(**inputs, **BEAMS)
    with costs(min_large_per_module=0, min_large=0):
        model.generate(**inputs, **BEAMS)
        with watched("walk through a model") as walks:
            model.generate(**inputs, **BEAMS)
    assert not walks


def test_a_new_recording_waits_for_a_call_that_is_not_short():
    model = model_of("gpt2")
    options = {**GREEDY, "eos_token_id": None}
    with capturing(smallest_capacity=64, steps_before=8):
        assert not captured(model, inputs_of("gpt2"), **{**options, "max_new_tokens": 8})
        assert captured(model, inputs_of("gpt2"), **{**options, "max_new_tokens": 14}) == 5
        assert captured(model, inputs_of("gpt2"), **{**options, "max_new_tokens": 14}) == 13


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_inputs_that_are_finished_leave_captured_steps(name):
    model, left = model_of(name), 0
    for seed in range(6):
        for arguments in (BEAMS, GREEDY):
            options = {**arguments, **ENDS, "max_new_tokens": 20, "min_new_tokens": 3}
            with sharing("always"):
                stock, fast, report = run_both(
                    lambda seed=seed, options=options: model.generate(**inputs_of(name, 4, seed), **options)
                )
            assert torch.equal(stock, fast) and replays(report)
            left += "finished inputs: removed from the batch" in report.shared
    assert left


class Branching(nn.Module):
    """Takes another way for large numbers."""

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        return number + 1 if number.max() < 5 else number * 2


def test_a_forward_that_depends_on_numbers_is_replayed_as_long_as_they_lead_the_same_way():
    made = CapturedGraph(lambda inputs: Branching()(inputs["number"]), cache_of_one_layer())
    made.capture({"number": torch.zeros(3)}, CpuCapture())
    assert torch.equal(made.replay({"number": torch.full((3,), 4.0)}), torch.full((3,), 5.0))
    with pytest.raises(Diverged):
        made.replay({"number": torch.full((3,), 6.0)})


def test_a_cache_that_somebody_has_kept_is_plain_afterwards_and_holds_every_position():
    model = model_of("llama")
    for share in ("always", "never"):
        with sharing(share), watched("use a cache") as uses:
            tokens = model.generate(**inputs_of("llama"), **{**SAMPLES, "eos_token_id": None})
        cache = uses[-1].args[0]
        with torch.no_grad():
            mask = inputs_of("llama")["attention_mask"].repeat_interleave(3, dim=0)
            mask = torch.cat([mask, torch.ones(9, 13, dtype=torch.int64)], dim=1)
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
            whole = model(tokens[:, :-1], attention_mask=mask, position_ids=position_ids).past_key_values
        for found, expected in zip(cache.layers, whole.layers):
            assert type(found) is type(expected) and type(found.keys) is torch.Tensor
            visible = mask.bool()[:, None, :, None]
            torch.testing.assert_close(found.keys * visible, expected.keys * visible, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.values * visible, expected.values * visible, atol=1e-4, rtol=1e-4)


def test_a_second_thread_on_the_same_model_goes_on_without_recordings():
    model = model_of("gpt2")
    expected = model.generate(**inputs_of("gpt2"), **BEAMS)
    results = [None] * 4

    def work(index: int) -> None:
        results[index] = model.generate(**inputs_of("gpt2"), **BEAMS)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result in results)
    assert not holds_graphs(model)


def test_a_model_that_is_gone_leaves_nothing_behind():
    model = model_of("gpt2")
    captured(model, inputs_of("gpt2"), **BEAMS)
    buffers = weakref.ref(next(iter(captured_graphs(model).values())).cache)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and buffers() is None


def static(cache: KVCache, most: int = 8) -> StaticKVCache:
    content = cache.content()
    made = StaticKVCache(content.spec(most))
    made.load(content)
    return made


def cache_of_one_layer(rows: int = 2) -> StaticKVCache:
    cache = KVCache(rows, 1)
    cache.add_layers([()], 8)
    cache.append(0, *torch.zeros(2, rows, 1, 3, 4))
    return static(cache)


def graph_of(rows: int = 2) -> CapturedGraph:
    made = CapturedGraph(lambda inputs: inputs["number"] + 1, cache_of_one_layer(rows))
    made.capture({"number": torch.zeros(3)}, CpuCapture())
    return made


def test_inputs_that_a_replay_does_not_read_are_not_copied():
    """As the states of the encoder, which an output may be all the same."""
    made = CapturedGraph(lambda inputs: (inputs["number"] + 1, inputs["states"]), cache_of_one_layer())
    states = torch.randn(1000)
    assert made.capture({"number": torch.zeros(3), "states": states}, CpuCapture())[1].data_ptr() == states.data_ptr()
    assert made.nbytes < made.cache.nbytes + states.nbytes
    others = torch.randn(1000)
    number, found = made.replay({"number": torch.ones(3), "states": others})
    assert torch.equal(number, torch.full((3,), 2.0)) and torch.equal(found, others)
    alive = weakref.ref(others.untyped_storage())
    made.end_call()
    assert made.replay({"number": torch.ones(3), "states": torch.randn(999)}) is None
    del found, others
    gc.collect()
    assert alive() is None


def test_recordings_that_were_not_used_for_longest_are_dropped():
    recordings = GraphCache(torch.device("cpu"), torch.float32)
    with limits(most_graphs=3):
        for key in range(3):
            recordings.put(key, graph_of())
        recordings.put(0, recordings.entries.pop(0))
        recordings.put(3, graph_of())
    assert list(recordings.entries) == [2, 0, 3]
    recordings.most_bytes = 2 * graph_of().nbytes
    recordings.put(4, graph_of())
    assert list(recordings.entries) == [3, 4]
    assert sum(graph.nbytes for graph in recordings.entries.values()) == recordings.most_bytes
    recordings.put(5, graph_of(rows=20))  # larger than the bound: not kept
    assert list(recordings.entries) == [3, 4]


def test_a_replay_gets_the_inputs_of_its_call_and_no_others_than_were_captured():
    made = graph_of()
    assert made.replay({"number": torch.arange(3.0)}).tolist() == [1, 2, 3]
    number = torch.zeros(3)
    assert made.replay({"number": number}).tolist() == [1, 1, 1]
    number += 5  # the same tensor with another content
    assert made.replay({"number": number}).tolist() == [6, 6, 6]
    assert made.replay({"number": torch.zeros(4)}) is None and made.state is GraphState.DROPPED


@pytest.mark.parametrize("prompt_length", [0, 5])
def test_a_static_cache_holds_what_a_concatenation_gives_at_addresses_that_stay(prompt_length):
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
    cache.buffers[0].fill_(torch.nan)  # of an earlier call
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
            assert all(torch.equal(found[:, :, prompt_length:], states) for found, states in zip(whole, pair))
            keys, _ = cache.read(layer)
            assert keys.shape[2] == (8 if prompt_length else 0) + 12 and not keys.isnan().any()
    found = [states.data_ptr() for layer in range(2) for pair in cache.segments(layer) for states in pair]
    assert found == addresses


def test_capacities_are_few_and_never_too_small():
    assert len({capacity_for(needed, 4096) for needed in range(1, 4097)}) < 40
    assert capacity_for(2, 500) == capacity_for(8, 500)  # a short call never grows
    for most in (20, 100, 5000):
        for needed in range(1, most + 1):
            assert needed <= capacity_for(needed, most) <= max(2 * needed, most) * 1.25 + 32


def test_a_late_stop_check_is_that_of_the_step_before():
    flag = LateStopCheck(torch.device("cpu"))
    seen = [flag.exchange(torch.tensor(value)) for value in (False, True, False, True, True)]
    assert seen == [False, False, True, False, True]


def test_prompts_of_one_row_without_a_mask():
    assert captured(model_of("llama"), {"input_ids": token_ids(1, 6)}, **GREEDY)


def test_logits_of_tokens_that_a_model_rules_out_do_not_hide_differences():
    expected = torch.tensor([[1.0, 2.0, torch.finfo(torch.float32).min, -torch.inf]])
    assert not graphs.differs_sync(expected + torch.tensor([1e-4, 0, 0, 0]), expected)
    assert graphs.differs_sync(expected + torch.tensor([0.1, 0, 0, 0]), expected)
    assert graphs.differs_sync(torch.tensor([[1.0, 2.0, 3.0, -torch.inf]]), expected)


def test_recordings_of_another_type_are_let_go():
    model = model_of("gpt2")
    captured(model, inputs_of("gpt2"), **BEAMS)
    before = list(captured_graphs(model).values())
    model.double()
    captured(model, inputs_of("gpt2"), **BEAMS)
    assert before and not set(map(id, before)) & set(map(id, captured_graphs(model).values()))


def test_what_stays_the_same_is_padded_once_for_each_padding():
    call = GenerateCall(Report("test"))
    inputs = {"attention_mask": torch.ones(2, 3), "encoder_outputs": (torch.ones(2, 3, 4),)}
    arguments = LoopArguments(torch.ones(2, 1), [], [], mock.Mock(max_length=9), False, {})
    step = decode_step.TransformersDecodeStep(CallChecks(call, model_of("bart"), arguments), [], 1)
    first, again, longer = (step._pad(inputs, positions) for positions in (2, 2, 4))
    assert first["attention_mask"].tolist() == 2 * [[0, 0, 1, 1, 1]]
    assert all(again[name] is first[name] for name in inputs)
    assert longer["attention_mask"].shape == (2, 7) and longer["encoder_outputs"][0].shape == (2, 7, 4)
    assert step._pad({**inputs, "attention_mask": torch.zeros(2, 3)}, 4)["attention_mask"].sum() == 0
