"""Verify before trusting: compares a few steps of the original and of fastgen before the first use of a model class.

Done where nobody has compared them before: on a version of transformers newer than any tested, and for model classes
that are not part of transformers. It is done inside the first prefill that would share: the call is repeated for a few
steps by the original, and by fastgen with everything shared and with nothing shared, however short the prompt. A
difference switches the patches off, altogether or for that class, with a warning that says what differed.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers import __version__ as transformers_version

from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import GenerateCall, generate_call
from fastgen.optimizer.decoding.graphs import TOLERANCES
from fastgen.optimizer.decoding.reasons import Reason, with_code
from fastgen.origin import packages_of
from fastgen.patching import disabled, warn

STEPS = 4
GROUP = "transformers.shared_caches"

# Keys of what was compared, see `_key`; and what differed, for classes that are left alone.
_verified: set[tuple] = set()
_refused: dict[type, str] = {}

# Held during a comparison, which changes the state of all threads' random numbers. Nobody waits for it: the model's
# code runs inside, and that may wait for others.
_COMPARING = threading.Lock()


@dataclass
class HostCall:
    """What a call of `generate` was given, and the unpatched `generate`."""

    model: Any
    arguments: dict[str, Any]
    original: Callable


def is_tested(model: Any) -> bool:
    """Whether the model is one of transformers' or fastgen's own, and transformers no newer than the tests."""
    return is_known_class(model) and not PATCH_SET.newer_than_tested("transformers")


def is_known_class(model: Any) -> bool:
    """Whether the model's class is of transformers or of fastgen, whose parity the tests compare."""
    return packages_of(type(model)) <= {"transformers", "fastgen"}


def refused_reasons(model: Any) -> list[Reason]:
    """What differed when the model's class was compared; empty if nothing did, or if it was not compared yet."""
    return [Reason("DIFFERS", _refused[type(model)])] if type(model) in _refused else []


