"""Captured decode steps give the library's tokens; graphs are used again, and never when stale.

The matrix of options runs in captured steps as well: test_generate_options.py. Graphs and static caches themselves are
tested in tests/optimizer/decoding/test_graphs.py.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from fuzz_changes import CHANGES, adapter, weight_in_place, weight_through_data
from hooks import ANY_SIZE, broken, captured_graphs, costs, errors_noted, holds_graphs, limits, replaced, watched
from parity import run_both, same_tokens
from reports import capturing, not_captured_because, replays
from tiny_models import inputs_of, padded, tiny, under_autocast
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from versions import needs_peft

from fastgen.optimizer.decoding import captures
from fastgen.optimizer.decoding.cost_model import CPU
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN
from fastgen.testing import configured

MODELS = ("gpt2", "llama", "llama-eager", "t5", "bart", "whisper")
BEAMS = {"num_beams": 4, "max_new_tokens": 14}
GREEDY = {"max_new_tokens": 14, "do_sample": False}
SAMPLES = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 14}
ENDS = {"eos_token_id": list(range(3, 90, 6))}
LONG = {"max_new_tokens": 40, "eos_token_id": None}
WAYS = pytest.mark.parametrize("arguments", (BEAMS, GREEDY, SAMPLES), ids=("beams", "greedy", "samples"))
TWO_WAYS = pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
LENGTHS = (3, 7, 5)
OUT_OF_MEMORY = torch.cuda.OutOfMemoryError

pytestmark = pytest.mark.skipif(
    not LAYERS_ARE_KNOWN, reason="nothing is captured with the static caches of this transformers"
)


@pytest.fixture(autouse=True)
def _capturing():
    with capturing():
        yield


@pytest.fixture(params=("always", "never"))
def shared(request):
    """Stores prompts once per input, or for each row."""
    with configured(share=request.param):
        yield


def captured(model: nn.Module, name: str, seed: int = 1, **arguments: Any) -> int:
    """Compares tokens and random numbers with the library's; returns how many steps were replays."""
    return replays(same_tokens(model, inputs_of(name, *LENGTHS, seed=seed), **arguments))


@WAYS
@pytest.mark.parametrize("name", MODELS)
def test_captured_tokens_are_those_of_the_library(name, arguments, shared):
    """Also of a single row, without a mask."""
    model, single = tiny(name), inputs_of(name, 6)
    single.pop("attention_mask", None)
    for inputs in (single, inputs_of(name, *LENGTHS)):
        assert replays(same_tokens(model, inputs, **arguments, min_new_tokens=6))


@WAYS
@pytest.mark.parametrize("name", ("gpt2", "t5"))
def test_every_step_after_the_first_is_a_replay(name, arguments):
    """Although buffers are outgrown."""
    model = tiny(name)
    replayed = captured(model, name, **arguments | LONG)
    assert len(captured_graphs(model)) > 1
    assert replayed == 39 - len(captured_graphs(model))  # the steps from which they were made


@WAYS
@pytest.mark.parametrize("name", ("llama", "llama-eager", "gpt2", "mistral"))
def test_masks_of_later_steps_are_not_built(name, arguments):
    """Although each step sees one more position, of rows padded on the left; the masks of eager attention are added."""
    model, counts = tiny(name), []
    for by in (lambda original, *args: original(*args), lambda original, *args: None):
        with limits(smallest_capacity=64), replaced("masks of a step", by), watched("masks were built") as built:
            assert captured(model, name, **arguments | LONG) > 36
        counts.append(len(built))
    assert counts[0] < 6 and counts[1] > 36


@WAYS
def test_the_end_is_seen_a_step_late_and_the_step_undone(arguments):
    model = tiny("llama")
    slow_device = replaced("wait for a flag", lambda original, device: True)
    with watched("check for the end, a step late") as checks, slow_device:
        for seed in range(8):
            captured(model, "llama", seed, **{**arguments, **ENDS, "early_stopping": True})
    assert any(check.result for check in checks)


