"""Cost model: decides whether an optimisation is worthwhile; never affects results.

A walk over all modules of a model takes milliseconds, as long as a tiny model takes for a token. So these decisions
come before anything that looks at the modules, and rest on `size_of`, which remembers a model's size: it is looked up
again only if the first weight has changed its type or device.

Tests: tests/optimizer/decoding/test_cost_model.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from fastgen.config import CONFIG
from fastgen.ops import cpu_linear
from fastgen.optimizer.decoding.user_code import KnownCode


@dataclass(frozen=True)
class ModelSize:
    """modules: how many. weights: elements that a token of a prefill is multiplied with. step: those of a decode step,
    which has an output layer. large: elements of large weights that oneDNN may multiply with, on a CPU. bytes: of all
    weights.
    """

    modules: int
    weights: int
    step: int
    large: int
    bytes: int


@dataclass(frozen=True)
class CostModel:
    """Thresholds, and the decisions that rest on them.

    Work is counted in multiply-adds: what takes as long as so many of them in a matrix product.

    prefill_cost, prefill_cost_per_module: work that a prefill of one row per input costs (benchmarks/small.py).

    min_saved_elements: of keys, per layer, on a CPU, from which a shared prompt is worth its second product (2 cores
    break even near 0.5 million, benchmarks/ops.py). min_saved_bytes: of keys and values, per layer, on a
    GPU in eager steps: more launches take 70 µs of the host, in which an H200 reads so much. min_saved_bytes_captured:
    in a CUDA graph, with torch's products; min_saved_bytes_of_kernel: with those of `triton_attention`.
    min_elements_in_place: of keys, per layer, from which it is worth a buffer, on a CPU, to write generated keys in
    place instead of copying all keys at every step (beams break even near 0.2 million, samples near 0.03 million).

    min_capture_steps: shorter calls are not asked whether their steps can be captured: to fill a static cache and to
    repeat one step takes the time of 1.7 steps, of which a replay saves 8 to 14 % (AMD EPYC, family 26).
    steps_before_capture: of a call, because many end early. looks_back: earlier calls count as well, which had too few
    steps for a graph, or have left one. capture_steps: that a new graph takes.
    On a GPU a replay saves two thirds of a step, and a new graph costs what 12 eager steps do (H200, 8 layers):
    steps_before_capture_on_gpu, min_capture_steps_on_gpu: for a new graph; min_replays_on_gpu: for an existing graph.
    saved_per_module: work that a replayed step saves, in Python, per module (ops/cpu_graph.py). rows_of_one_read: steps
    of fewer rows take as long, since they read all weights.

    min_large_per_module: elements of large weights, per module, from which large products are so much of the work that
    a microsecond for every call of torch does not matter; min_large: of all modules.
    times_as_large_for_one_step: so many times min_large_per_module, for a call of one step.

    most_steps_of_tiny_call: a call of no more steps, whose prefill is too small to gain, runs without fastgen.

    min_leaving: the part of the rows that has to be finished for a batch to be compacted. min_steps_expected: for
    which a batch is expected to go on.
    """

    prefill_cost: int = 1 << 22
    prefill_cost_per_module: int = 1 << 20
    min_saved_elements: int = 1 << 19
    min_saved_bytes: int = 240_000_000
    min_saved_bytes_captured: int = 25_000_000
    min_saved_bytes_of_kernel: int = 1_000_000
    min_elements_in_place: int = 1 << 17
    min_capture_steps: int = 24
    steps_before_capture: int = 8
    steps_before_capture_on_gpu: int = 2
    min_replays_on_gpu: int = 4
    min_capture_steps_on_gpu: int = 24
    looks_back: bool = True
    capture_steps: int = 3
    saved_per_module: int = 1 << 21
    rows_of_one_read: int = 8
    min_large_per_module: int = 1 << 16
    min_large: int = 1
    times_as_large_for_one_step: int = 4
    most_steps_of_tiny_call: int = 2
    min_leaving: float = 1 / 8
    min_steps_expected: int = 8

    @property
    def shares(self) -> bool | None:
        """Whether the user demands sharing (True) or forbids it (False); None where it is to be worthwhile."""
        return {"always": True, "never": False}.get(CONFIG.share)

    def overhead_of_prefill_once(self, size: ModelSize) -> int:
        """The fixed overhead of a prefill with one row per input, in multiply-adds that take as long."""
        return self.prefill_cost + self.prefill_cost_per_module * size.modules

    def should_prefill_once(self, size: ModelSize, saved_tokens: int) -> bool:
        """Whether a prefill of one row per input, which computes `saved_tokens` fewer, gains more than it costs."""
        if self.shares is not None:
            return self.shares
        return size.weights * saved_tokens >= self.overhead_of_prefill_once(size)

    def may_gain(self, size: ModelSize, tokens: int, steps: int) -> bool:
        """Whether a call of at most so many steps, with at most so many tokens in its prefill, may gain anything."""
        is_tiny = steps <= self.most_steps_of_tiny_call and not self.should_prefill_once(size, tokens)
        return not is_tiny or self.should_swap_forwards(size, steps)

    def should_split_prefix(self, size: ModelSize, saved_tokens: int) -> bool:
        """Whether a forward more, which computes a common prefix once, and so `saved_tokens` fewer, is worth it."""
        return self.is_worth_a_forward(size, saved_tokens) if self.shares is None else self.shares

    def is_worth_a_forward(self, size: ModelSize, saved_tokens: int) -> bool:
        """Whether `saved_tokens` fewer in a prefill take longer than a forward of few tokens."""
        forward = size.step * self.rows_of_one_read + self.saved_per_module * size.modules
        return size.weights * saved_tokens >= self.overhead_of_prefill_once(size) + forward

    def should_share(
        self, keys: Tensor, rows_per_input: int, is_cross: bool = False, is_captured: bool = False
    ) -> bool:
        """Whether attention is faster with these keys `[inputs, kv_heads, length, head_dim]` stored once per input.

        is_cross: they are those of cross-attention, which has one segment only. Where they are repeated instead, they
        are still never reordered. is_captured: steps will be. Values are taken to be as wide as keys.
        """
        if self.shares is not None:
            return self.shares
        if keys.device.type == "cpu":
            saved, least = keys.numel() * (rows_per_input - 1), self.min_saved_elements
        else:
            saved, least = 2 * keys.nbytes * (rows_per_input - 1), self.min_saved_bytes
            if is_captured:
                has_kernel = CONFIG.cuda_kernels and keys.dtype in (torch.float16, torch.bfloat16)
                least = self.min_saved_bytes_of_kernel if has_kernel else self.min_saved_bytes_captured
        return bool(saved >= (least // 4 if is_cross else least))

    def should_write_in_place(self, keys: Tensor, rows_per_input: int, limit: int) -> bool:
        """Whether keys `[inputs, kv_heads, length, head_dim]`, repeated and then `limit` longer, are worth a buffer."""
        inputs, kv_heads, length, width = keys.shape
        elements = inputs * rows_per_input * kv_heads * (length + limit // 2) * width
        return bool(elements >= self.min_elements_in_place)

    def should_capture(
        self, size: ModelSize, rows: int, steps: int, is_captured: bool, device_type: str = "cpu"
    ) -> bool:
        """Whether replaying this model's step for so many rows saves twice what it costs, in so many steps.

        is_captured: there is a graph, which costs the step that it has to repeat in each call. With
        FASTGEN_CUDA_GRAPHS=on the answer is yes.
        """
        if CONFIG.cuda_graphs == "on":
            return True
        if device_type != "cpu":
            return steps >= (self.min_replays_on_gpu if is_captured else self.min_capture_steps_on_gpu)
        saved = self.saved_per_module * size.modules
        step = size.step * max(rows, self.rows_of_one_read) + saved
        return saved * steps >= 2 * step * (1 if is_captured else self.capture_steps)

    def steps_before(self, device: torch.device) -> int:
        """How many steps run eagerly before one is captured."""
        return self.steps_before_capture if device.type == "cpu" else self.steps_before_capture_on_gpu

    def least_steps(self, device: torch.device) -> int:
        """How many steps a call has to have, for it to be asked whether they can be captured."""
        return self.min_capture_steps if device.type == "cpu" else self.min_replays_on_gpu

    def should_swap_forwards(self, size: ModelSize, steps: int | None = None) -> bool:
        """Whether large products that oneDNN may compute are what the model's time goes into.

        steps: of the call, if they are known. One alone has to gain what it takes to put forwards on all modules.
        """
        least = self.min_large_per_module * size.modules * (self.times_as_large_for_one_step if steps == 1 else 1)
        return size.large >= max(least, self.min_large)

    def should_compact(self, size: ModelSize, leaving: int, rows: int, steps_done: int, steps_left: int) -> bool:
        """Whether `leaving` of `rows` rows, which are finished, should leave the batch now.

        steps_left: at most; how many there will be is guessed from `steps_done`.
        """
        steps = min(steps_left, max(steps_done, self.min_steps_expected))
        return leaving >= self.min_leaving * rows and self.should_prefill_once(size, leaving * steps)


# The cost models of new calls. REPEATABLE: with FASTGEN_REPEATABLE=1. There a call goes over to a static cache, and to
# replays, at the same steps whatever was called before: attention over padding, and fused kernels, round differently.
DEFAULT = CostModel()
REPEATABLE = CostModel(looks_back=False)


def of_new_call() -> CostModel:
    return REPEATABLE if CONFIG.repeatable else DEFAULT


# By the model: the module that has its first weight, and the name there; the type and device of that weight when the
# size was measured, and the size.
_firsts: WeakKeyDictionary[nn.Module, tuple[Callable[[], Any], str]] = WeakKeyDictionary()
_sizes: WeakKeyDictionary[nn.Module, tuple[Any, ModelSize]] = WeakKeyDictionary()


def size_of(model: nn.Module, known: KnownCode) -> ModelSize:
    """The size of the model, looked up again where its type or device has changed since the last call."""
    first, found = first_weight(model), _sizes.get(model)
    state = None if first is None else (first.dtype, first.device)
    if found is None or found[0] != state:
        found = _sizes[model] = state, _measured(model, known.encoder_of(model))
    return found[1]


def first_weight(model: nn.Module) -> Tensor | None:
    """The model's first parameter as it is, None if it has none."""
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
    return ModelSize(len(modules), sum(used), sum(used) + output, sum(large), sum(weight.nbytes for weight in weights))
