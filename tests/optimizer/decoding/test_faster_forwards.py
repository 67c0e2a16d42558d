"""Modules have faster forwards inside generate, in its thread, and nowhere else; mostly shown with GPT-2's GELU."""

import copy
import io
import pickle
import threading

import pytest
import torch
from hooks import ANY_SIZE, costs, watched
from parity import assert_same
from tiny_models import BEAMS, padded, tiny
from transformers import GenerationConfig
from transformers.activations import NewGELUActivation

import fastgen
from fastgen.ops import simd
from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.decoding.faster_forwards import FasterForward, faster_forwards
from fastgen.optimizer.transformers.call import forwards

STATES = torch.cat([torch.linspace(-12, 12, 10001), torch.tensor([-1e4, -0.0, 0.0, 1e4])])


@pytest.fixture
def gpt2():
    with costs(**ANY_SIZE):
        yield tiny("gpt2")


def activations(model):
    return [module for module in model.modules() if isinstance(module, NewGELUActivation)]


def is_untouched(model):
    return not any("forward" in vars(module) for module in activations(model))


def generate_and(model, action):
    """Returns the result of `action`, called inside a generate that uses fused activations."""
    results = []

    def during(input_ids, scores):
        results.append(action())
        return scores

    model.generate(**padded(9, 5), max_new_tokens=2, do_sample=False, logits_processor=[during])
    assert fastgen.explain().kernels["fused activation"] > 0
    return results[-1]


def in_a_thread(action):
    results = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    thread.join()
    return results[0]


def by_faster_forward(module, states):
    """Returns the output of a module inside `faster_forwards`, and the kernels that ran."""
    with torch.no_grad(), generate_call("test") as call, faster_forwards(call, {module: module.modules()}, forwards()):
        output = module(states)
    assert "forward" not in vars(module)
    return output, call.report.kernels


WITH_KERNELS = pytest.mark.skipif(bool(simd.machine_reasons()), reason=f"C++ kernels: {simd.machine_reasons()}")


@pytest.mark.parametrize(
    "dtype",
    (
        torch.float32,
        torch.float64,
        pytest.param(torch.bfloat16, marks=WITH_KERNELS),
        pytest.param(torch.float16, marks=WITH_KERNELS),
    ),
    ids=str,
)
def test_the_fused_activation_is_the_same_function(dtype):
    """In half precision it has the library's bits; other types are left to the original."""
    module, states = NewGELUActivation(), STATES.to(dtype)
    output, usage = by_faster_forward(module, states)
    assert usage == ({} if dtype == torch.float64 else {"fused activation": 1})
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(output, module(states), **tolerance)


def test_generate_counts_its_fused_activations(gpt2):
    report = assert_same(gpt2, padded(9, 5), **BEAMS | {"max_new_tokens": 3})
    assert report.kernels["fused activation"] == 6  # 3 forwards of 2 layers
    assert is_untouched(gpt2)


def test_small_models_are_not_searched_for_forwards():
    model = tiny("gpt2")
    with watched("faster forwards") as looks:
        model.generate(**padded(9, 5), max_new_tokens=2)
    assert not looks


def test_gradients_and_modes_of_user_code_see_the_original():
    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    module, seen, states = NewGELUActivation(), [], torch.randn(5, requires_grad=True)
    with generate_call("test") as call, faster_forwards(call, {module: module.modules()}, forwards()):
        module(states).sum().backward()
        with torch.no_grad(), Watching():
            module(states)
    assert not call.report.kernels and states.grad is not None and torch.tanh in seen


def test_another_thread_may_call_and_train_the_model_meanwhile(gpt2):
    inputs = padded(9, 5)

    def call_and_train():
        gpt2.zero_grad()
        with torch.no_grad():
            logits = gpt2(**inputs).logits
        gpt2(**inputs, labels=inputs["input_ids"]).loss.backward()
        return logits, gpt2.lm_head.weight.grad.clone()

    expected = in_a_thread(call_and_train)
    results = generate_and(gpt2, lambda: in_a_thread(call_and_train))
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


def test_faster_forwards_stay_until_the_last_thread_ends(gpt2):
    inside, ended = threading.Event(), threading.Event()

    def wait():
        inside.set()
        ended.wait()

    thread = threading.Thread(target=lambda: generate_and(gpt2, wait))
    thread.start()
    inside.wait()
    try:
        gpt2.generate(**padded(9, 5), max_new_tokens=2)
        assert fastgen.explain().kernels["fused activation"] == 4
        assert not is_untouched(gpt2)  # the other thread still generates
    finally:
        ended.set()
        thread.join()
    assert is_untouched(gpt2)


def test_faster_forwards_are_removed_after_an_error(gpt2):
    def fail():
        raise LookupError("from the processor")

    with pytest.raises(LookupError):
        generate_and(gpt2, fail)
    assert is_untouched(gpt2)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    **{
        f"pickle, protocol {protocol}": lambda model, protocol=protocol: pickle.loads(pickle.dumps(model, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_made_during_generate_has_the_usual_forwards(gpt2, copied):
    twin = generate_and(gpt2, lambda: copied(gpt2))
    assert all(module.forward.__func__ is NewGELUActivation.forward for module in activations(twin))
    assert b"fastgen" not in generate_and(gpt2, lambda: pickle.dumps(gpt2))
    forward = generate_and(gpt2, lambda: pickle.loads(pickle.dumps(activations(gpt2)[0].forward)))
    assert not isinstance(forward, FasterForward) and forward.__func__ is NewGELUActivation.forward
    with torch.no_grad():
        assert torch.equal(twin(**padded(9)).logits, gpt2(**padded(9)).logits)


def test_a_forward_of_user_code_stays(gpt2):
    module = activations(gpt2)[0]
    forward = module.forward = lambda states: NewGELUActivation.forward(module, states)
    generate_and(gpt2, lambda: None)
    assert vars(module)["forward"] is forward


def test_a_model_compiles_in_one_graph_in_and_outside_generate(gpt2):
    inputs = padded(9, 5)
    with torch.no_grad():
        expected = gpt2(**inputs).logits

    def compiled_logits():
        torch._dynamo.reset()
        with torch.no_grad():
            return torch.compile(gpt2.forward, backend="eager", fullgraph=True)(**inputs).logits

    torch.testing.assert_close(compiled_logits(), expected)
    torch.testing.assert_close(generate_and(gpt2, compiled_logits), expected)


@pytest.mark.parametrize("how", ("forward", "part", "static cache"))
def test_models_that_are_compiled_or_will_be_are_left_alone(gpt2, how):
    if how == "forward":
        gpt2.forward = torch.compile(gpt2.forward, backend="eager", fullgraph=True)
    elif how == "part":
        gpt2.transformer.h[0].mlp.compile(backend="eager", fullgraph=True)
    arguments = {"max_new_tokens": 2, "do_sample": False}
    if how == "static cache":
        arguments["generation_config"] = GenerationConfig(cache_implementation="static", pad_token_id=1)
    with fastgen.disabled():
        expected = gpt2.generate(**padded(9, 5), **arguments)
    assert torch.equal(gpt2.generate(**padded(9, 5), **arguments), expected)
    assert not fastgen.explain().kernels
