"""Comparisons of `generate` under fastgen with `generate` of the unpatched library, in one process.

`run_both` and `assert_equal_outputs` serve both hosts; fairseq_generation.py says how fairseq is called.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache, StaticLayer

import fastgen
from fastgen.optimizer.decoding.report import Report

# Older versions have no layers with keys and states.
HYBRID = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", DynamicLayer)


class Both(NamedTuple):
    """The outputs of the unpatched library and of fastgen, and fastgen's report."""

    stock: Any
    fast: Any
    report: Report | None


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
    """Asserts equal classes all the way down, equal states, and equal keys and values that are plain tensors."""
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
        if type(expected) in (DynamicLayer, DynamicSlidingWindowLayer, HYBRID):
            assert expected.get_seq_length() == layer.get_seq_length()
            assert vars(expected).keys() == vars(layer).keys()
            for name in ("keys", "values"):
                states = getattr(layer, name)
                assert_equal_outputs(getattr(expected, name), states, tolerance, f"{name}[{index}]")
                assert states is None or (type(states) is torch.Tensor and not states.requires_grad)
        for name in ("conv_states", "recurrent_states", "has_previous_state"):  # of linear attention
            if isinstance(states := getattr(expected, name, None), dict):
                assert_equal_outputs(dict(states), dict(getattr(layer, name)), tolerance, f"{name}[{index}]")
