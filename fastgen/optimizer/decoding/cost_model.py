"""Cost model: decides whether an optimisation is worthwhile; never affects results.

A walk over all modules of a model takes milliseconds, as long as a tiny model takes for a token. So these decisions
come before anything that looks at the modules, and use `size_of`, which caches a model's size: it is measured again
only if the dtype or device of the first weight has changed.

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
    """The size of a model.

    modules: their number. weights: elements of the weights that each token of a prefill is multiplied with. step: the
    same for a decode step, with the output layer. large: elements of large weights for which oneDNN is an option, on a
    CPU. bytes: of all weights.
    """

    modules: int
    weights: int
    step: int
    large: int
    bytes: int


@dataclass(frozen=True)
class CostModel:
    """Thresholds, and the decisions that use them.

    Work is measured in multiply-adds: the time of so many of them in a matrix product.

    prefill_cost, prefill_cost_per_module: the overhead of a prefill with one row per input (benchmarks/small.py).

    min_saved_elements: saved elements of keys, per layer, on a CPU, from which a shared prompt is worth its second
    product (2 cores break even near 0.5 million, benchmarks/ops.py). min_saved_bytes: saved bytes of keys and values,
    per layer, on a GPU in eager steps: the additional launches take 70 µs of the host, in which an H200 reads so much.
    min_saved_bytes_captured: the same in a CUDA graph, with torch's products; min_saved_bytes_of_kernel: with
    `triton_attention`. min_elements_in_place: elements of keys, per layer, on a CPU, from which writing generated keys
    into a buffer is faster than copying all keys at every step (beams break even near 0.2 million, samples near 0.03
    million).

    min_capture_steps: calls with fewer steps are never captured: filling a static cache and repeating one step take the
    time of 1.7 steps, of which a replay saves 8 to 14 % (AMD EPYC, family 26). steps_before_capture: steps that run
    eagerly first, because many calls end early. looks_back: whether steps of earlier calls that had too few for a graph
    count as well, and their graphs are used. capture_steps: the cost of a new graph, in steps.
    On a GPU a replay saves two thirds of a step, and a new graph costs as much as 12 eager steps (H200, 8 layers):
    steps_before_capture_on_gpu, min_capture_steps_on_gpu: for a new graph; min_replays_on_gpu: for an existing graph.
    saved_per_module: work in Python that a replayed step saves, per module (ops/cpu_graph.py). rows_of_one_read: steps
    with fewer rows take as long as with so many, because they read all weights.

    min_large_per_module: elements of large weights, per module, from which large products dominate so much that a
    microsecond for every call of torch does not matter; min_large: the same for all modules together.
    times_as_large_for_one_step: a call of one step needs so many times min_large_per_module.

    most_steps_of_tiny_call: a call with at most so many steps, whose prefill is too small to gain, bypasses fastgen.

    min_draft_steps: calls with fewer steps look for no drafts.

    min_leaving: the fraction of rows that must be finished for a batch to be compacted. min_steps_expected: the number
    of further steps that must be expected then.
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
    min_draft_steps: int = 8
    min_leaving: float = 1 / 8
    min_steps_expected: int = 8

    @property
    def shares(self) -> bool | None:
        """Whether the user demands sharing (True) or forbids it (False); None if the cost model decides."""
        return {"always": True, "never": False}.get(CONFIG.share)

    def overhead_of_prefill_once(self, size: ModelSize) -> int:
        """Returns the fixed overhead of a prefill with one row per input, in multiply-adds that take as long."""
        return self.prefill_cost + self.prefill_cost_per_module * size.modules

    def should_prefill_once(self, size: ModelSize, saved_tokens: int) -> bool:
        """Whether a prefill of one row per input, which saves `saved_tokens` tokens, gains more than it costs."""
        if self.shares is not None:
            return self.shares
        return size.weights * saved_tokens >= self.overhead_of_prefill_once(size)

    def may_gain(self, size: ModelSize, tokens: int, steps: int) -> bool:
        """Whether a call of at most so many steps, with at most so many tokens in its prefill, may be accelerated."""
        is_tiny = steps <= self.most_steps_of_tiny_call and not self.should_prefill_once(size, tokens)
        return not is_tiny or self.should_swap_forwards(size, steps)

    def should_split_prefix(self, size: ModelSize, saved_tokens: int) -> bool:
        """Whether an additional forward for a common prefix, which saves `saved_tokens` tokens, is worthwhile."""
        return self.is_worth_a_forward(size, saved_tokens) if self.shares is None else self.shares

    def is_worth_a_forward(self, size: ModelSize, saved_tokens: int) -> bool:
        """Whether `saved_tokens` tokens of a prefill take longer than a forward of few tokens."""
        forward = size.step * self.rows_of_one_read + self.saved_per_module * size.modules
        return size.weights * saved_tokens >= self.overhead_of_prefill_once(size) + forward

    def should_share(
        self, keys: Tensor, rows_per_input: int, is_cross: bool = False, is_captured: bool = False
    ) -> bool:
        """Whether attention is faster with these keys `[inputs, kv_heads, length, head_dim]` stored once per input.

        is_cross: whether they belong to cross-attention, which has only one segment. If repeated instead, they are
        still never reordered. is_captured: whether steps will be captured. Values are assumed to be as wide as keys.
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
        """Whether a buffer is worthwhile for keys `[inputs, kv_heads, length, head_dim]` that grow by up to `limit`."""
        inputs, kv_heads, length, width = keys.shape
        elements = inputs * rows_per_input * kv_heads * (length + limit // 2) * width
        return bool(elements >= self.min_elements_in_place)

    def should_capture(
        self, size: ModelSize, rows: int, steps: int, is_captured: bool, device_type: str = "cpu"
    ) -> bool:
        """Whether so many replays of this model's step, for so many rows, save twice what the capture costs.

        is_captured: whether a graph exists: it only costs the step that each call repeats. Always true with
        FASTGEN_CUDA_GRAPHS=on.
        """
        if CONFIG.cuda_graphs == "on":
            return True
        if device_type != "cpu":
            return steps >= (self.min_replays_on_gpu if is_captured else self.min_capture_steps_on_gpu)
        saved = self.saved_per_module * size.modules
        step = size.step * max(rows, self.rows_of_one_read) + saved
        return saved * steps >= 2 * step * (1 if is_captured else self.capture_steps)

    def steps_before(self, device: torch.device) -> int:
        """Returns how many steps run eagerly before one is captured."""
        return self.steps_before_capture if device.type == "cpu" else self.steps_before_capture_on_gpu

    def least_steps(self, device: torch.device) -> int:
        """Returns how many steps a call must have for capturing to be considered."""
        return self.min_capture_steps if device.type == "cpu" else self.min_replays_on_gpu

    def should_swap_forwards(self, size: ModelSize, steps: int | None = None) -> bool:
        """Whether the model spends its time in large products for which oneDNN is an option.

        steps: of the call, if known. A single step must gain as much as it takes to swap the forwards of all modules.
        """
        least = self.min_large_per_module * size.modules * (self.times_as_large_for_one_step if steps == 1 else 1)
        return size.large >= max(least, self.min_large)

    def steps_of_forward(self, tokens: int) -> float:
        """Returns what a forward of so many tokens of all rows takes, in steps of one token (AMD EPYC, model 17)."""
        return float(1.15 * max(1.0, tokens / self.rows_of_one_read) ** 0.8)

    def should_compact(self, size: ModelSize, leaving: int, rows: int, steps_done: int, steps_left: int) -> bool:
        """Whether the batch should drop its finished rows now, `leaving` of `rows`.

        steps_left: the most steps that may follow; their expected number is estimated from `steps_done`.
        """
        steps = min(steps_left, max(steps_done, self.min_steps_expected))
        return leaving >= self.min_leaving * rows and self.should_prefill_once(size, leaving * steps)


# The cost models of new calls. REPEATABLE: with FASTGEN_REPEATABLE=1. It switches to a static cache, and to replays, at
# the same steps whatever was called before, because attention over padding and fused kernels round differently.
DEFAULT = CostModel()
REPEATABLE = CostModel(looks_back=False)


def of_new_call() -> CostModel:
    """Returns the cost model of a new call, by FASTGEN_REPEATABLE."""
    return REPEATABLE if CONFIG.repeatable else DEFAULT


# For each model: the module that holds its first weight, and the weight's name there; and the weight's dtype and device
# when the size was measured, and the size.
_firsts: WeakKeyDictionary[nn.Module, tuple[Callable[[], Any], str]] = WeakKeyDictionary()
_sizes: WeakKeyDictionary[nn.Module, tuple[Any, ModelSize]] = WeakKeyDictionary()


def size_of(model: nn.Module, known_code: KnownCode) -> ModelSize:
    """Returns the size of the model, measured again if its dtype or device has changed since the last call."""
    first, cached = first_weight(model), _sizes.get(model)
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
    return ModelSize(len(modules), sum(used), sum(used) + output, sum(large), sum(weight.nbytes for weight in weights))
