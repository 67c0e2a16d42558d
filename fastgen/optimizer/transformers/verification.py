"""Verify before trusting: compares a few steps of the original and of fastgen before the first use of a model class.

Done where nobody has compared them before: on a version of transformers newer than any tested, and for model classes
that are not part of transformers. A difference switches the patches off, altogether or for that class, with a warning
that says what differed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers import __version__ as transformers_version

from fastgen.optimizer import PATCH_SET, report
from fastgen.patching import disabled

STEPS = 4
GROUP = "transformers.shared_caches"

# The largest difference of scores that rounding explains.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}

# Model class, several beams, several sequences per input; and what differed, for classes that are left alone.
_verified: set[tuple[type, bool, bool]] = set()
_refused: dict[type, str] = {}


def is_tested(model: Any) -> bool:
    """Whether the model is one of transformers' own, and transformers no newer than the tests."""
    return _is_part_of_transformers(model) and not PATCH_SET.newer_than_tested("transformers")


def pending_reasons(model: Any, original: Callable, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """Why this call of `generate` cannot be trusted to fastgen yet; empty if it was verified, now or before."""
    if is_tested(model):
        return []
    arguments = inspect.signature(GenerationMixin.generate).bind_partial(model, *args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    del arguments["self"]
    key = (type(model), *_mode(model, arguments))
    if key in _verified or key[1:] == (False, False):
        return []
    if type(model) in _refused:
        return [_refused[type(model)]]
    stateful = [name for name, value in arguments.items() if not _may_be_used_twice(value)]
    if stateful:
        return [
            f"{_subject(model)} is not verified yet, and a call with {name} cannot be repeated" for name in stateful
        ]
    difference = compare(model, original, arguments)
    if difference:
        reason = f"{_subject(model)}: {difference}"
        if _is_part_of_transformers(model):
            PATCH_SET.fail(GROUP, reason)
        else:
            warnings.warn(f"fastgen leaves this model class alone: {reason}", RuntimeWarning, stacklevel=2)
        _refused[type(model)] = reason
        return [reason]
    _verified.add(key)
    return []


def compare(model: Any, original: Callable, arguments: dict[str, Any]) -> str:
    """What differs between the first steps of the original and of fastgen; empty if nothing does."""

    def first_steps() -> Any:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            return original(
                model,
                **arguments | {"return_dict_in_generate": True, "output_scores": True},
                stopping_criteria=StoppingCriteriaList([_StopAfter(STEPS)]),
            )

    with disabled():
        expected = first_steps()
    try:
        with report.recording(type(model).__name__):
            found = first_steps()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for step, (ours, theirs) in enumerate(zip(found.scores, expected.scores)):
        tolerance = TOLERANCES.get(model.dtype, TOLERANCES[torch.float32])
        if ours.shape != theirs.shape:
            return f"scores of step {step} have shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"scores of step {step} differ by {_largest_difference(ours, theirs):.2g}"
        if model.dtype not in (torch.float32, torch.float64):
            break  # a token may flip by rounding, and all scores after it
    else:
        if not torch.equal(found.sequences, expected.sequences):
            return "tokens differ"
    return ""


class _StopAfter(StoppingCriteria):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.steps -= 1
        return torch.full((input_ids.shape[0],), self.steps <= 0, dtype=torch.bool, device=input_ids.device)


def _mode(model: Any, arguments: dict[str, Any]) -> tuple[bool, bool]:
    """Whether there are several beams, and whether there are several sequences per input."""
    configs = (arguments.get("generation_config"), model.generation_config)

    def value(name: str) -> int:
        given = [arguments.get(name), *(getattr(config, name, None) for config in configs)]
        return next((number for number in given if number is not None), 1)

    return value("num_beams") > 1, value("num_return_sequences") > 1


def _is_part_of_transformers(model: Any) -> bool:
    return type(model).__module__.split(".")[0] == "transformers"


def _may_be_used_twice(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, Tensor, GenerationConfig))


def _subject(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__name__} on transformers {transformers_version}"


def _largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return (ours.nan_to_num(neginf=-1e9) - theirs.nan_to_num(neginf=-1e9)).abs().max().item()