@WAYS
def test_a_processor_of_user_code_sees_no_extra_step(arguments):
    model, calls = tiny("llama"), []

    def counting(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls[-1] += 1
        return scores

    def call(seed: int) -> torch.Tensor:
        calls.append(0)
        options = {**arguments, **ENDS, "early_stopping": True, "logits_processor": [counting]}
        return model.generate(**inputs_of("llama", *LENGTHS, seed=seed), **options)

    for seed in range(6):
        stock, fast, _ = run_both(partial(call, seed))
        assert torch.equal(stock, fast) and calls[-1] == calls[-2]
    assert len(set(calls)) > 1


@pytest.mark.parametrize("name", ("llama", "gpt2", "bart", "t5"))
def test_inputs_of_other_lengths_use_the_same_graphs(name, shared):
    model = tiny(name)
    with capturing(smallest_capacity=64):
        for lengths in ((2, 5), (3, 9), (14, 6), (4, 1)):
            for arguments in (BEAMS, SAMPLES):
                assert replays(same_tokens(model, inputs_of(name, *lengths), **arguments, min_new_tokens=8))
        assert len(captured_graphs(model)) == 2  # for other numbers of rows


@pytest.mark.parametrize("name", ("llama", "bart"))
def test_steps_are_captured_in_and_out_of_inference_mode(name):
    model = tiny(name)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert captured(model, name, **BEAMS)


# Changes between calls: weights are read where they are; another state of the model is captured anew.


ALL_CHANGES: dict[str, Callable[[Random, Any], Any]] = {
    **{change.__name__: change for change in CHANGES},
    "buffer": lambda random, model: setattr(model.model.rotary_emb, "inv_freq", 0.5 * model.model.rotary_emb.inv_freq),
    "parametrization": lambda random, model: weight_norm(model.model.layers[0].mlp.up_proj).eval(),
    "configuration": lambda random, model: setattr(model.config, "some_switch", True),
    "dtype": lambda random, model: model.double(),
}


@pytest.mark.parametrize("change", ALL_CHANGES.values(), ids=ALL_CHANGES)
def test_only_weights_that_are_written_keep_their_graphs(change):
    model = tiny("llama")
    if change is adapter:  # first it is added, then switched off
        change(Random(1), model)
        model.eval()
    assert captured(model, "llama", **BEAMS)
    before = set(captured_graphs(model).values())
    change(Random(1), model)
    replayed = captured(model, "llama", **BEAMS)
    is_used = bool(replayed and before & set(captured_graphs(model).values()))
    assert is_used == (change in (weight_in_place, weight_through_data))


# Captures that fail: the call continues in eager steps, with one warning.


def wrong_capture(capture: Callable, self: Any, run: Callable, rewind: Callable) -> tuple:
    """Captures a replay that returns other logits than the function."""
    output, replay, *others = capture(self, run, rewind)

    def wrong_replay():
        outputs = replay()
        outputs.logits = outputs.logits + torch.arange(outputs.logits.shape[-1])
        return outputs

    return output, wrong_replay, *others


def failing_capture(capture: Callable, self: Any, run: Callable, rewind: Callable) -> tuple:
    """Fails like a capture whose forward reads the device."""
    run()
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("right", (0, 1), ids=("first capture", "second capture"))
@pytest.mark.parametrize("by", (wrong_capture, failing_capture))
@TWO_WAYS
def test_a_failed_capture_warns_once_and_tokens_are_right(by, arguments, right):
    model, captures = tiny("gpt2"), []

    def capture(original, *args):
        captures.append(args)
        return original(*args) if len(captures) <= right else by(original, *args)

    with (
        replaced("capture kernels", capture),
        pytest.warns(RuntimeWarning, match="fastgen does not capture the decode steps of a model: GPT2LMHeadModel: "),
    ):
        replayed = captured(model, "gpt2", **arguments)
    assert bool(replayed) == bool(right)
    report = same_tokens(model, inputs_of("gpt2", *LENGTHS), **arguments)  # a second warning would raise
    assert not_captured_because(report, "CAPTURE_REFUSED", "GPT2LMHeadModel: ") and not captured_graphs(model)


BREAKS = {  # part, error, after how many calls, code
    "buffers cannot grow": ("grow a static cache", TypeError, 0, "CAPTURE_REFUSED"),
    "no memory to grow": ("grow a static cache", OUT_OF_MEMORY, 0, "OUT_OF_MEMORY"),
    "no memory for a later capture": ("capture kernels", OUT_OF_MEMORY, 1, "OUT_OF_MEMORY"),
    "no memory for the buffers": ("fill a static cache", OUT_OF_MEMORY, 0, "OUT_OF_MEMORY"),
}


@pytest.mark.parametrize("arguments", (BEAMS, GREEDY), ids=("beams", "greedy"))
@pytest.mark.parametrize("name", ("gpt2", "t5"))
@pytest.mark.parametrize("what", BREAKS)
def test_after_a_failure_the_call_continues_in_eager_steps(what, name, arguments):
    part, error, after, code = BREAKS[what]
    model = tiny(name)
    with broken(part, error, after):
        report = same_tokens(model, inputs_of(name, *LENGTHS), **arguments | LONG)
    assert replays(report) < 39 and (code in report.codes() or part == "capture kernels")
    assert bool(replays(report)) == (part != "fill a static cache") and not holds_graphs(model)
    if part != "grow a static cache":  # it is not tried again
        report = same_tokens(model, inputs_of(name, *LENGTHS), **arguments)
        assert not_captured_because(report, "OUT_OF_MEMORY")


@WAYS
@pytest.mark.parametrize("name", ("llama", "bart"))
def test_compaction_without_memory_means_eager_steps(name, arguments):
    model, arguments = tiny(name), {**arguments, "max_new_tokens": 40, **ENDS}
    immediately = costs(min_leaving=0.0, min_steps_expected=1, prefill_overhead=-1e9)
    failing = broken("grow a static cache", OUT_OF_MEMORY)
    with capturing(smallest_capacity=64), immediately, failing as changes:
        for seed in range(4):
            captured(model, name, seed, **arguments)
    assert changes


@pytest.mark.parametrize("num_beams", (1, 3))
def test_after_an_error_the_library_restarts(num_beams):
    model = tiny("llama")
    with broken("static step", TypeError("ours")), errors_noted() as errors:
        for _ in range(2):
            assert not captured(model, "llama", **{**GREEDY, "num_beams": num_beams})
    assert errors == ["ours", "ours"]
    assert not holds_graphs(model) and not captured_graphs(model)


# What is not captured, and why.


def without_masks() -> nn.Module:
    model = tiny("llama")
    model.config.layer_types = None  # only masks of static caches read it
    return model


def without_layer(removed: int) -> nn.Module:
    """Removes a layer; the others keep their numbers."""
    model = tiny("llama", num_hidden_layers=3)
    del model.model.layers[removed]
    return model


def with_virtual_tokens(kind: str) -> nn.Module:
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    return peft.get_peft_model(tiny("llama"), config).eval()


def in_int8() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(tiny("llama"), {nn.Linear})


TWO_NAMES = ("llama", "gpt2")
OF_VIRTUAL_TOKENS = ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig")
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "no masks": (without_masks, "CAPTURE_REFUSED", "'NoneType' object is not iterable"),
    "dynamic int8": (in_int8, "ROWS_COUPLED", "scales its input by the largest number"),
    "a forward that may wait": (partial(tiny, "roformer"), "MAY_SYNC", "RoFormerForCausalLM.forward"),
    **{f"no layer {number}": (partial(without_layer, number), "LAYER_EMPTY", "") for number in range(3)},
    **{f"autocast of {name}": (partial(under_autocast, name), "AUTOCAST", "inside the forward") for name in TWO_NAMES},
    **{kind: (partial(with_virtual_tokens, kind), "CAPTURE_REFUSED", "KeyError") for kind in OF_VIRTUAL_TOKENS},
}


