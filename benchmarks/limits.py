"""The least time that one call of `generate` needs on this machine, from the model's size and two measured rates.

The prefill and each step take what is longer: their operations at the rate of a large matrix product, or the bytes they
have to read at the rate of a large streaming read. Operations are two per weight and row, and those of attention. Bytes
are the weights, once per step, and keys and values: those of the prompt or the encoder once per input, those of
generated tokens once per row. Encoder and prompt are computed once per input.

Left out, so that nothing reaches the limit: activations, normalisation, softmax, n-gram blocking, choosing tokens and
random numbers. On the other side, weights that stay in the CPU's cache from step to step are read sooner than counted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

GEMM_SIZE = 4096
READ_BYTES = 512 * 2**20
TRIALS = 4
_ENCODER = re.compile(r"(^|\.)encoder\.")
_CROSS_KEYS = re.compile(r"(encoder_attn|EncDecAttention)\.[kv](_proj)?\.")


@dataclass(frozen=True)
class Rates:
    """What the machine reaches: operations per second in a large product, bytes per second in a large read."""

    flops: float
    bytes: float


def _shortest(call: Callable[[], torch.Tensor], device: str) -> float:
    seconds = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """With the threads that torch has. On a CPU the better of torch's two libraries counts."""
    square = torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(dtype)
    factors = [square]
    if device == "cpu" and dtype != torch.float16 and torch.backends.mkldnn.is_available():
        factors.append(square.to_mkldnn())
    products = [_shortest(lambda x=x: torch.nn.functional.linear(x, x), device) for x in factors]
    streamed = torch.ones(READ_BYTES // 4, device=device)
    return Rates(2 * GEMM_SIZE**3 / min(products), READ_BYTES / _shortest(streamed.sum, device))


@dataclass(frozen=True)
class Size:
    """Numbers in a model's weights, by how often they are used, and the widths of its attention."""

    encoder: int
    cross: int  # make an encoder's output into keys and values
    decoder: int
    head: int
    encoder_layers: int
    layers: int
    queries: int  # heads x their size
    keys: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> Size:
        config, head = model.config, model.get_output_embeddings().weight
        encoder_layers = config.num_hidden_layers if config.is_encoder_decoder else 0
        layers = _first(config, "decoder_layers", "num_decoder_layers", "num_hidden_layers")
        head_dim = _first(config, "d_kv", "head_dim") or config.hidden_size // config.num_attention_heads
        key_heads = _first(config, "num_key_value_heads", "num_attention_heads")
        widths = (config.num_attention_heads * head_dim, key_heads * head_dim)
        return cls(*_count_weights(model, head), head.numel(), encoder_layers, layers, *widths)


def _first(config: object, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _count_weights(model: torch.nn.Module, head: torch.Tensor) -> tuple[int, int, int]:
    """Numbers in the matrices of the encoder, of cross-attention's keys and values, and of the rest."""
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    left_out = {id(weight) for weight in [*tables, head]}
    encoder = cross = decoder = 0
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or id(weight) in left_out:
            continue
        if _ENCODER.search(name):
            encoder += weight.numel()
        elif _CROSS_KEYS.search(name):
            cross += weight.numel()
        else:
            decoder += weight.numel()
    return encoder, cross, decoder


def limit(size: Size, prompts: Sequence[int], new: Sequence[int], rows: int, rates: Rates, itemsize: int) -> float:
    """Seconds for inputs with `prompts` positions each that get `new` tokens each, in `rows` rows per input."""

    def seconds(operations: float, numbers: float) -> float:
        return max(operations / rates.flops, numbers * itemsize / rates.bytes)

    total = seconds(sum(_prefill(size, prompt) for prompt in prompts), size.encoder + size.cross + _per_step(size))
    for step in range(1, max(new)):
        alive = [prompt for prompt, tokens in zip(prompts, new, strict=True) if tokens > step]
        seen = sum(prompt + step for prompt in alive)
        operations = rows * (2 * len(alive) * _per_step(size) + 4 * seen * size.queries * size.layers)
        states = 2 * size.keys * size.layers * sum(prompt + rows * step for prompt in alive)
        total += seconds(operations, _per_step(size) + states)
    return total


def _per_step(size: Size) -> int:
    return size.decoder + size.head


def _prefill(size: Size, prompt: int) -> float:
    """Operations until the first token of one input."""
    if size.encoder_layers:
        encoder = 2 * prompt * (size.encoder + size.cross) + 4 * prompt**2 * size.queries * size.encoder_layers
        return encoder + 2 * _per_step(size) + 4 * prompt * size.queries * size.layers
    causal = 2 * prompt**2 * size.queries * size.layers
    return 2 * prompt * size.decoder + causal + 2 * size.head
