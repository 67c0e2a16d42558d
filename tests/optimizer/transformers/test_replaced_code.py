"""User code that replaces the library's, around a generate or in its steps, sees the rows that it would see there."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import hooks
import pytest
import torch
from accelerate import hooks as accelerate_hooks
from fuzz_changes import steered as steered_rows
from hooks import force
from parity import assert_same, run_both, same_tokens
from reports import PROMPT, capturing, is_shared, left_alone_because, replays
from tiny_models import BEAMS, SAMPLES, tiny, token_ids
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.llama import modeling_llama

import fastgen
from fastgen.ops import cpu_linear
from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.decoding.faster_forwards import faster_forwards, linears

INPUTS = {"input_ids": token_ids(2, 9)}
ROWS = (6, 8)  # of two inputs with `BEAMS` and with `SAMPLES`


@pytest.fixture(autouse=True)
def everywhere(share_always):
    with capturing(), force(cpu_linear.ONEDNN):
        yield


def steered(output: Any) -> Any:
    """Multiplies rows by different numbers, if there are as many as in the library; in a tuple, its first item."""
    if isinstance(output, tuple):
        return (steered(output[0]), *output[1:])
    if isinstance(output, torch.Tensor):
        return steered_rows(output) if len(output) in ROWS else output
    output.logits = steered(output.logits)
    return output


def steering(original: Callable) -> Callable:
    return lambda *args, **kwargs: steered(original(*args, **kwargs))


# Replacements of a function, a method or the forward of one module; other forms: tests/test_provenance.py.


class Descriptor:
    """A method that is no function."""

    def __init__(self, original: Any) -> None:
        self.function = steering(original)

    def __get__(self, module: Any, kind: type) -> Any:
        return functools.partial(self.function, module)


REPLACEMENTS: dict[str, Callable[[Callable], Any]] = {
    "function": steering,
    "wrapper": lambda original: functools.wraps(original)(steering(original)),  # has the name of what it wraps
    "mock": lambda original: mock.Mock(wraps=steering(original)),
}


# Places in files and classes of the library and of torch: architecture, owner, name, replacement.


LLAMA, MLP, NEO = ("llama", {}), modeling_llama.LlamaMLP, modeling_gpt_neo.GPTNeoSelfAttention
EAGER, ROTARY = ("llama", {"attn_implementation": "eager"}), "apply_rotary_pos_emb"
PLACES: list[tuple[tuple[str, dict[str, Any]], Any, str, Callable]] = [
    *((EAGER, modeling_llama, name, steering) for name in (ROTARY, "rotate_half", "repeat_kv")),
    (EAGER, modeling_llama, "eager_attention_forward", steering),
    (LLAMA, modeling_llama, ROTARY, REPLACEMENTS["mock"]),
    (LLAMA, functional, "scaled_dot_product_attention", steering),
    (("codegen", {"rotary_dim": 4}), functional, "softmax", steering),  # called by an `nn.Softmax` that each step makes
    *((LLAMA, MLP, "forward", REPLACEMENTS[how]) for how in ("function", "wrapper")),
    (LLAMA, MLP, "forward", Descriptor),
    (LLAMA, MLP, "forward", lambda original: functools.partialmethod(steering(original))),
    (LLAMA, MLP, "__call__", steering),  # which the class inherits
    (("gpt_neo", {"attention_types": [[["global"], 2]]}), NEO, "_attn", steering),
]


@pytest.mark.parametrize("before", [False, True], ids=("first use", "after calls"))
@pytest.mark.parametrize(
    ("model", "owner", "name", "replacement"), PLACES, ids=lambda value: getattr(value, "__name__", None)
)
def test_code_that_replaces_the_librarys_sees_all_rows(monkeypatch, model, owner, name, replacement, before):
    model = tiny(model[0], **model[1])
    if before:
        assert is_shared(assert_same(model, INPUTS, **SAMPLES))
    monkeypatch.setattr(owner, name, replacement(getattr(owner, name)))
    assert_left_alone(model, name)
    monkeypatch.undo()
    with capturing():
        assert is_shared(assert_same(model, INPUTS, **SAMPLES))


def assert_left_alone(model: Any, name: str) -> None:
    report = assert_same(model, INPUTS, **SAMPLES)
    assert left_alone_because(report, "USER_CODE", name)
    assert not replays(same_tokens(model, INPUTS, **BEAMS | {"max_new_tokens": 40}))


# Places in one model.


@pytest.mark.parametrize("how", REPLACEMENTS)
@pytest.mark.parametrize("place", ["", "model.layers.0", "model.layers.1.mlp.down_proj"])
def test_the_forward_of_one_module_sees_all_rows(how, place):
    model = tiny("llama")
    module = model.get_submodule(place)
    module.forward = REPLACEMENTS[how](module.forward)
    assert not assert_same(model, INPUTS, **SAMPLES).shared
    assert "USER_CODE" in fastgen.explain().codes()


def method_of_one_module(model: Any) -> str:
    attention = model.model.layers[0].self_attn
    attention.q_proj._call_impl = steering(attention.q_proj._call_impl)
    return "_call_impl of module model.layers.0.self_attn.q_proj"


def activation(model: Any) -> str:
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = steering(functional.silu)
    return "act_fn of module model.layers.1.mlp"


def user_module(model: Any) -> str:
    class Inner(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return steered(self.inner(states))

    model.model.layers[0].mlp = Inner(model.model.layers[0].mlp).eval()
    return "Inner"


def torchscript(model: Any) -> str:
    model.model.layers[0].mlp = torch.jit.script(nn.Linear(32, 32).eval())
    return "TorchScript"


@pytest.mark.parametrize("put_in", [method_of_one_module, activation, user_module, torchscript])
def test_user_code_in_one_model_sees_all_rows(put_in):
    model = tiny("llama")
    assert_left_alone(model, put_in(model))


class SteeringHook(accelerate_hooks.ModelHook):
    def post_forward(self, module, output):
        return steered(output)


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("place", ["", "model.layers.0", "model.layers.1.mlp.down_proj"])
def test_hooks_of_accelerate_by_user_code_see_all_rows(place, is_wrapped, others):
    model = tiny("llama")
    module = model.get_submodule(place)
    if is_wrapped:
        module.forward = REPLACEMENTS["wrapper"](module.forward)
    else:
        accelerate_hooks.add_hook_to_module(module, SteeringHook(), append=True)
    for _ in range(others + is_wrapped):
        accelerate_hooks.add_hook_to_module(module, accelerate_hooks.ModelHook(), append=True)
    assert not assert_same(model, INPUTS, **SAMPLES).shared
    assert not {"USER_CODE", "HOOKS"}.isdisjoint(fastgen.explain().codes())


def test_hooks_of_accelerate_itself_change_nothing():
    model = tiny("llama")
    accelerate_hooks.add_hook_to_module(model.model.layers[0], accelerate_hooks.AlignDevicesHook())
    assert is_shared(assert_same(model, INPUTS, **SAMPLES), PROMPT)


def test_user_code_outside_of_the_forward_changes_nothing(monkeypatch):
    model = tiny("llama")
    generate = model.generate
    model.generate = lambda *args, **kwargs: generate(*args, **kwargs)
    save = type(model).save_pretrained
    monkeypatch.setattr(type(model), "save_pretrained", lambda *args, **kwargs: save(*args, **kwargs))
    assert is_shared(assert_same(model, INPUTS, **SAMPLES))
    with hooks.watched("walk through a model") as walks:
        assert is_shared(assert_same(model, INPUTS, **SAMPLES))
    assert not walks


def test_compiled_code_changes_nothing_for_other_models():
    """torch.compile puts its functions into the files that the code it compiles is from."""
    compiled = torch.compile(modeling_llama.rotate_half, backend="eager")
    compiled(torch.ones(1, 4))
    assert any(name.startswith("__compiled") for name in vars(modeling_llama))
    assert is_shared(assert_same(tiny("llama"), INPUTS, **SAMPLES), PROMPT)


# What user code sees, call by call.


@pytest.mark.parametrize("name", ["create_causal_mask", "eager_attention_forward"])
def test_replaced_functions_are_called_in_every_step(monkeypatch, name):
    original, seen = getattr(modeling_llama, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        tensors = [*args, *kwargs.values()]
        seen.append([list(value.shape) for value in tensors if isinstance(value, torch.Tensor)])
        return output

    model = tiny("llama", attn_implementation="eager")
    monkeypatch.setattr(modeling_llama, name, counting)
    arguments = {"num_beams": 4, "max_new_tokens": 60, "min_new_tokens": 60}
    for _ in range(2):
        both = run_both(lambda: (model.generate(token_ids(2, 9), **arguments), seen.copy(), seen.clear())[:2])
        assert torch.equal(both.stock[0], both.fast[0])
        assert both.stock[1] == both.fast[1] and len(both.fast[1]) >= 60


@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True}], ids=("greedy", "samples"))
def test_a_call_method_of_one_model_is_called(arguments):
    model = tiny("llama")

    def call_of_model(*args: Any, **kwargs: Any) -> Any:
        outputs = type(model).__call__(model, *args, **kwargs)
        outputs.logits = outputs.logits.roll(1, -1)
        return outputs

    vars(model)["__call__"] = call_of_model
    arguments |= {"max_new_tokens": 20, "eos_token_id": list(range(3, 90, 6))}
    stock, fast, report = run_both(lambda: model.generate(token_ids(3, 9), **arguments))
    assert torch.equal(stock, fast) and "METHOD_REPLACED" in report.codes()


class SteeringMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        return steered(output) if func is functional.silu else output


def test_torch_modes_of_user_code_see_rows_and_products():
    model = tiny("llama")

    def call(arguments: dict[str, Any], mode: Any) -> Any:
        with mode:
            return model.generate(**INPUTS, **arguments), mode

    both = run_both(lambda: call(SAMPLES, SteeringMode()))
    assert torch.equal(both.stock[0], both.fast[0]) and left_alone_because(both.report, "TORCH_MODE")
    both = run_both(lambda: call({"max_new_tokens": 3}, FlopCounterMode(display=False)))
    assert both.stock[1].get_total_flops() == both.fast[1].get_total_flops() > 0


def test_beams_are_the_same_with_half_precision_by_default():
    model, default = tiny("llama"), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        stock, fast, _ = run_both(lambda: model.generate(**INPUTS, **BEAMS))
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(stock, fast)


STATES, WEIGHT, BIAS = torch.randn(8, 64), torch.randn(48, 64), torch.randn(96)
PRODUCTS: dict[str, tuple[torch.Tensor, torch.Tensor | None, Callable]] = {
    "every second of a bias": (WEIGHT, BIAS[::2], lambda module: module(STATES)),
    "one bias for all": (WEIGHT, BIAS[:1].expand(48), lambda module: module(STATES)),
    "rows that overlap": (WEIGHT.flatten().as_strided((48, 64), (3, 1)), None, lambda module: module(STATES)),
    "sparse": (WEIGHT.to_sparse_csr(), None, lambda module: module(STATES)),
    "by name": (WEIGHT, None, lambda module: module(input=STATES)),
    "jvp": (WEIGHT, None, lambda module: torch.func.jvp(module, (STATES,), (STATES,))[1]),
    "vmap": (WEIGHT, None, lambda module: torch.func.vmap(module)(STATES.view(2, 4, 64))),
    "trace": (WEIGHT, None, lambda module: torch.jit.trace(module, STATES, check_trace=False)(STATES)),
}


@pytest.mark.parametrize("what", PRODUCTS)
def test_odd_products_are_those_of_torch(what):
    """Compares an `nn.Linear` with fastgen's forward and without it."""
    weight, bias, through = PRODUCTS[what]
    module = nn.Linear(64, 48, bias=bias is not None)
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    with torch.no_grad():
        with generate_call("test") as call, faster_forwards(call, {module: module.modules()}, linears()):
            product = through(module)
        torch.testing.assert_close(product, through(module), atol=1e-4, rtol=1e-5)