@pytest.mark.parametrize(
    ("arguments", "shared"), ((BEAMS, "always"), (GREEDY, "never")), ids=("beams", "greedy"), indirect=["shared"]
)
@pytest.mark.parametrize("why", [pytest.param(why, marks=[needs_peft] * why.endswith("Config")) for why in REFUSED])
def test_models_that_cannot_be_captured_have_a_reason(why, arguments, shared):
    make, code, text = REFUSED[why]
    model, inputs = make(), inputs_of("llama", *LENGTHS)
    if why.endswith("Config"):  # with a common prefix
        inputs = padded(16, 14, 16)
        inputs["input_ids"][:, 2:8] = inputs["input_ids"][:1, 2:8]
    # In bfloat16 shared prompts are rounded otherwise, which makes other tokens.
    with configured(share="auto") if code == "AUTOCAST" else nullcontext():
        for _ in range(2):
            assert not_captured_because(same_tokens(model, inputs, **arguments), code, text)


def test_on_a_cpu_a_graph_must_save_more_than_it_costs():
    model = tiny("gpt2")
    with capturing("auto"):
        assert captured(model, "gpt2", **GREEDY | LONG)
        with costs(rates=replace(CPU, module=1e-12)):
            report = same_tokens(model, inputs_of("gpt2", *LENGTHS), **BEAMS)
        assert not_captured_because(report, "NOT_WORTH_CAPTURING", "14 steps of 12 rows would save less")


