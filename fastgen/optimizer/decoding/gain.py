"""What a call gains and what it costs to gain it: decides about speed only, never about what is right.

Looking at all modules of a model takes milliseconds, as long as a tiny model takes for a token. So these decisions come
first, and the size of a model, on which they rest, is kept from call to call.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from fastgen.config import CONFIG
from fastgen.ops.cpu_linear import product

# From here on, large products are so much of the work that a microsecond for every call of torch does not matter.
MIN_LARGE_PER_MODULE = 1 << 16

# What a prefill with one row per input costs, in multiplications that take as long (see benchmarks/bench_small.py).
COST = 1 << 22
COST_PER_MODULE = 1 << 20

# A shared prompt costs a second attention product for every layer and step. On a CPU it pays where it saves at least
# this many elements of keys per layer (2 cores break even near 0.5 million, see benchmarks/bench_attention.py).
MIN_SAVED_ELEMENTS = 1 << 19

# On a GPU the second product is taken to cost its launches alone, and what is not read to save the time of reading it.
# Assumed for an A100 or H100, not yet run on a GPU.
GPU_LAUNCHES = 3  # two products and the softmax over both parts
GPU_SECONDS_PER_LAUNCH = 5e-6
GPU_BYTES_PER_SECOND = 2e12
MIN_SAVED_BYTES = round(GPU_LAUNCHES * GPU_SECONDS_PER_LAUNCH * GPU_BYTES_PER_SECOND)  # of keys and values, per layer

# From here on it pays, on a CPU, to write what rows generate in place instead of copying all keys at every step: beams
# break even near 0.2 million elements, samples near 0.03 million.
MIN_ELEMENTS_TO_WRITE_IN_PLACE = 1 << 17


# The Python of a decode step that a replay saves, and what it costs on a CPU to read the weights for a few rows: in
# multiplications that take as long, see fastgen/ops/cpu_graph for times. To make a recording takes three steps.
SAVED_PER_MODULE = 1 << 21
ROWS_OF_ONE_READING = 8
STEPS_OF_A_RECORDING = 3


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

    @property
    def is_large(self) -> bool:
        """Whether large products that oneDNN may compute are what the model's time goes into."""
        return self.large >= max(MIN_LARGE_PER_MODULE * self.modules, 1)


@dataclass(frozen=True)
class _Known:
    """A model's size, its first parameter, and the type and device that this had when the size was found."""

    size: ModelSize
    first: ref[nn.Parameter]
    state: tuple[torch.dtype, torch.device]


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def size_of(model: nn.Module) -> ModelSize:
    """The size of the model, looked up again where its type or device has changed since the last call."""
    known = _known.get(model)
    if known is not None and (first := known.first()) is not None and (first.dtype, first.device) == known.state:
        return known.size
    size, first = _measured(model), next(model.parameters(), None)
    if first is not None:
        _known[model] = _Known(size, ref(first), (first.dtype, first.device))
    return size


def _measured(model: nn.Module) -> ModelSize:
    modules, weights = list(model.modules()), list(model.parameters())
    # Tokens look up one row of an embedding; the output layer, of the same shape, sees the last token only.
    looked_up = {module.weight.shape for module in modules if isinstance(module, nn.Embedding)}
    before = set(model.get_encoder().parameters()) if _has_encoder(model) else set()  # runs once per input anyway
    prefill = [weight for weight in weights if weight.dim() > 1 and weight not in before]
    used = [weight.numel() for weight in prefill if weight.shape not in looked_up]
    large = [weight.numel() for weight in weights if weight.is_cpu and weight.dtype in product.dtypes()]
    large = [elements for elements in large if elements >= product.MIN_ELEMENTS]
    output = max((shape.numel() for shape in looked_up), default=0)
    return ModelSize(len(modules), sum(used), sum(used) + output, sum(large), sum(weight.nbytes for weight in weights))


def _has_encoder(model: nn.Module) -> bool:
    """Whether this is a model of transformers that gives its decoder the states of an encoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)) and hasattr(model, "get_encoder")


def sharing_is_asked_for() -> bool | None:
    """What FASTGEN_SHARE says: True for always, False for never, None where it is to pay."""
    return {"always": True, "never": False}.get(CONFIG.share)


def prefill_reasons(size: ModelSize, saved_tokens: int) -> list[str]:
    """Why a prefill with one row per input, `saved_tokens` fewer in all, is not worth its cost; empty if it is."""
    asked = sharing_is_asked_for()
    if asked is not None:
        return [] if asked else ["FASTGEN_SHARE=never"]
    saved, cost = size.weights * saved_tokens, COST + COST_PER_MODULE * size.modules
    if saved >= cost:
        return []
    millions = f"{saved / 1e6:.1f} million multiplications, its cost is that of {cost / 1e6:.1f}"
    return [f"too small to gain: one row per input would save {saved_tokens} tokens, {millions}"]


def recording_pays(size: ModelSize, rows: int, steps: int, is_known: bool) -> bool:
    """Whether a recording of this model's step for so many rows saves twice what it costs on a CPU, in so many steps.

    is_known: it is there already, and costs the step that it has to repeat in each call.
    """
    saved = SAVED_PER_MODULE * size.modules
    step = size.step * max(rows, ROWS_OF_ONE_READING) + saved
    return saved * steps >= 2 * step * (1 if is_known else STEPS_OF_A_RECORDING)


def sharing_pays(keys: Tensor, fan_out: int, is_cross: bool = False) -> bool:
    """Whether keeping these keys `[inputs, kv_heads, length, head_dim]` once per input is faster.

    is_cross: they are those of a cross-attention, which has one part only. Where they are repeated instead, they are
    still never reordered. Values are taken to be as wide as keys.
    """
    asked = sharing_is_asked_for()
    if asked is not None:
        return asked
    if keys.device.type == "cpu":
        saved, least = keys.numel() * (fan_out - 1), MIN_SAVED_ELEMENTS
    else:
        saved, least = 2 * keys.nbytes * (fan_out - 1), MIN_SAVED_BYTES
    return saved >= (least // 4 if is_cross else least)


def writing_in_place_pays(keys: Tensor, fan_out: int, limit: int) -> bool:
    """Whether keys `[inputs, kv_heads, length, head_dim]`, repeated and then `limit` longer, are worth a buffer."""
    inputs, kv_heads, length, width = keys.shape
    return inputs * fan_out * kv_heads * (length + limit // 2) * width >= MIN_ELEMENTS_TO_WRITE_IN_PLACE
