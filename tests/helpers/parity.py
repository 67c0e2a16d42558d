"""Comparisons of `generate` under fastgen with `generate` of the unpatched library, in one process.

`run_both` and `assert_equal_outputs` serve both hosts; fairseq_generation.py says how fairseq is called.
"""

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
    """The outputs of the unpatched library and of fastgen, and fastgen's report."""

    stock: Any
    fast: Any
    report: Report | None


def lively(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Makes weights so large that attention has a say: with the usual 0.02 a wrong key would change no token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.2 * parameter.shape[1] ** -0.5, generator=generator)
    return model


def tiny(name: str, **overrides: Any) -> torch.nn.Module:
    """The tiny lively model of an architecture; name: as in `architecture_of`; overrides: of its configuration."""
    return lively(architecture_of(name, **overrides).model())


unchanged = functools.cache(tiny)  # for calls that leave the model as it is: built once in a process


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
    call: Callable[[], Any], without: Callable[[], AbstractContextManager] = fastgen.disabled, must_report: bool = True
) -> Both:
    """Calls twice from the same random state, without and with fastgen; the random states afterwards are equal.

    without: the context of the first call. must_report: False if fastgen may not be asked.
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
    """Returns the result of the call, or its error."""
    try:
        return call()
    except error as raised:
        return type(raised).__name__, str(raised)


def same_tokens(model: Any, inputs: dict[str, Any], **arguments: Any) -> Report:
    """Compares calls like `assert_same`, but tokens only, whose loops and steps are fastgen's."""
    both = run_both(lambda: model.generate(**inputs, **arguments))
    assert torch.equal(both.stock, both.fast)
    return both.report


def assert_same(model: Any, inputs: dict[str, Any], tolerance: float = 1e-4, **arguments: Any) -> Report:
    """Generates with and without fastgen and compares all outputs; returns fastgen's report."""
    return compared(model, inputs, tolerance, **arguments).report


def compared(model: Any, inputs: dict[str, Any], tolerance: float = 1e-4, **arguments: Any) -> Both:
    """Compares calls like `assert_same`; returns the outputs, too."""
    arguments = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **arguments}
    both = run_both(lambda: model.generate(**inputs, **arguments))
    assert_equal_outputs(both.stock, both.fast, tolerance)
    return both


def assert_equal_outputs(stock: Any, fast: Any, tolerance: float = 1e-4, name: str = "output") -> None:
    """Asserts equal types, shapes and integers, and floating point numbers within the tolerance."""
    assert type(stock) is type(fast), f"{name}: {type(stock)} and {type(fast)}"
    if isinstance(stock, torch.Tensor):
        assert stock.shape == fast.shape, f"{name}: shapes {tuple(stock.shape)} and {tuple(fast.shape)}"
        assert stock.dtype == fast.dtype and stock.device == fast.device, f"{name}: {stock.dtype} and {fast.dtype}"
        if stock.is_floating_point():
            torch.testing.assert_close(
                fast, stock, atol=tolerance, rtol=tolerance, equal_nan=True, msg=lambda message: f"{name}: {message}"
            )
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
        for index, (expected, output) in enumerate(zip(stock, fast)):
            assert_equal_outputs(expected, output, tolerance, f"{name}[{index}]")
    elif isinstance(stock, str) and stock != fast:  # fairseq's soft alignments are numbers in print
        assert float(fast) == pytest.approx(float(stock), abs=tolerance), f"{name}: {stock} and {fast}"
    else:
        assert stock == fast, f"{name}: {stock} and {fast}"


def assert_equal_caches(stock: Cache, fast: Cache, tolerance: float = 1e-4) -> None:
    """Asserts equal classes all the way down, and equal keys and values that are plain tensors."""
    assert type(stock) is type(fast)
    if isinstance(stock, EncoderDecoderCache):
        assert stock.is_updated == fast.is_updated
        assert_equal_caches(stock.self_attention_cache, fast.self_attention_cache, tolerance)
        assert_equal_caches(stock.cross_attention_cache, fast.cross_attention_cache, tolerance)
        return
    assert [type(layer) for layer in stock.layers] == [type(layer) for layer in fast.layers]
    for index, (expected, layer) in enumerate(zip(stock.layers, fast.layers)):
        if isinstance(expected, StaticLayer):
            assert_equal_outputs(list(vars(expected).items()), list(vars(layer).items()), tolerance, f"layer {index}")
        if type(expected) in (DynamicLayer, DynamicSlidingWindowLayer):
            assert expected.get_seq_length() == layer.get_seq_length()
            assert vars(expected).keys() == vars(layer).keys()
            for name in ("keys", "values"):
                states = getattr(layer, name)
                assert_equal_outputs(getattr(expected, name), states, tolerance, f"{name}[{index}]")
                assert states is None or (type(states) is torch.Tensor and not states.requires_grad)


def is_shared(report: Report, *what: str) -> bool:
    """Tells whether the prefill ran once per input, and each of `what` (PROMPT, CROSS) is stored once, in segments."""
    is_stored_once = all(any(item.startswith(wanted) for item in report.shared) for wanted in what)
    is_used = not report.kernels.keys().isdisjoint(OPERATIONS) and not is_materialized(report)
    return PREFILL in report.shared and is_stored_once and (not what or is_used)


def is_materialized(report: Report) -> bool:
    """Tells whether something needed shared keys in one piece."""
    return any(name.startswith(MATERIALIZED) for name in report.kernels)


def left_alone_because(report: Report, code: str, names: str = "") -> bool:
    """Tells whether nothing was shared, for a reason with this code and these names in its text."""
    return not report.shared and any(reason.code == code and names in reason.text for _, reason in report.not_done)


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
    """Tells whether no step was replayed, for a reason with this code and these names in its text."""
    reasons = [reason for part, reason in report.not_done if part == STEPS]
    return not replays(report) and any(reason.code == code and names in reason.text for reason in reasons)


def filled_cache(model: torch.nn.Module, prefix: torch.Tensor) -> DynamicCache:
    """Returns a cache that holds the prefix."""
    with torch.no_grad():
        return model(prefix, past_key_values=DynamicCache(config=model.config), use_cache=True).past_key_values
