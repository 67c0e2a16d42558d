"""Checks that all hosts share: whether the decode steps of a call can be captured, and whether that pays.

Tests: tests/optimizer/transformers/test_captured_steps.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fastgen.config import CONFIG
from fastgen.ops.tracing import is_transformed, is_watched
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.graphs import graphs_of
from fastgen.optimizer.decoding.model_facts import KnownCode, first_weight, size_of
from fastgen.optimizer.decoding.reasons import STEPS, Reason

Check = Callable[[], Sequence[Reason]]


def unwanted_reasons(call: GenerateCall, device: torch.device, steps: int) -> list[Reason]:
    """Why so many steps are not captured whatever the model is; empty if they may be."""
    if CONFIG.cuda_graphs == "off":
        return [Reason("CAPTURE_OFF", "FASTGEN_CUDA_GRAPHS=off")]
    if device.type == "cuda" and CONFIG.cuda_graphs == "auto":
        return [Reason("GPU_OPT_IN", "not yet run on a GPU (FASTGEN_CUDA_GRAPHS=on switches it on)")]
    if device.type not in ("cuda", "cpu"):
        return [Reason("DEVICE", f"the model is on {device.type} (supported: cuda, cpu)")]
    least = call.costs.min_capture_steps
    if steps < least:
        return [Reason("FEW_STEPS", f"the call has fewer than {least} steps", f"at most {max(steps, 0)}")]
    return []


def can_capture(
    call: GenerateCall,
    model: nn.Module,
    decoder: nn.Module,
    rows: int,
    steps: int,
    known: KnownCode,
    host_reasons: Check,
    row_reasons: Check,
) -> bool:
    """Whether a loop of at most so many steps of so many rows should try to; tells the report why not.

    decoder: the model, or the part of it that a step calls. The cheap checks come first, those that look at all modules
    last: host_reasons, of the call's arguments; row_reasons, of the model's code.
    """
    if (weight := first_weight(decoder)) is None:  # it computes nothing
        return False
    checks: tuple[Check, ...] = (
        lambda: unwanted_reasons(call, weight.device, steps),
        lambda: graphs_of(model, weight).refused,
        host_reasons,
        lambda: _surroundings_reasons(call, decoder, weight, rows, steps),
        row_reasons,
        lambda: _placement_reasons(call, model, known),
    )
    found = next((reasons for check in checks if (reasons := check())), ())
    call.report.add_reasons(STEPS, found)
    return not found


def _surroundings_reasons(
    call: GenerateCall, decoder: nn.Module, weight: Tensor, rows: int, steps: int
) -> list[Reason]:
    reasons = []
    if weight.is_cpu and CONFIG.cuda_graphs != "on" and weight.dtype not in (torch.float32, torch.float64):
        # Logits are often equal there, and hidden positions may change which is the largest.
        reasons.append(Reason("HALF_PRECISION", f"{weight.dtype} would be rounded in another way on a CPU"))
    elif not call.costs.should_capture(size_of(decoder), rows, steps, is_captured=True):
        text = f"{steps} steps of {rows} rows would save less than the capture costs"
        reasons.append(Reason("NOT_WORTH_CAPTURING", text))
    if torch.is_autocast_enabled(weight.device.type):
        reasons.append(Reason("AUTOCAST", "autocast keeps copies of weights that a capture would outlive"))
    if is_transformed() or is_watched():
        text = "a TorchDispatchMode, TorchFunctionMode or functorch transform is active"
        reasons.append(Reason("TORCH_MODE", text))
    if weight.is_cuda and torch.cuda.current_stream(weight.device).cuda_stream:
        reasons.append(Reason("CUDA_STREAM", "the program computes on a stream other than the default"))
    return reasons


def _placement_reasons(call: GenerateCall, model: nn.Module, known: KnownCode) -> list[Reason]:
    facts = call.facts_of(model, known)
    if facts.is_sharded:
        return [Reason("SHARDED", "parts of the model are sharded, and gathered in each step")]
    return [Reason("SEVERAL_DEVICES", "the model is on several devices")] if len(facts.devices) > 1 else []
