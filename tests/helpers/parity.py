"""Comparisons of a generate under fastgen with the same generate of the unpatched library, in one process.

`run_both` and `assert_equal_outputs` serve both hosts; fairseq_generation.py says how fairseq is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from architectures import SPECIAL, VOCABULARY, architecture_of
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
)

import fastgen
from fastgen.optimizer.decoding.graphs import CpuCapture
from fastgen.optimizer.decoding.report import MATERIALIZED, STEPS, Report
from fastgen.optimizer.decoding.segmented_kv import OPERATIONS
from fastgen.testing import configured, costs, limits

PREFILL = "prefill: one row per input"
PROMPT = "the prompt's keys and values: once per input"
CROSS = "cross-attention keys and values: once per input"
LEFT = "finished inputs: removed from the batch"
CAPTURED = CpuCapture.name
BEAMS = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 7}
SAMPLES = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 7}
GREEDY = {"do_sample": False, "max_new_tokens": 7}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "samples": {"num_return_sequences": 2, "do_sample": True},
}
TOKENS_ONLY = {"return_dict_in_generate": False, "output_scores": False, "output_logits": False}
BOTH = pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))


class Both(NamedTuple):
    """What the unpatched library returned, what fastgen returned, and what fastgen says that it did."""

    stock: Any
    fast: Any
    report: Report | None


def lively(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights so large that attention has a say: with the usual 0.02 a wrong key would change no token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.2 * parameter.shape[1] ** -0.5, generator=generator)
    return model


def tiny(name: str, **overrides: Any) -> torch.nn.Module:
    """The tiny lively model of an architecture; name: as in `architecture_of`; overrides: of its configuration."""
    return lively(architecture_of(name, **overrides).model())


unchanged = functools.cache(tiny)  # for calls that leave the model as it is: made once in a process


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(*lengths: int, side: str = "left", seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on one side to the longest, and their mask."""
    longest = max(lengths)
    input_ids, mask = token_ids(len(lengths), longest, seed=seed), torch.ones(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        padding = slice(0, longest - length) if side == "left" else slice(length, longest)
        input_ids[row, padding], mask[row, padding] = SPECIAL["pad_token_id"], 0
    return {"input_ids": input_ids, "attention_mask": mask}


def with_prefix(*lengths: int, prefix: int = 7, side: str = "left", seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of these lengths that begin with `prefix` equal tokens, the same for all seeds, and then differ."""
    inputs, longest = padded(*lengths, side=side, seed=seed), max(lengths)
    for row, length in enumerate(lengths):
        start = longest - length if side == "left" else 0
        inputs["input_ids"][row, start : start + prefix] = token_ids(1, prefix, seed=9)[0]
        inputs["input_ids"][row, start + prefix] = 10 + 8 * seed + row
    return inputs


def inputs_of(name: str, *lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on the side where the architecture wants it, or as many sounds or images."""
    kind = architecture_of(name).kind
    if kind in ("speech", "vision"):
        return architecture_of(name).inputs(rows=len(lengths), seed=seed)
    return padded(*lengths, side="right" if kind == "seq2seq" else "left", seed=seed)


def run_both(
    call: Callable[[], Any],
    without: Callable[[], AbstractContextManager] = fastgen.disabled,
    must_report: bool = True,
) -> Both:
    """Calls twice from the same random state, without and with fastgen; the random states afterwards are equal.

    without: the context of the first call. must_report: else no report is made where fastgen is not asked.
    """
    torch.manual_seed(7)
    with without():
        stock = call()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    before = fastgen.explain()
    fast = call()
    assert torch.equal(state, torch.get_rng_state()), "the random state afterwards differs"
    report = None if fastgen.explain() is before else fastgen.explain()
    assert report is not None or not must_report
    return Both(stock, fast, report)


def outcome(call: Callable[[], Any], error: type[Exception] = Exception) -> Any:
    """What the call returns, or its error."""
    try:
        return call()
    except error as raised:
        return type(raised).__name__, str(raised)


def same_tokens(model: Any, inputs: dict[str, Any], **arguments: Any) -> Report:
    """As `assert_same`, for calls that return tokens only, whose loops and steps are fastgen's."""
    both = run_both(lambda: model.generate(**inputs, **arguments))
    assert torch.equal(both.stock, both.fast)
    return both.report


def assert_same(model: Any, inputs: dict[str, Any], tolerance: float = 1e-4, **arguments: Any) -> Report:
    """Generates with and without fastgen and compares all that is returned; gives fastgen's report."""
    return compared(model, inputs, tolerance, **arguments).report


def compared(model: Any, inputs: dict[str, Any], tolerance: float = 1e-4, **arguments: Any) -> Both:
    """As `assert_same`, for tests that want to look at the outputs, too."""
    arguments = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **arguments}
    both = run_both(lambda: model.generate(**inputs, **arguments))
    assert_equal_outputs(both.stock, both.fast, tolerance)
    return both


def assert_equal_outputs(stock: Any, fast: Any, tolerance: float = 1e-4, name: str = "output") -> None:
    """Equal types, shapes, integers; floating point numbers within the tolerance."""
    assert type(stock) is type(fast), f"{name}: {type(stock)} and {type(fast)}"
    if isinstance(stock, torch.Tensor):
        assert stock.shape == fast.shape, f"{name}: shapes {tuple(stock.shape)} and {tuple(fast.shape)}"
        assert stock.dtype == fast.dtype and stock.device == fast.device, f"{name}: {stock.dtype} and {fast.dtype}"
        if stock.is_floating_point():
            torch.testing.assert_close(fast, stock, atol=tolerance, rtol=tolerance, equal_nan=True, msg=_named(name))
        else:
            assert torch.equal(stock, fast), f"{name}: {stock.tolist()} and {fast.tolist()}"
    elif isinstance(stock, Cache):
        assert_equal_caches(stock, fast, tolerance)
    elif isinstance(stock, dict):  # a ModelOutput is one
        assert list(stock) == list(fast), f"{name}: {list(stock)} and {list(fast)}"
        for key in stock:
            assert_equal_outputs(stock[key], fast[key], tolerance, f"{name}.{key}")
    elif isinstance(stock, (tuple, list)):
        assert len(stock) == len(fast), f"{name}: {len(stock)} and {len(fast)} items"
        for index, (one, other) in enumerate(zip(stock, fast)):
            assert_equal_outputs(one, other, tolerance, f"{name}[{index}]")
    elif isinstance(stock, str) and stock != fast:  # fairseq's soft alignments are numbers in print
        assert float(fast) == pytest.approx(float(stock), abs=tolerance), f"{name}: {stock} and {fast}"
    else:
        assert stock == fast, f"{name}: {stock} and {fast}"


def assert_equal_caches(stock: Cache, fast: Cache, tolerance: float = 1e-4) -> None:
    """Equal classes all the way down, and equal keys and values that are plain tensors."""
    assert type(stock) is type(fast)
    if isinstance(stock, EncoderDecoderCache):
        assert stock.is_updated == fast.is_updated
        assert_equal_caches(stock.self_attention_cache, fast.self_attention_cache, tolerance)
        assert_equal_caches(stock.cross_attention_cache, fast.cross_attention_cache, tolerance)
        return
    assert [type(layer) for layer in stock.layers] == [type(layer) for layer in fast.layers]
    for index, (one, other) in enumerate(zip(stock.layers, fast.layers)):
        if isinstance(one, StaticLayer):
            assert_equal_outputs(list(vars(one).items()), list(vars(other).items()), tolerance, f"layer {index}")
        if type(one) in (DynamicLayer, DynamicSlidingWindowLayer):
            assert one.get_seq_length() == other.get_seq_length()
            assert vars(one).keys() == vars(other).keys()
            for name in ("keys", "values"):
                states = getattr(other, name)
                assert_equal_outputs(getattr(one, name), states, tolerance, f"{name}[{index}]")
                assert states is None or (type(states) is torch.Tensor and not states.requires_grad)


def is_shared(report: Report, *what: str) -> bool:
    """Whether the prefill ran once per input and each of `what` (PROMPT, CROSS) is kept once, and used in segments."""
    kept = all(any(item.startswith(wanted) for item in report.shared) for wanted in what)
    is_used = not report.kernels.keys().isdisjoint(OPERATIONS) and not is_materialized(report)
    return PREFILL in report.shared and kept and (not what or is_used)


def is_materialized(report: Report) -> bool:
    """Whether something needed shared keys in one piece."""
    return any(name.startswith(MATERIALIZED) for name in report.kernels)


def left_alone_because(report: Report, code: str, names: str = "") -> bool:
    """Whether nothing was shared, for a reason with this code whose text names what is in the way."""
    return not report.shared and any(one.code == code and names in one.text for _, one in report.not_done)


@contextmanager
def capturing(cuda_graphs: str = "on", smallest_capacity: int = 8, steps_before: int = 1) -> Iterator[None]:
    """Captures the steps of models and calls of any size; buffers begin so small that calls outgrow them."""
    thresholds = {"min_capture_steps": 1, "min_replays_on_gpu": 1}
    thresholds |= {"steps_before_capture": steps_before, "steps_before_capture_on_gpu": steps_before}
    with configured(cuda_graphs=cuda_graphs), costs(**thresholds), limits(smallest_capacity=smallest_capacity):
        yield


def replays(report: Report) -> int:
    return report.kernels[CAPTURED]


def not_captured_because(report: Report, code: str, names: str = "") -> bool:
    """Whether no step was replayed, for a reason with this code whose text names what is in the way."""
    reasons = [one for part, one in report.not_done if part == STEPS]
    return not replays(report) and any(one.code == code and names in one.text for one in reasons)


def filled_cache(model: torch.nn.Module, prefix: torch.Tensor) -> DynamicCache:
    """A cache that holds the prefix."""
    with torch.no_grad():
        return model(prefix, past_key_values=DynamicCache(config=model.config), use_cache=True).past_key_values


def _named(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"
