"""Code of the program inside a library model, around a generate and in its processors: still the right answer."""

from __future__ import annotations

import functools
import types

import pytest
import torch
import wrapt
from accelerate import hooks as accelerate_hooks
from parity import (
    BEAMS,
    PROMPT,
    SAMPLES,
    assert_same,
    is_shared,
    left_alone_because,
    moves_rows,
    run_both,
    tiny,
    token_ids,
)
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fastgen.ops import cpu_linear
from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.decoding.faster_forwards import faster_forwards, linears
from fastgen.testing import force


@pytest.fixture(autouse=True)
def everywhere(share_always):
    with force(cpu_linear.ONEDNN):
        yield


class Steering(nn.Module):
    """Adds another vector to each row."""

    def __init__(self, inner: nn.Module, rows: int) -> None:
        super().__init__()
        self.inner, self.vectors = inner, torch.randn(rows, 1, 32)

    def forward(self, states):
        return self.inner(states) + self.vectors


@pytest.mark.parametrize(("arguments", "rows"), [(BEAMS, 6), (SAMPLES, 8)], ids=("beams", "samples"))
@pytest.mark.parametrize("way", ["module", "forward"])
def test_code_of_the_program_that_knows_its_rows_is_left_alone(arguments, rows, way):
    model = tiny("llama")
    layer = model.model.layers[0]
    steering = Steering(layer.mlp, rows).eval()
    if way == "module":
        layer.mlp = steering
    else:
        inner = layer.mlp.forward
        layer.mlp.forward = lambda states: inner(states) + steering.vectors
    report = assert_same(model, {"input_ids": token_ids(2, 9)}, **arguments)
    assert left_alone_because(report, "USER_CODE")


def wrapped(module: nn.Module) -> None:
    original = module.forward

    @functools.wraps(original)  # gives it the name and the module of what it wraps
    def forward(*args, **kwargs):
        return steered(original(*args, **kwargs))

    module.forward = forward


def partial(module: nn.Module) -> None:
    def forward(original, *args, **kwargs):
        return steered(original(*args, **kwargs))

    module.forward = functools.update_wrapper(functools.partial(forward, module.forward), module.forward)


def bound(module: nn.Module) -> None:
    original = module.forward

    def forward(self, *args, **kwargs):
        return steered(original(*args, **kwargs))

    module.forward = types.MethodType(functools.wraps(original)(forward), module)


def decorated(module: nn.Module) -> None:
    original = module.forward
    module.forward = torch.no_grad()(lambda *args, **kwargs: steered(original(*args, **kwargs)))


def proxied(module: nn.Module) -> None:
    module.forward = wrapt.FunctionWrapper(
        module.forward, lambda original, instance, args, kwargs: steered(original(*args, **kwargs))
    )


class Forward:
    """An object that says that it is what it wraps."""

    def __init__(self, original) -> None:
        self.original = original
        functools.update_wrapper(self, original)

    def __call__(self, *args, **kwargs):
        return steered(self.original(*args, **kwargs))


def replaced_by_an_object(module: nn.Module) -> None:
    module.forward = Forward(module.forward)


def hooked(module: nn.Module) -> None:
    accelerate_hooks.add_hook_to_module(module, SteeringHook(), append=True)


def hooked_first_of_several(module: nn.Module) -> None:
    hooked(module)
    for _ in range(2):
        accelerate_hooks.add_hook_to_module(module, accelerate_hooks.ModelHook(), append=True)


def hooked_over_a_wrapped_forward(module: nn.Module) -> None:
    wrapped(module)
    accelerate_hooks.add_hook_to_module(module, accelerate_hooks.ModelHook())


class SteeringHook(accelerate_hooks.ModelHook):
    def post_forward(self, module, output):
        return steered(output)


def steered(output):
    """Another vector added to each of the 8 rows of a layer, or of the logits of a model."""
    if isinstance(output, torch.Tensor):
        return output + torch.linspace(-1, 1, 8 * output.shape[-1]).view(8, 1, -1)
    output.logits = steered(output.logits)
    return output