def after_many_steps(costs, size, rows, steps, is_captured, device) -> bool:
    return is_captured or steps >= 40


def test_calls_too_short_for_a_graph_share_one(monkeypatch):
    model = tiny("gpt2")
    monkeypatch.setattr(captures, "is_worth_capturing", after_many_steps)
    with capturing("auto", smallest_capacity=64):
        counts = [captured(model, "gpt2", **{**GREEDY, "eos_token_id": None}) for _ in range(5)]
    assert counts == [0, 0, 0, 12, 13]


def test_a_new_graph_waits_for_a_call_that_is_not_short():
    model, options = tiny("gpt2"), GREEDY | {"eos_token_id": None}
    with capturing(smallest_capacity=64, steps_before=8):
        assert not captured(model, "gpt2", **options | {"max_new_tokens": 8})
        assert [captured(model, "gpt2", **options) for _ in range(2)] == [5, 13]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("name", ("llama", "gpt2", "bart"))
@pytest.mark.parametrize("options", (GREEDY, BEAMS), ids=("greedy", "beams"))
def test_in_half_precision_steps_are_captured_without_padding(name, options, dtype):
    model, inputs = tiny(name).to(dtype), {key: value[:1] for key, value in inputs_of(name, *LENGTHS).items()}
    assert replays(same_tokens(model, inputs, **options))
    graphs = captured_graphs(model).values()
    assert graphs and not any(graph.cache.padding for graph in graphs)


@pytest.mark.parametrize("name", MODELS)
def test_later_calls_do_not_walk_through_an_unchanged_model(name, shared):
    """Neither the loops nor the forwards on its modules leave a change in it."""
    model, inputs = tiny(name), inputs_of(name, *LENGTHS)
    for _ in range(2):
        model.generate(**inputs, **BEAMS)
    with costs(**ANY_SIZE):
        model.generate(**inputs, **BEAMS)
        with watched("walk through a model") as walks:
            model.generate(**inputs, **BEAMS)
    assert not walks


# Caches after the call.


@pytest.mark.parametrize("share", ("always", "never"))
def test_a_cache_that_user_code_holds_ends_plain_and_whole(share):
    model, inputs = tiny("llama"), inputs_of("llama", *LENGTHS)
    with configured(share=share), watched("use a cache") as uses:
        tokens = model.generate(**inputs, **{**SAMPLES, "eos_token_id": None})
    cache = uses[-1].args[0]
    with torch.no_grad():
        mask = inputs["attention_mask"].repeat_interleave(3, dim=0)
        mask = torch.cat([mask, torch.ones(9, 13, dtype=torch.int64)], dim=1)
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        whole = model(tokens[:, :-1], attention_mask=mask, position_ids=position_ids).past_key_values
    for layer, expected in zip(cache.layers, whole.layers):
        assert type(layer) is type(expected) and type(layer.keys) is torch.Tensor
        visible = mask.bool()[:, None, :, None]
        torch.testing.assert_close(layer.keys * visible, expected.keys * visible, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values * visible, expected.values * visible, atol=1e-4, rtol=1e-4)
