"""Changes by user code, for the comparison fuzzer: to the model within or between calls, and to the host's helpers.

Each function of `PROGRAMS` gets random numbers, a copy of a model that it may change, and `generate`; it returns all
that user code sees. The fuzzer calls it twice, without fastgen and with it, from the same random numbers.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import torch
from own_models import OddModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import fastgen

Generate = Callable[..., Any]
Change = Callable[[Random, nn.Module], None]


def steered(states: Tensor) -> Tensor:
    """Multiplies each row by another number, so that fewer rows give other results."""
    return states * torch.linspace(0.7, 1.3, states.shape[0]).view(-1, *[1] * (states.dim() - 1)).to(states.dtype)


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]


def _others(random: Random, weight: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    return weight.detach() * (1 + 0.3 * torch.randn(weight.shape, generator=generator))


def _weight(random: Random, model: nn.Module) -> nn.Parameter:
    return random.choice([parameter for parameter in model.parameters() if parameter.dim() == 2])


def weight_in_place(random: Random, model: nn.Module) -> None:
    weight = _weight(random, model)
    with torch.no_grad():
        weight.copy_(_others(random, weight))


def weight_through_data(random: Random, model: nn.Module) -> None:
    weight = _weight(random, model)
    weight.data.copy_(_others(random, weight))


def other_weight_data(random: Random, model: nn.Module) -> None:
    weight = _weight(random, model)
    weight.data = _others(random, weight)


def other_parameter(random: Random, model: nn.Module) -> None:
    module = random.choice([module for module in model.modules() if "weight" in module._parameters])
    module.weight = nn.Parameter(_others(random, module.weight))


def other_module(random: Random, model: nn.Module) -> None:
    if linears := _linears(model):
        name, linear = random.choice(linears)
        other = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
        other.load_state_dict({key: _others(random, value) for key, value in linear.state_dict().items()})
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, other)


def other_forward(random: Random, model: nn.Module) -> None:
    if linears := _linears(model):
        module = random.choice(linears)[1]
        original = module.forward
        module.forward = lambda states: steered(original(states))


def forward_hook(random: Random, model: nn.Module) -> None:
    if linears := _linears(model):
        random.choice(linears)[1].register_forward_hook(lambda module, args, output: steered(output))


def forward_pre_hook(random: Random, model: nn.Module) -> None:
    if linears := _linears(model):
        random.choice(linears)[1].register_forward_pre_hook(lambda module, args: (steered(args[0]),))


def training_mode(random: Random, model: nn.Module) -> None:
    model.train()


def other_activation(random: Random, model: nn.Module) -> None:
    """Sets a plain function, as user code does."""
    names = ("act", "act_fn", "activation_fn", "activation", "intermediate_act_fn")
    places = [(module, name) for module in model.modules() for name in names if callable(getattr(module, name, None))]
    if places:
        module, name = random.choice(places)
        module._modules.pop(name, None)
        setattr(module, name, lambda states: steered(functional.gelu(states)))


def attention_scale(random: Random, model: nn.Module) -> None:
    modules = [module for module in model.modules() if isinstance(getattr(module, "scaling", None), float)]
    if modules:
        random.choice(modules).scaling *= 1.7


def adapter(random: Random, model: nn.Module) -> None:
    from peft import LoraConfig

    if not getattr(model, "_hf_peft_config_loaded", False):
        with contextlib.suppress(ValueError):  # peft raises it for some models
            model.add_adapter(LoraConfig(target_modules="all-linear", init_lora_weights=False))
    elif random.random() < 0.5:
        model.disable_adapters()
    else:
        model.enable_adapters()


CHANGES: tuple[Change, ...] = (
    weight_in_place,
    weight_through_data,
    other_weight_data,
    other_parameter,
    other_module,
    other_forward,
    forward_hook,
    forward_pre_hook,
    training_mode,
    other_activation,
    attention_scale,
    adapter,
)


class _AtStep:
    """Calls `change` when the step of this number begins."""

    def __init__(self, change: Callable[[], None], step: int) -> None:
        self.change, self.left = change, step

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.change()


class _Processor(_AtStep, LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.count()
        return scores


class _Criterion(_AtStep, StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.count()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class _Streamer(_AtStep, BaseStreamer):
    def put(self, value: Tensor) -> None:
        self.count()

    def end(self) -> None:
        pass


class _Prefix(_AtStep):
    """Is asked for each row, or once for equal ones; changes the model as soon as the rows are longer than at first."""

    def __call__(self, batch_id: int, input_ids: Tensor) -> list[int]:
        if self.left > 0:
            self.left -= input_ids.shape[0] != getattr(self, "length", input_ids.shape[0])
            self.length = input_ids.shape[0]
            if self.left == 0:
                self.change()
        return list(range(2, 99))


USER_CODE: dict[str, Callable[[Callable[[], None], int], dict[str, Any]]] = {
    "processor": lambda change, step: {"logits_processor": [_Processor(change, step)]},
    "criterion": lambda change, step: {"stopping_criteria": [_Criterion(change, step)]},
    "prefix function": lambda change, step: {"prefix_allowed_tokens_fn": _Prefix(change, step)},
    "streamer": lambda change, step: {"streamer": _Streamer(change, step)},
}


def changes_in_a_call(random: Random, model: nn.Module, generate: Generate) -> Any:
    """One call that captures what may be captured, one in which user code changes the model, one after it."""
    if random.random() < 0.2:
        adapter(random, model)
    changes, step = random.sample(CHANGES, random.choice((1, 1, 2))), random.choice((1, 2, 3, 5))
    kind = random.choice(tuple(USER_CODE))

    def change() -> None:
        for apply in changes:
            apply(random, model)

    arguments = USER_CODE[kind](change, min(step, 2) if kind == "prefix function" else step)
    before = generate(model) if random.random() < 0.7 else None
    within = generate(model, **arguments)
    model.eval()
    return before, within, generate(model)


def changes_between_calls(random: Random, model: nn.Module, generate: Generate) -> Any:
    outputs = [generate(model)]
    for _ in range(2):
        random.choice(CHANGES)(random, model)
        outputs.append(generate(model))
    return outputs


def kept_prefix(random: Random, model: nn.Module, generate: Generate) -> Any:
    """Calls that begin alike, on a model that changes between some of them."""
    outputs = []
    with fastgen.reusing_prefix(model):
        for seed in range(3):
            if random.random() < 0.25:
                random.choice(CHANGES)(random, model)
            outputs.append(generate(model, edit=functools.partial(_other_ending, Random(random.random() + seed))))
    return outputs


def _other_ending(random: Random, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns these inputs with other last tokens, or of the first row only."""
    if "input_ids" not in inputs:
        return inputs
    rows, length = inputs["input_ids"].shape
    input_ids, changed = inputs["input_ids"].clone(), random.randint(0, length)
    input_ids[:, length - changed :] = torch.tensor([[random.randint(5, 90) for _ in range(changed)]]).long()
    count = random.choice((rows, rows, 1))
    shorter = {name: value[:count] if value.shape[0] == rows else value for name, value in inputs.items()}
    return {**shorter, "input_ids": input_ids[:count]}