def call_to_verify(original: Callable, model: Any, args: tuple, kwargs: dict[str, Any]) -> HostCall | None:
    """What `first_use_reasons` needs to know of a call of `generate`; None for models that nobody has to compare."""
    if is_tested(model):
        return None
    arguments = inspect.signature(GenerationMixin.generate).bind_partial(model, *args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    del arguments["self"]
    return HostCall(model, arguments, original)


def first_use_reasons(model: Any, generation_config: Any, prompt_length: int, call: GenerateCall) -> list[Reason]:
    """Why a call that shares cannot be trusted to fastgen; compares first where that was not done yet."""
    host_call = call.to_verify
    if is_tested(model) or (host_call is None and call.share is not None):  # the latter in `compare`
        return []
    if host_call is None or host_call.model is not model:
        return [Reason("UNVERIFIED", f"{_subject(model)} is not verified yet, and this call has nothing to compare")]
    key = _key(host_call, generation_config, call)
    if key in _verified:
        return []
    stateful = [name for name, value in host_call.arguments.items() if _has_state(value)]
    unfit = [f"a call with {name} cannot be repeated" for name in stateful]
    if (generation_config.max_length or 0) - prompt_length < STEPS:
        unfit.append(f"a call for fewer than {STEPS} new tokens shows too little")
    if not unfit and not _COMPARING.acquire(blocking=False):
        unfit.append("another comparison is running")
    if not unfit:
        try:
            unfit = _verify(key, host_call)
        finally:
            _COMPARING.release()
    texts = [f"{_subject(model)} is not verified yet, and {reason}" for reason in unfit]
    return with_code("UNVERIFIED", texts) or refused_reasons(model)


def _verify(key: tuple, host_call: HostCall) -> list[str]:
    """Compares and notes what came out; returns why nothing did, if so."""
    states = _random_states()
    try:
        difference = compare(host_call, states)
    finally:
        _restore(states)
    if difference is None:
        return ["its first steps show nothing to compare"]
    if difference:
        _refused[type(host_call.model)] = reason = f"{_subject(host_call.model)}: {difference}"
        if is_known_class(host_call.model):
            PATCH_SET.fail(GROUP, reason)
        else:
            warn(f"fastgen leaves this model class alone: {reason}")
    else:
        _verified.add(key)
    return []


def _random_states() -> tuple:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, numpy.random.get_state(), random.getstate()


def _restore(states: tuple) -> None:
    cpu, cuda, of_numpy, of_python = states
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    numpy.random.set_state(of_numpy)
    random.setstate(of_python)


def compare(host_call: HostCall, random_states: tuple) -> str | None:
    """What differs between the first steps of the original and of fastgen; empty if nothing does.

    Prompts of any length are shared, so that those to come go through code that was compared, and then none. None if
    the original fails or stops, or if fastgen shares nothing, so that there is nothing to compare.
    """

    model, dtype = host_call.model, host_call.model.dtype

    def first_steps() -> Any:
        _restore(random_states)
        stop = StoppingCriteriaList([_StopAfter(STEPS)])
        others = {"return_dict_in_generate": True, "output_logits": True, "min_new_tokens": STEPS}
        return host_call.original(model, **host_call.arguments | others | {"stopping_criteria": stop})

    try:
        with disabled():
            expected = first_steps()
        if len(expected.logits) < STEPS:
            return None
    except Exception:  # which the call that follows will raise as well, if it is the program's
        return None
    for share in (True, False):
        with generate_call(type(model).__name__) as call:
            call.user_code, call.share = not is_known_class(model), share
            try:
                found = first_steps()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        if not call.is_accelerated:
            return None
        if difference := _difference(found, expected, dtype):
            return difference
    return ""


def _difference(found: Any, expected: Any, dtype: torch.dtype) -> str:
    """Between the outputs of two calls; in half precision, rounding may change tokens and what follows them."""
    is_half = dtype not in (torch.float32, torch.float64)
    for step, (ours, theirs) in enumerate(zip(found.logits, expected.logits)):
        if ours.shape != theirs.shape:
            return f"logits of step {step} have shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
        largest = theirs.nan_to_num(posinf=0, neginf=0).abs().max().item()
        tolerance = TOLERANCES.get(dtype, TOLERANCES[torch.float32]) * largest
        equal = torch.isclose(ours, theirs, rtol=0, atol=tolerance, equal_nan=True).all(dim=-1)  # [rows]
        if equal.float().mean() < (0.5 if is_half and step else 1):
            difference = (ours.nan_to_num(neginf=-1e9) - theirs.nan_to_num(neginf=-1e9)).abs().max().item()
            return f"logits of step {step} differ by {difference:.2g}"
    if not is_half and not torch.equal(found.sequences, expected.sequences):
        return "tokens differ"
    return ""


class _StopAfter(StoppingCriteria):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.steps -= 1
        return torch.full((input_ids.shape[0],), self.steps <= 0, dtype=torch.bool, device=input_ids.device)


def _key(host_call: HostCall, generation_config: Any, call: GenerateCall) -> tuple:
    """What decides which code a model runs, and whether a comparison shows it.

    The classes of its modules with their forwards, its attention and dtype, the names of what its forward is given;
    whether rows are moved or sampled, and whether there is more than one input: what is made for one fits all rows.
    """
    model, beams = host_call.model, generation_config.num_beams or 1
    code = frozenset((type(module), type(module).forward) for module in model.modules())
    several = (beams > 1, (generation_config.num_return_sequences or 1) > 1, call.inputs > 1)
    attention = getattr(model.config, "_attn_implementation", None)
    own = inspect.signature(GenerationMixin.generate).parameters.keys() | vars(generation_config).keys()
    return type(model), code, attention, model.dtype, frozenset(host_call.arguments.keys() - own), *several


def _has_state(value: Any) -> bool:
    """Whether a second call might find it changed by the first."""
    if isinstance(value, (list, tuple)):
        return any(_has_state(item) for item in value)
    return value is not None and not isinstance(value, (bool, int, float, str, Tensor, GenerationConfig))


def _subject(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__name__} on transformers {transformers_version}"
