"""Many calls of `generate` on a few models that change between the calls, with fastgen and without.

    python tests/helpers/soak.py --calls 2000        # as `make soak`

Nothing that fastgen keeps of a model may be stale, and nothing may grow. Weights are written in every possible way,
replaced, loaded, and given adapters; for single calls some are not finite, a module has a hook or another forward, or a
function of the host is replaced. Products go through oneDNN, and many steps are captured. Prints each difference with
its seed, and what lives at the end. Exit status 1 where anything differed or grew.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random

import torch
import transformers
from fuzz import compare
from fuzz_cases import draw, model_of
from fuzz_changes import add_not_finite, replaced, steered
from peft import LoraConfig
from torch import Tensor, nn
from versions import has_peft

from fastgen.ops import cpu_linear
from fastgen.testing import ANY_SIZE, costs, force

MODELS = ("gpt2", "llama", "bart", "t5", "mistral", "marian")
CONTEXTS = (
    "plain",
    "inference mode",
    "poisoned memory",
    "repeated keys",
    "keys written in place",
    "default gates",
    "captured",
)
WITH_ADAPTERS = ("gpt2", "llama") if has_peft() else ()

# What lives after the first part of the calls may grow by so much: other prompts, other reports.
SLACK = 1 << 20

Change = Callable[[nn.Module, str, Tensor], None]


def in_place(model: nn.Module, name: str, values: Tensor) -> None:
    with torch.no_grad():
        model.get_parameter(name).copy_(values)


def through_data(model: nn.Module, name: str, values: Tensor) -> None:
    model.get_parameter(name).data.copy_(values)


def other_data(model: nn.Module, name: str, values: Tensor) -> None:
    model.get_parameter(name).data = values


def loaded(model: nn.Module, name: str, values: Tensor) -> None:
    model.load_state_dict({name: values}, strict=False)


def other_parameter(model: nn.Module, name: str, values: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(values))


CHANGES: tuple[Change, ...] = (in_place, through_data, other_data, loaded, other_parameter)


@dataclass
class Soak:
    """counts: of verdicts. live: bytes of all tensors after a quarter of the calls, and at the end."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    live: list[int] = field(default_factory=list)

    @property
    def has_grown(self) -> bool:
        return self.live[-1] > self.live[0] + SLACK


def soak(calls: int, first: int = 0) -> Soak:
    """So many calls from this seed on; all models are built and have their adapters before the first."""
    result, random = Soak(), Random(first)
    originals = {name: _with_adapter(name) for name in MODELS}
    seeds = (seed for seed in count(first) if _fits(seed))
    with onednn():
        for done in range(calls):
            case = draw(next(seeds))
            model = model_of(case.name, torch.float32)
            _change(random, model, originals[case.name], case.name in WITH_ADAPTERS)
            with _for_one_call(random, model):
                outcome = compare(case)
            result.counts[f"{outcome.verdict}, {'shared' if outcome.shared else 'left alone'}"] += 1
            if outcome.verdict in ("different", "tie"):
                result.differences.append(f"{outcome.verdict}: {case}\n    {outcome.detail}")
                print(result.differences[-1], flush=True)
            if done + 1 in (calls // 4, calls):
                result.live.append(live_bytes())
    return result


def _fits(seed: int) -> bool:
    case = draw(seed)
    return case.name in MODELS and case.context in CONTEXTS


def _with_adapter(name: str) -> dict[str, Tensor]:
    """The weights of this model as they are at first; gives it an adapter, if that is wanted, which is switched off."""
    model = model_of(name, torch.float32)
    if name in WITH_ADAPTERS and not getattr(model, "_hf_peft_config_loaded", False):
        model.add_adapter(LoraConfig(target_modules="all-linear", init_lora_weights=False))
        model.eval().disable_adapters()
    return {key: weight.detach().clone() for key, weight in model.named_parameters()}


def _change(random: Random, model: nn.Module, originals: dict[str, Tensor], has_adapter: bool) -> None:
    """Changes two weights, and sometimes whether the adapter is used."""
    for name in random.sample(sorted(originals), 2):
        if name in dict(model.named_parameters()):
            generator = torch.Generator().manual_seed(random.randrange(1 << 30))
            noise = torch.randn(originals[name].shape, generator=generator)
            random.choice(CHANGES)(model, name, originals[name] * (1 + 0.3 * noise))
    if has_adapter and random.random() < 0.2:
        random.choice((model.enable_adapters, model.disable_adapters))()
    model.eval()


@contextmanager
def _for_one_call(random: Random, model: nn.Module) -> Iterator[None]:
    """Sometimes changes the model, or what its host's code calls, and undoes it."""
    linear = random.choice([module for module in model.modules() if type(module) is nn.Linear])
    with ExitStack() as stack:
        change = random.choice(("none", "none", "none", "not finite", "hook", "forward", "helper"))
        if change == "not finite":
            weight = random.choice([parameter for parameter in model.parameters() if parameter.is_contiguous()])
            before = weight.detach().clone()
            stack.callback(lambda: weight.data.copy_(before))
            add_not_finite(random, weight)
        elif change == "hook":
            stack.callback(linear.register_forward_hook(lambda module, args, output: steered(output)).remove)
        elif change == "forward":
            original = linear.forward
            linear.forward = lambda states: steered(original(states))
            stack.callback(delattr, linear, "forward")
        elif change == "helper":
            stack.enter_context(replaced(random, model, []))
        yield


@contextmanager
def onednn() -> Iterator[None]:
    """Every product goes through oneDNN."""
    with force(cpu_linear.ONEDNN), costs(**ANY_SIZE):
        yield


def live_bytes() -> int:
    """What all tensors that Python knows of hold in memory."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.layout == torch.strided:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default: 0)")
    parser.add_argument("--calls", type=int, default=2000, metavar="N", help="default: 2000")
    arguments = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = soak(arguments.calls, arguments.first)
    for verdict, number in result.counts.most_common():
        print(f"{number:7} {verdict}")
    print("tensors: {:,} bytes after a quarter of the calls, {:,} at the end".format(*result.live))
    return int(result.has_grown or any(line.startswith("different") for line in result.differences))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