HOOKED = ("__", "forward", "_init", "init_", "get_", "set_", "post_init", "_can_", "_supports")


def _places(model: nn.Module) -> list[tuple[Any, str]]:
    """Returns functions of torch and of the model's modeling files, and methods of its classes that are no forward."""
    classes = {type(module) for module in model.modules() if "modeling" in type(module).__module__}
    files = {sys.modules[cls.__module__] for cls in classes}
    return [(functional, "linear"), (functional, "scaled_dot_product_attention")] + [
        (owner, name)
        for owner in sorted(classes | files, key=str)
        for name, value in sorted(vars(owner).items())
        if isinstance(value, types.FunctionType)
        and (value.__module__ or "").startswith("transformers.")
        and not name.startswith(HOOKED)
    ]


def _steered_where_it_may(value: Any) -> Any:
    if type(value) is tuple:
        return (*map(_steered_where_it_may, value[:1]), *value[1:])
    has_rows = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and value.shape[0] > 1
    return steered(value) if has_rows else value


def replaced_helper(random: Random, model: nn.Module, generate: Generate) -> Any:
    """Replaces a function of the host by one that notes what it sees, and may treat rows differently.

    In a class of user code it sees more: before its first use fastgen repeats the first steps of the call.
    """
    before = generate(model) if random.random() < 0.5 else None
    (owner, name), seen, steers = random.choice(_places(model)), [], random.random() < 0.6
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        seen.append([list(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)])
        return _steered_where_it_may(result) if steers else result

    replacement = functools.wraps(original)(replaced) if random.random() < 0.5 else replaced
    with mock.patch.object(owner, name, replacement):
        within = generate(model)
    return before, within, [] if isinstance(model, OddModel) else seen, generate(model)


def add_not_finite(random: Random, weight: nn.Parameter) -> None:
    """Puts NaN or infinite numbers into a weight, or a huge one: of several, rounding would decide the sum."""
    numbers = weight.data.view(-1)
    number = random.choice((torch.nan, torch.inf, -torch.inf, 1e30))
    count = 1 if number == 1e30 else min(random.choice((1, 5, len(numbers))), len(numbers))
    numbers[random.sample(range(len(numbers)), count)] = number


def weights_that_are_not_finite(random: Random, model: nn.Module, generate: Generate) -> Any:
    for _ in range(random.choice((1, 2))):
        add_not_finite(random, random.choice(list(model.parameters())))
    return generate(model)


PROGRAMS: dict[str, Callable[[Random, nn.Module, Generate], Any]] = {
    "changes in a call": changes_in_a_call,
    "changes between calls": changes_between_calls,
    "kept prefix": kept_prefix,
    "replaced helper": replaced_helper,
    "weights that are not finite": weights_that_are_not_finite,
}
