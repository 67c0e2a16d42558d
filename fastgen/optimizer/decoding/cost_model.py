"""Cost model: decides whether an optimisation is worthwhile; never affects results.

A walk over all modules of a model takes milliseconds, as long as a tiny model takes for a token. So these decisions
come before anything that looks at the modules, and use `size_of`, which caches a model's size: it is measured again
only if the dtype or device of the first weight has changed.

The rates of a device, from which seconds are made, are constants: those of a CPU, or of an H200 for each other device.
Rates probed on a CPU decide worse: the decisions compare its Python and the kernels of whole steps, of which single
operations show little. On an AMD EPYC (family 25, model 17) a launch takes 2 µs, and the second product of a shared
prompt as long as 12 launches of 17 µs. With 2 µs for a launch, and for a module in proportion, 9 of 24 small calls were
slower than stock by more than 3 %, with the constants none (benchmarks/small.py, seed 77).

Tests: tests/optimizer/decoding/test_cost_model.py
"""

from __future__ import annotations

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
_MODULES_OF_CALL = 4  # a call of `generate` takes Python like so many modules


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


@dataclass(frozen=True)
class ModelSize:
    """The size of a model.

    modules: their number. weights: elements of the weights that each token of a prefill is multiplied with. step: the
    same for a decode step, with the output layer. large: elements of large weights for which oneDNN is an option, on a
    CPU. itemsize: bytes of an element of the first weight.
    """

    modules: int
    weights: int
    step: int
    large: int
    itemsize: int


class CaptureCosts(NamedTuple):
    """What capturing a step takes, in eager steps, and how many forwards come before.

    new: for a new graph; existing: for the step that each call repeats. before: forwards that run eagerly before a new
    graph, because many calls end early. least: calls with fewer steps are never captured.
    """

    new: float
    existing: float
    before: int
    least: int


# Filling a static cache and repeating one step take the time of 1.7 steps, of which a replay saves 8 to 14 % (AMD EPYC,
# family 26).
CPU_CAPTURES = CaptureCosts(new=3, existing=1, before=8, least=24)
# A replay saves two thirds of a step, and a new graph takes as long as 12 eager steps (H200, Llama-8B with 8 layers):
# by these numbers that model is captured for 24 steps, and its graph replayed for 4.
GPU_CAPTURES = CaptureCosts(new=9.9, existing=1.6, before=2, least=4)


