"""Whether the decode steps of a call can be captured, and whether that pays: as far as it is the same for all hosts.

Tests: tests/optimizer/transformers/test_recorded_step.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fastgen.config import CONFIG
from fastgen.ops.transforms import is_transformed, is_watched
from fastgen.optimizer.decoding.call import add_reasons, costs
from fastgen.optimizer.decoding.graphs import graphs_of
from fastgen.optimizer.decoding.model_facts import ModelFacts, first_weight, size_of
from fastgen.optimizer.decoding.reasons import STEPS, Reason


def unwanted_reasons(device: torch.device, steps: int) -> list[Reason]:
    """Why so many steps are not captured whatever the model is; empty if they may be."""
    if CONFIG.cuda_graphs == "off":
        return [Reason("CAPTURE_OFF", "FASTGEN_CUDA_GRAPHS=off")]
    if device.type == "cuda" and CONFIG.cuda_graphs == "auto":
        return [Reason("GPU_OPT_IN", "not yet run on a GPU (FASTGEN_CUDA_GRAPHS=on switches it on)")]
    if device.type not in ("cuda", "cpu"):
        return [Reason("DEVICE", f"the model is on {device.type} (supported: cuda, cpu)")]
    least = costs().min_capture_steps
    if steps < least:
        return [Reason("FEW_STEPS", f"the call has fewer than {least} steps", f"at most {max(steps, 0)}")]
    return []


def can_capture(model: nn.Module, decoder: nn.Module, steps: int, reasons: Callable[[], Sequence[Reason]]) -> bool:
    """Whether a loop of at most so many steps should try to; tells the report why not. reasons: of the host."""
    weight = _weight_of(decoder)
    found = unwanted_reasons(weight.device, steps)
    found = found or graphs_of(model, weight).refused or [*reasons()]
    add_reasons(STEPS, found)
    return not found


def is_new_wanted(decoder: nn.Module, rows: int, done: int, left: int) -> bool:
    """Whether to capture a graph after so many steps, with at most so many to come."""
    model = costs()
    return done >= model.steps_before_capture and model.should_capture(size_of(decoder), rows, left, is_captured=False)


def unsupported_reasons(decoder: nn.Module, rows: int, steps: int) -> list[Reason]:
    """Why at most so many steps of so many rows are not captured; empty if they can be.

    decoder: the model, or the part of it that a step calls.
    """
    weight = _weight_of(decoder)
    reasons: list[Reason] = []
    if _rounds_otherwise(weight):
        reasons.append(Reason("HALF_PRECISION", f"{weight.dtype} would be rounded in another way on a CPU"))
    elif not costs().should_capture(size_of(decoder), rows, steps, is_captured=True):
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


def device_reasons(facts: ModelFacts) -> list[Reason]:
    """Why the steps of a model with its weights where they are cannot be captured."""
    if facts.is_sharded:
        return [Reason("SHARDED", "parts of the model are sharded, and gathered in each step")]
    return [Reason("SEVERAL_DEVICES", "the model is on several devices")] if len(facts.devices) > 1 else []


def _weight_of(decoder: nn.Module) -> Tensor:
    return first_weight(decoder)


def _rounds_otherwise(weight: Tensor) -> bool:
    """Whether hidden positions may change tokens: in half precision, where logits are often equal."""
    return weight.is_cpu and CONFIG.cuda_graphs != "on" and weight.dtype not in (torch.float32, torch.float64)
