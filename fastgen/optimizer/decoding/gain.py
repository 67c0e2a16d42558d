"""What a call gains and what it costs to gain it: decides about speed only, never about what is right.

Looking at all modules of a model takes milliseconds, as long as a tiny model takes for a token. So these decisions come
first, and the size of a model, on which they rest, is kept from call to call (`model_facts.size_of`).
"""

from __future__ import annotations

from torch import Tensor

from fastgen.config import CONFIG
from fastgen.optimizer.decoding.model_facts import ModelSize
from fastgen.optimizer.decoding.reasons import Reason

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


def sharing_is_asked_for() -> bool | None:
    """What FASTGEN_SHARE says: True for always, False for never, None where it is to pay."""
    return {"always": True, "never": False}.get(CONFIG.share)


def prefill_reasons(size: ModelSize, saved_tokens: int) -> list[Reason]:
    """Why a prefill with one row per input, `saved_tokens` fewer in all, is not worth its cost; empty if it is."""
    asked = sharing_is_asked_for()
    if asked is not None:
        return [] if asked else [Reason("SHARE_NEVER", "FASTGEN_SHARE=never")]
    saved, cost = size.weights * saved_tokens, COST + COST_PER_MODULE * size.modules
    if saved >= cost:
        return []
    detail = f"{saved_tokens} tokens fewer save {saved / 1e6:.1f} million multiply-adds, the overhead {cost / 1e6:.1f}"
    return [Reason("TOO_SMALL", "the model is too small to gain", detail)]


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
