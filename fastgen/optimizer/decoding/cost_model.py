"""Cost model: the seconds that parts of a call take, which decide what is worthwhile; never affects results.

    size_of(model)           ModelSize: modules and weights
    size.step(rows)          the `Work` of a decode step; other modules make a `Work` of their own
    costs.seconds(work)      by the rates of the device

Each decision is taken in the module that it concerns. It compares what is saved with what is added: by `saves`, or by
`pays` where FASTGEN_SHARE can force the answer. Decisions about prefills go by a CPU's rates on all devices: on a GPU
the tokens take less time than the checks, and prompts are shared for the sake of the steps, which read them, and of the
memory.

A walk over all modules of a model takes milliseconds, as long as a tiny model takes for a token. So these decisions
come before anything that looks at the modules, and use `size_of`, which caches a model's size: it is measured again
only if the dtype or device of the first weight has changed.

The rates of a device are constants: those of a CPU, or of an H200 for each other device. Rates probed on a CPU decide
worse: the decisions compare its Python and the kernels of whole steps, about which single operations show little. On an
AMD EPYC (family 25, model 17) a launch takes 2 µs, and the second product of a shared prompt as long as 12 launches of
17 µs. With 2 µs for a launch, and for a module in proportion, 9 of 24 small calls were slower than stock by more than
3 %, with the constants none (benchmarks/small.py, seed 77).

Tests: tests/optimizer/decoding/test_cost_model.py
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from fastgen.config import CONFIG
from fastgen.ops import cpu_linear
from fastgen.optimizer.decoding.guards import KnownCode

_CPU = torch.device("cpu")
_MODULES_OF_CALL = 4  # a call of `generate` takes as much Python as this number of modules


@dataclass(frozen=True)
class DeviceRates:
    """The rates of a device.

    launch: seconds of the host to launch one of the kernels of a step; replayed_launch: seconds of the device for the
    same in a CUDA graph. module: seconds of the host for one module of a model in a forward, its launches included.
    bytes: bytes read in a second. multiply_adds: those of a matrix product in a second.
    """

    launch: float
    replayed_launch: float
    module: float
    bytes: float
    multiply_adds: float

    def __str__(self) -> str:
        launches = f"{self.launch * 1e6:.1f} µs a launch, {self.module * 1e6:.0f} µs a module"
        return f"{launches}, {self.bytes / 1e9:,.0f} GB/s, {self.multiply_adds / 1e9:,.0f} G multiply-adds/s"


# AMD EPYC (family 25, model 17), fp32, one thread: 37 G multiply-adds a second in a product of 1024 x 1024, 20 GB/s.
# Launches and modules are those that put the break-even of small calls and of shared prompts where it was measured.
CPU = DeviceRates(launch=16.8e-6, replayed_launch=16.8e-6, module=52.4e-6, bytes=20e9, multiply_adds=40e9)
# H200, torch 2.11 (docs/gpu-checks.md): 7.8 ms for a step of the 111 modules of Llama-8B with 8 layers; 70 µs of the
# host for the launches that a shared prompt adds to a layer, and 7.3 µs in a graph. Multiply-adds were not measured:
# they are two thirds of what the data sheet says for bf16.
GPU = DeviceRates(launch=5.6e-6, replayed_launch=0.583e-6, module=70e-6, bytes=3.43e12, multiply_adds=3.3e14)


class Work(NamedTuple):
    """What a part of a call does.

    modules: how many modules the host runs in Python; their launches are included. launches: other kernels, launched
    one by one; replayed: those in a graph. bytes: those that are read. multiply_adds: computed while the bytes are
    read, so that only the slower of the two counts.
    """

    modules: float = 0
    launches: float = 0
    replayed: float = 0
    bytes: float = 0
    multiply_adds: float = 0

    @property
    def without_modules(self) -> Work:
        """What a replay does."""
        return self._replace(modules=0)


@dataclass(frozen=True)
class ModelSize:
    """The size of a model.

    modules: their number. weights: elements of the weights that each token of a prefill is multiplied with.
    step_weights: the same for a decode step, with the output layer. large: elements of large weights for which oneDNN
    is an option, on a CPU. itemsize: bytes of an element of the first weight.
    """

    modules: int
    weights: int
    step_weights: int
    large: int
    itemsize: int

    def tokens(self, count: int) -> Work:
        """Returns what `count` tokens add to a prefill."""
        return Work(multiply_adds=self.weights * count)

    def step(self, rows: int, device: torch.device = _CPU) -> Work:
        """Returns a decode step of `rows` rows. On a CPU each number counts as one of fp32."""
        itemsize = 4 if device.type == "cpu" else self.itemsize
        return Work(self.modules, bytes=self.step_weights * itemsize, multiply_adds=self.step_weights * rows)


class CaptureCosts(NamedTuple):
    """What capturing a step takes, in eager steps, and how many forwards come before.

    new: for a new graph; existing: for the step that each call repeats. eager_forwards: forwards that run eagerly
    before a new graph, because many calls end early. least: calls with fewer steps are never captured.
    """

    new: float
    existing: float
    eager_forwards: int
    least: int


# Filling a static cache and repeating one step take the time of 1.7 steps; a replay saves 8 to 14 % of a step (AMD
# EPYC, family 26).
CPU_CAPTURES = CaptureCosts(new=3, existing=1, eager_forwards=8, least=24)
# A replay saves two thirds of a step, and a new graph takes as long as 12 eager steps (H200, Llama-8B with 8 layers):
# by these numbers that model is captured for 24 steps, and its graph replayed for 4.
GPU_CAPTURES = CaptureCosts(new=9.9, existing=1.6, eager_forwards=2, least=4)


class ForwardTimes:
    """Measured times of a model's forwards of one or several tokens, in calls of one kind.

    LEAST: fewer measurements are ignored. FAR_OFF: a measured time that is more than this many times the estimate
    replaces it.
    """

    LEAST = 3
    FAR_OFF = 1.5

    def __init__(self) -> None:
        # By rows, tokens per row, and how the forward ran (`path` of a step): the number of forwards, the shortest.
        self.seconds: dict[tuple[int, int, str], tuple[int, float]] = defaultdict(lambda: (0, math.inf))

    def add(self, rows: int, size: int, path: str, seconds: float) -> None:
        """Notes the time of a forward of `size` tokens per row."""
        count, shortest = self.seconds[rows, size, path]
        self.seconds[rows, size, path] = count + 1, min(shortest, seconds)

    def corrected(self, estimated: float, rows: int, size: int, path: str) -> float:
        """Returns what a forward takes, in steps of one token: the estimate, or what was measured if that is far more.

        With mixtures of experts, for example, more tokens read more experts.
        """
        (count, shortest), (singles, single) = self.seconds[rows, size, path], self.seconds[rows, 1, path]
        is_far_off = min(count, singles) >= self.LEAST and shortest > self.FAR_OFF * estimated * single
        return shortest / single if is_far_off else estimated


@dataclass(frozen=True)
class CostModel:
    """Converts `Work` to seconds, and holds the thresholds that first uses and tests replace.

    rates: those of all devices; None: those of a CPU, or of an H200 for each other device. Rates and thresholds are
    such that break-evens are where they were measured, on an AMD EPYC (family 25, model 17) and on an H200
    (docs/gpu-checks.md).

    share: overrides FASTGEN_SHARE.

    prefill_overhead: what a prefill with one row per input takes, as a part of the Python of a forward
    (benchmarks/small.py).

    min_elements_in_place: elements of keys, per layer, from which writing generated keys into a buffer is faster than
    copying all keys at every step (beams break even near 0.2 million, samples near 0.03 million, on a CPU).

    cpu_captures, gpu_captures: what a capture takes.

    min_large: the seconds of reading the large weights, as a part of those of the Python of a forward, from which on a
    microsecond for every call of torch does not matter; for a call of one step four times as much.

    min_computed: a step that computes for a smaller part of what its Python takes gets no drafts: then several tokens
    take longer than one (the demo model, AMD EPYC, family 25, model 17: 4 take 1.7 steps).

    min_leaving: the fraction of rows that must be finished for a batch to be compacted. min_steps_expected: the number
    of further steps that must be expected then.
    """

    rates: DeviceRates | None = None
    share: bool | None = None
    prefill_overhead: float = 0.5
    min_elements_in_place: int = 1 << 17
    cpu_captures: CaptureCosts = CPU_CAPTURES
    gpu_captures: CaptureCosts = GPU_CAPTURES
    min_large: float = 0.25
    min_computed: float = 0.25
    min_leaving: float = 1 / 8
    min_steps_expected: int = 8

    @property
    def shares(self) -> bool | None:
        """Whether sharing is demanded (True) or forbidden (False); None if the cost model decides."""
        return {"always": True, "never": False}.get(CONFIG.share) if self.share is None else self.share

    def captures(self, device: torch.device) -> CaptureCosts:
        """Returns what a capture takes on a device of this type."""
        return self.cpu_captures if device.type == "cpu" else self.gpu_captures

    def seconds(self, work: Work, device: torch.device = _CPU) -> float:
        """Returns the seconds that this takes. On a CPU, Python and computation add up; a GPU computes meanwhile."""
        is_cpu = device.type == "cpu"
        rates = self.rates or (CPU if is_cpu else GPU)
        host = rates.module * work.modules + rates.launch * work.launches
        computed = max(work.multiply_adds / rates.multiply_adds, work.bytes / rates.bytes)
        computed += rates.replayed_launch * work.replayed
        return host + computed if is_cpu else max(host, computed)

    def saves(self, saved: Work, *added: Work, device: torch.device = _CPU) -> bool:
        """Whether the work that is saved takes at least as long as that which is added."""
        return self.seconds(saved, device) >= sum([self.seconds(work, device) for work in added])

    def pays(self, saved: Work, *added: Work, device: torch.device = _CPU) -> bool:
        """Returns what `saves` returns, or what FASTGEN_SHARE demands."""
        return self.saves(saved, *added, device=device) if self.shares is None else self.shares

    def overhead_of_prefill_once(self, size: ModelSize) -> Work:
        """Returns what a prefill with one row per input takes, whatever it saves."""
        return Work(self.prefill_overhead * (size.modules + _MODULES_OF_CALL))

    def steps_of_forward(self, rows: int, size: int, times: ForwardTimes | None, path: str) -> float:
        """Returns what a forward of `size` tokens of each row takes, in steps of one token.

        times: measured ones that correct the estimate, for forwards that run in this way. The estimate was fitted to
        forwards of 4 to 64 tokens (AMD EPYC, model 17).
        """
        rates = self.rates or CPU
        tokens_of_one_read = 4 * rates.multiply_adds / rates.bytes  # fewer take as long, because all weights are read
        estimated = 1.1 * max(1.0, rows * size / (1.25 * tokens_of_one_read)) ** 0.8
        return estimated if times is None else times.corrected(estimated, rows, size, path)


# The cost model of new calls.
DEFAULT = CostModel()


# For each model: the module that holds its first weight, and the weight's name there; and the weight's dtype and device
# when the size was measured, and the size.
_firsts: WeakKeyDictionary[nn.Module, tuple[Callable[[], Any], str]] = WeakKeyDictionary()
_sizes: WeakKeyDictionary[nn.Module, tuple[Any, ModelSize]] = WeakKeyDictionary()


def size_of(model: nn.Module, known_code: KnownCode) -> ModelSize:
    """Returns the size of the model, measured again if its dtype or device has changed since the last call."""
    first = first_weight(model)
    cached = _sizes.get(model)
    state = None if first is None else (first.dtype, first.device)
    if cached is None or cached[0] != state:
        cached = _sizes[model] = state, _measured(model, known_code.encoder_of(model))
    return cached[1]


def first_weight(model: nn.Module) -> Tensor | None:
    """Returns the model's present first parameter, or None if it has none."""
    module, name = _firsts.get(model, (lambda: None, ""))
    if (owner := module()) is not None and (weight := owner._parameters.get(name)) is not None:
        return weight
    path, weight = next(model.named_parameters(), ("", None))
    owner, _, name = path.rpartition(".")
    _firsts[model] = ref(model.get_submodule(owner)), name
    return weight


def _measured(model: nn.Module, encoder: nn.Module | None) -> ModelSize:
    modules, weights = list(model.modules()), list(model.parameters())
    # Tokens look up one row of an embedding; the output layer, of the same shape, sees the last token only.
    looked_up = {module.weight.shape for module in modules if isinstance(module, nn.Embedding)}
    encoder_weights = set() if encoder is None else set(encoder.parameters())  # runs once per input anyway
    prefill = [weight for weight in weights if weight.dim() > 1 and weight not in encoder_weights]
    used = [weight.numel() for weight in prefill if weight.shape not in looked_up]
    large = [weight.numel() for weight in weights if weight.is_cpu and weight.dtype in cpu_linear.DTYPES]
    large = [elements for elements in large if elements >= cpu_linear.MIN_ELEMENTS]
    output = max((shape.numel() for shape in looked_up), default=0)
    itemsize = weights[0].itemsize if weights else 4
    return ModelSize(len(modules), sum(used), sum(used) + output, sum(large), itemsize)