@dataclass(frozen=True)
class CostModel:
    """Compares the seconds that an optimisation saves with those that it takes, by the rates of the device.

    rates: those of all devices; None: `rates_of` each. Rates and counts are such that break-evens are where they were
    measured, on an AMD EPYC (family 25, model 17) and on an H200 (docs/gpu-checks.md). On a CPU each number counts as
    one of fp32.

    share: overrides FASTGEN_SHARE.

    prefill_overhead: what a prefill with one row per input takes, as a part of the Python of a forward
    (benchmarks/small.py).

    launches: launches that a shared prompt adds to the attention of a layer. launches_of_kernel: the same with
    `triton_attention` in a CUDA graph. min_elements_in_place: elements of keys, per layer, from which writing generated
    keys into a buffer is faster than copying all keys at every step (beams break even near 0.2 million, samples near
    0.03 million, on a CPU).

    cpu_captures, gpu_captures: what a capture takes.

    min_large: the seconds of reading the large weights, as a part of those of the Python of a forward, from which on a
    microsecond for every call of torch does not matter; for a call of one step four times as much.

    most_steps_of_tiny_call: a call with at most so many steps, whose prefill is too small to gain, bypasses fastgen.

    min_draft_steps, most_draft_rows: calls with fewer steps, or with more rows, get no drafts: the first row whose
    draft fails ends the draft of all. min_computed: the same if a step computes for a smaller part of what its Python
    takes: then several tokens take longer than one (the demo model, AMD EPYC, family 25, model 17: 4 take 1.7 steps).

    min_leaving: the fraction of rows that must be finished for a batch to be compacted. min_steps_expected: the number
    of further steps that must be expected then.
    """

    rates: DeviceRates | None = None
    share: bool | None = None
    prefill_overhead: float = 0.5
    launches: float = 12.5
    launches_of_kernel: float = 0.5
    min_elements_in_place: int = 1 << 17
    cpu_captures: CaptureCosts = CPU_CAPTURES
    gpu_captures: CaptureCosts = GPU_CAPTURES
    min_large: float = 0.25
    most_steps_of_tiny_call: int = 2
    min_draft_steps: int = 8
    most_draft_rows: int = 8
    min_computed: float = 0.25
    min_leaving: float = 1 / 8
    min_steps_expected: int = 8

    @property
    def shares(self) -> bool | None:
        """Whether sharing is demanded (True) or forbidden (False); None if the cost model decides."""
        return {"always": True, "never": False}.get(CONFIG.share) if self.share is None else self.share

    def rates_of(self, device: torch.device) -> DeviceRates:
        """Returns the rates of a device."""
        return self.rates or (CPU if device.type == "cpu" else GPU)

    def seconds_of_prefill(self, size: ModelSize, tokens: int) -> float:
        """Returns the seconds that so many tokens add to a prefill on a CPU.

        Decisions about prefills go by a CPU's rates on all devices: on a GPU the tokens take less time than the checks,
        and prompts are shared for the sake of the steps, which read them, and of the memory.
        """
        return size.weights * tokens / self.rates_of(_CPU).multiply_adds

    def overhead_of_prefill_once(self, size: ModelSize) -> float:
        """Returns the seconds that a prefill with one row per input takes, whatever it saves."""
        return self.prefill_overhead * self.rates_of(_CPU).module * (size.modules + _MODULES_OF_CALL)

    def should_prefill_once(self, size: ModelSize, saved_tokens: int) -> bool:
        """Whether a prefill of one row per input, which saves `saved_tokens` tokens, gains more than it costs."""
        if self.shares is not None:
            return self.shares
        return self.seconds_of_prefill(size, saved_tokens) >= self.overhead_of_prefill_once(size)

    def may_gain(self, size: ModelSize, tokens: int, steps: int) -> bool:
        """Whether a call of at most so many steps, with at most so many tokens in its prefill, may be accelerated."""
        is_tiny = steps <= self.most_steps_of_tiny_call and not self.should_prefill_once(size, tokens)
        return not is_tiny or self.should_swap_forwards(size, steps)

    def should_split_prefix(self, size: ModelSize, saved_tokens: int) -> bool:
        """Whether an additional forward for a common prefix, which saves `saved_tokens` tokens, is worthwhile."""
        return self.is_worth_a_forward(size, saved_tokens) if self.shares is None else self.shares

    def is_worth_a_forward(self, size: ModelSize, saved_tokens: int) -> bool:
        """Whether `saved_tokens` tokens of a prefill take longer than a forward of few tokens."""
        overhead = self.overhead_of_prefill_once(size) + sum(self.seconds_of_step(size, 1))
        return self.seconds_of_prefill(size, saved_tokens) >= overhead

    def seconds_of_step(self, size: ModelSize, rows: int, device: torch.device = _CPU) -> tuple[float, float]:
        """Returns the seconds of a decode step that the host and the device take, on a CPU one after the other."""
        rates = self.rates_of(device)
        itemsize = 4 if device.type == "cpu" else size.itemsize
        computed = max(size.step * rows / rates.multiply_adds, size.step * itemsize / rates.bytes)
        return rates.module * size.modules, computed

    def should_share(
        self, keys: Tensor, rows_per_input: int, is_cross: bool = False, is_captured: bool = False
    ) -> bool:
        """Whether attention is faster with these keys `[inputs, kv_heads, length, head_dim]` stored once per input.

        is_cross: whether they belong to cross-attention, which has only one segment, and launches a quarter. If
        repeated instead, they are still never reordered. is_captured: whether steps will be captured. Values are
        assumed to be as wide as keys.
        """
        if self.shares is not None:
            return self.shares
        rates = self.rates_of(keys.device)
        is_cpu = keys.device.type == "cpu"
        has_kernel = not is_cpu and CONFIG.cuda_kernels and keys.dtype in (torch.float16, torch.bfloat16)
        launches = self.launches_of_kernel if is_captured and has_kernel else self.launches
        overhead = launches * (rates.replayed_launch if is_captured else rates.launch)
        saved_bytes = 2 * keys.numel() * (rows_per_input - 1) * (4 if is_cpu else keys.itemsize)
        return bool(saved_bytes / rates.bytes >= (overhead / 4 if is_cross else overhead))

    def should_write_in_place(self, keys: Tensor, rows_per_input: int, limit: int) -> bool:
        """Whether a buffer is worthwhile for keys `[inputs, kv_heads, length, head_dim]` that grow by up to `limit`."""
        inputs, kv_heads, length, width = keys.shape
        elements = inputs * rows_per_input * kv_heads * (length + limit // 2) * width
        return bool(elements >= self.min_elements_in_place)

    def captures(self, device: torch.device) -> CaptureCosts:
        """Returns what a capture takes on a device of this type."""
        return self.cpu_captures if device.type == "cpu" else self.gpu_captures

    def should_capture(
        self, size: ModelSize, rows: int, steps: int, is_captured: bool, device: torch.device = _CPU
    ) -> bool:
        """Whether so many replays of this model's step, for so many rows, save twice what the capture takes.

        A replay saves what the host takes beyond the device. is_captured: whether a graph exists. Always true with
        FASTGEN_CUDA_GRAPHS=on.
        """
        if CONFIG.cuda_graphs == "on":
            return True
        host, computed = self.seconds_of_step(size, rows, device)
        step = host + computed if device.type == "cpu" else max(host, computed)
        costs = self.captures(device)
        return (step - computed) * steps >= 2 * step * (costs.existing if is_captured else costs.new)

    def should_swap_forwards(self, size: ModelSize, steps: int | None = None) -> bool:
        """Whether the model spends its time in large products for which oneDNN is an option.

        steps: of the call, if known. A single step must gain as much as it takes to swap the forwards of all modules.
        """
        rates = self.rates_of(_CPU)
        least = self.min_large * (4 if steps == 1 else 1) * rates.module * size.modules
        return 4 * size.large / rates.bytes >= least

    def may_draft(self, size: ModelSize, rows: int, steps: int) -> bool:
        """Whether it is worthwhile to look for drafts in a call of so many steps."""
        host, computed = self.seconds_of_step(size, rows)
        return steps >= self.min_draft_steps and rows <= self.most_draft_rows and computed >= self.min_computed * host

    def steps_of_forward(self, tokens: int) -> float:
        """Returns what a forward of so many tokens of all rows takes, in steps of one token (AMD EPYC, model 17)."""
        rates = self.rates_of(_CPU)
        tokens_of_one_read = 4 * rates.multiply_adds / rates.bytes  # fewer take as long, because all weights are read
        return float(1.1 * max(1.0, tokens / (1.25 * tokens_of_one_read)) ** 0.8)

    def should_compact(self, size: ModelSize, leaving: int, rows: int, steps_done: int, steps_left: int) -> bool:
        """Whether the batch should drop its finished rows now, `leaving` of `rows`.

        steps_left: the most steps that may follow; their expected number is estimated from `steps_done`.
        """
        steps = min(steps_left, max(steps_done, self.min_steps_expected))
        return leaving >= self.min_leaving * rows and self.should_prefill_once(size, leaving * steps)


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
    before = set() if encoder is None else set(encoder.parameters())  # runs once per input anyway
    prefill = [weight for weight in weights if weight.dim() > 1 and weight not in before]
    used = [weight.numel() for weight in prefill if weight.shape not in looked_up]
    large = [weight.numel() for weight in weights if weight.is_cpu and weight.dtype in cpu_linear.DTYPES]
    large = [elements for elements in large if elements >= cpu_linear.MIN_ELEMENTS]
    output = max((shape.numel() for shape in looked_up), default=0)
    itemsize = weights[0].itemsize if weights else 4
    return ModelSize(len(modules), sum(used), sum(used) + output, sum(large), itemsize)