WAYS = (
    wrapped,
    partial,
    bound,
    decorated,
    proxied,
    replaced_by_an_object,
    hooked,
    hooked_first_of_several,
    hooked_over_a_wrapped_forward,
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["", "model.layers.0", "model.layers.1.mlp.down_proj"])
def test_forward_that_the_program_replaced_sees_all_rows(way, place):
    model = tiny("llama")
    way(model.get_submodule(place))
    report = assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES)
    assert not report.shared and not {"USER_CODE", "HOOKS"}.isdisjoint(report.codes())


def test_forward_that_the_program_replaced_on_the_class_sees_all_rows(monkeypatch):
    model = tiny("llama")
    kind = type(model.model.layers[0].mlp)
    original = kind.forward
    monkeypatch.setattr(
        kind, "forward", functools.wraps(original)(lambda self, states: steered(original(self, states)))
    )
    report = assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES)
    assert left_alone_because(
        report, "USER_CODE", "transformers.models.llama.modeling_llama.LlamaMLP.forward is not the library's"
    )


class SteeringMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        return steered(output) if func is functional.silu else output


def test_mode_of_the_program_sees_all_rows():
    model = tiny("llama")

    def call():
        with SteeringMode():
            return model.generate(token_ids(2, 9), **SAMPLES)

    both = run_both(call)
    assert torch.equal(both.stock, both.fast)
    assert left_alone_because(both.report, "TORCH_MODE")


def test_hooks_of_accelerate_itself_change_nothing():
    model = tiny("llama")
    accelerate_hooks.add_hook_to_module(model.model.layers[0], accelerate_hooks.AlignDevicesHook())
    assert is_shared(assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES), PROMPT)


def test_rows_moved_from_input_to_input():
    model = tiny("llama")
    both = run_both(lambda: model.generate(token_ids(2, 9), custom_generate=moves_rows, **SAMPLES))
    torch.testing.assert_close(both.fast, both.stock, atol=1e-4, rtol=1e-4)
    assert is_shared(both.report)


def test_torchscript_inside_a_model():
    model = tiny("llama")
    model.model.layers[0].mlp = torch.jit.script(nn.Linear(32, 32).eval())
    assert left_alone_because(assert_same(model, {"input_ids": token_ids(2, 9)}, **BEAMS), "USER_CODE", "TorchScript")


ROWS, WEIGHT, BIAS = torch.randn(8, 64), torch.randn(48, 64), torch.randn(96)


def assert_multiplied(
    weight: torch.Tensor, bias: torch.Tensor | None = None, through=lambda module: module(ROWS)
) -> None:
    """Through an `nn.Linear`, while it has fastgen's forward and afterwards."""
    module = nn.Linear(64, 48, bias=bias is not None)
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    with torch.no_grad():
        with generate_call("test") as call, faster_forwards(call, {module: module.modules()}, linears()):
            found = through(module)
        expected = through(module)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_odd_products_are_those_of_torch():
    assert_multiplied(WEIGHT, BIAS[::2])
    assert_multiplied(WEIGHT, BIAS[:1].expand(48))
    assert_multiplied(WEIGHT.flatten().as_strided((48, 64), (3, 1)))
    assert_multiplied(WEIGHT.to_sparse_csr())
    assert_multiplied(WEIGHT, through=lambda module: module(input=ROWS))
    assert_multiplied(WEIGHT, through=lambda module: torch.func.jvp(module, (ROWS,), (ROWS,))[1])
    assert_multiplied(WEIGHT, through=lambda module: torch.func.vmap(module)(ROWS.view(2, 4, 64)))
    assert_multiplied(WEIGHT, through=lambda module: torch.jit.trace(module, ROWS, check_trace=False)(ROWS))


def test_products_under_a_mode_of_the_program_are_seen_by_it():
    model = tiny("llama")

    def count() -> int:
        with FlopCounterMode(display=False) as counter:
            model.generate(token_ids(2, 9), max_new_tokens=3)
        return counter.get_total_flops()

    both = run_both(count)
    assert both.stock == both.fast
