"""Comparisons of fastgen with the library: `fastgen.verify` of a model, and that before the first use of a model class.

The latter is done where nobody has compared them before: on a version of transformers newer than any tested, and for
model classes that are not part of transformers. It is done inside the first prefill that would share: the call is
repeated for a few steps by the original, and by fastgen with everything shared and with nothing shared, however short
the prompt. A difference switches the patches off, altogether or for that class, with a warning that says what differed.

Tests: tests/optimizer/transformers/test_verification.py, tests/optimizer/test_verify.py
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers import __version__ as transformers_version
from transformers.utils import logging

from fastgen.models.cache_names import CACHE_NAMES
from fastgen.ops.kernel import tolerance
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import GenerateCall, undo_of_random_numbers
from fastgen.optimizer.decoding.report import Reason, that_hold
from fastgen.optimizer.decoding.verify import (
    ABSENT,
    Difference,
    NotComparable,
    first_token_difference,
    is_verified,
    verify_once,
)
from fastgen.optimizer.transformers import checks
from fastgen.optimizer.transformers.checks import HostModel, generate_call, is_known_class
from fastgen.patching import disabled, warn

STEPS = 4

# A model that differs more often than this between calls is not compared any more.
MOST = 8
GROUP = "transformers.shared_caches"

# Settings of how tokens are chosen, of lengths and of outputs: the scores of a sequence that is there already are those
# of a greedy call.
_NOT_OF_SCORES = frozenset({
    "num_beams", "num_return_sequences", "do_sample", "early_stopping", "length_penalty", "streamer",
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "stopping_criteria",
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
})  # fmt: skip

# How often models were compared, by what they have in common, see `_key`. What differed, for classes left alone.
_compared: Counter[tuple] = Counter()
_refused: dict[type, str] = {}

# Held during a comparison, which changes the state of all threads' random numbers. Nobody waits for it: the model's
# code runs inside, and that may wait for others.
_COMPARING = threading.Lock()


def refused_reasons(model: HostModel) -> list[Reason]:
    """What differed when the model's class was compared; empty if nothing did, or if it was not compared yet."""
    return [Reason("DIFFERS", _refused[type(model)])] if type(model) in _refused else []


def call_to_verify(original: Callable, model: HostModel, args: tuple, kwargs: dict[str, Any]) -> partial:
    """Returns the unpatched `generate` of this model with all arguments by name."""
    arguments = inspect.signature(GenerationMixin.generate).bind_partial(model, *args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    del arguments["self"]
    return partial(original, model, **arguments)


def first_use_reasons(model: HostModel, generation_config: Any, prompt_length: int, call: GenerateCall) -> list[Reason]:
    """Why a call that shares cannot be trusted to fastgen; compares first where that was not done yet."""
    original, steps = call.host.to_verify, (generation_config.max_length or 0) - prompt_length
    if original is None and call.host.share is not None:  # in `_first_steps_difference`
        return []
    if original is None or original.args[0] is not model:
        unfit = ["this call has nothing to compare"]
    elif is_verified(key := _key(original, generation_config, call)):
        return []
    elif _compared[key[1:]] >= MOST:
        unfit = ["what its modules hold changes from call to call"]
    else:
        stateful = [name for name, value in original.keywords.items() if _has_state(value)]
        unfit = [f"a call with {name} cannot be repeated" for name in stateful]
        unfit += [f"a call for fewer than {STEPS} new tokens shows too little"] * (steps < STEPS)
        if not unfit and not _COMPARING.acquire(blocking=False):
            unfit = ["another comparison is running"]
    if not unfit:
        try:
            _compared[key[1:]] += 1
            verify_once(key, partial(_first_steps_difference, original), partial(_refuse, model))
        except NotComparable:
            unfit = ["its first steps show nothing to compare"]
        finally:
            _COMPARING.release()
    texts = [f"{_subject(model)} is not verified yet, and {reason}" for reason in unfit]
    return that_hold(("UNVERIFIED", "{}", texts)) or refused_reasons(model)


def _first_steps_difference(original: partial) -> Difference | None:
    """Returns what differs in the first steps of this call; raises NotComparable if they show nothing.

    Prompts of any length are shared, so that those to come go through code that was compared, and then none.
    """
    model, restore = original.args[0], undo_of_random_numbers()

    def first_steps() -> Any:
        restore()
        stop = StoppingCriteriaList([_StopAfter(STEPS)])
        return original(return_dict_in_generate=True, output_logits=True, min_new_tokens=STEPS, stopping_criteria=stop)

    try:
        try:
            with disabled():
                expected = first_steps()
        except Exception as error:  # which the call that follows will raise as well, if it is the program's
            raise NotComparable from error
        if len(expected.logits) < STEPS:
            raise NotComparable
        for share in (True, False):
            with generate_call(model) as call:
                call.host.user_code, call.host.share = not is_known_class(model), share
                try:
                    output = first_steps()
                except Exception as error:
                    return Difference(f"{type(error).__name__}: {error}")
            if not call.is_accelerated:
                raise NotComparable
            if different := first_difference(output, expected, model):
                return different
        return None
    finally:
        restore()


def _refuse(model: HostModel, different: Difference) -> None:
    _refused[type(model)] = reason = f"{_subject(model)}: {different}"
    if is_known_class(model):
        PATCH_SET.fail(GROUP, reason)
    else:
        warn(f"fastgen leaves this model class alone: {reason}")


def first_difference(output: Any, expected: Any, model: HostModel) -> Difference | None:
    """Returns the difference between the outputs of two calls of `generate` with their logits; None if there is none.

    In half precision rounding may change tokens, and all that follows them.
    """
    is_half = model.dtype not in (torch.float32, torch.float64)
    for step, (ours, theirs) in enumerate(zip(output.logits, expected.logits)):
        if ours.shape != theirs.shape:
            text = f"logits of step {step} have shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
            return Difference(text, step)
        atol = tolerance("logits", model.dtype) * theirs.nan_to_num(posinf=0, neginf=0).abs().max().item()
        equal = torch.isclose(ours, theirs, rtol=0, atol=atol, equal_nan=True).all(dim=-1)  # [rows]
        if equal.float().mean() < (0.5 if is_half and step else 1):
            apart = (ours.nan_to_num(neginf=-1e9) - theirs.nan_to_num(neginf=-1e9)).abs()
            row, token = divmod(int(apart.argmax()), apart.shape[-1])
            text = f"logits of step {step} differ by {apart.max().item():.2g} in row {row}, token {token}"
            return Difference(text, step, row, ours[row, token].item(), theirs[row, token].item())
    start = output.sequences.shape[1] - len(output.logits)
    return None if is_half else first_token_difference(output.sequences, expected.sequences, start)


class _StopAfter(StoppingCriteria):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.steps -= 1
        return torch.full((input_ids.shape[0],), self.steps <= 0, dtype=torch.bool, device=input_ids.device)


def _key(original: partial, generation_config: Any, call: GenerateCall) -> tuple:
    """What decides which code a model runs, and whether a comparison shows it; the model's likeness first.

    That holds its classes and their code, training flags, attributes and configuration. Also the names of what its
    forward is given; whether rows are moved or sampled, and whether there is more than one input: what is made for one
    fits all rows.
    """
    model, config = original.args[0], generation_config
    several = ((config.num_beams or 1) > 1, (config.num_return_sequences or 1) > 1, call.inputs > 1)
    known = inspect.signature(GenerationMixin.generate).parameters.keys() | vars(config).keys()
    likeness = call.facts_of(model, checks.KNOWN).likeness()
    return likeness, type(model), frozenset(original.keywords.keys() - known), *several


def _has_state(value: Any) -> bool:
    """Whether a second call might find it changed by the first."""
    if isinstance(value, (list, tuple)):
        return any(_has_state(item) for item in value)
    return value is not None and not isinstance(value, (bool, int, float, str, Tensor, GenerationConfig))


def _subject(model: HostModel) -> str:
    return f"{type(model).__module__}.{type(model).__name__} on transformers {transformers_version}"


# `fastgen.verify`.


@dataclass
class TransformersCall:
    """`model.generate(inputs, **kwargs)`, or `model.generate(**inputs, **kwargs)` where inputs are a mapping."""

    model: HostModel
    inputs: Any
    kwargs: dict[str, Any]
    host: str = "transformers"

    def run(self) -> Any:
        if isinstance(self.inputs, Mapping):
            return self.model.generate(**self.inputs, **self.kwargs)
        return self.model.generate(self.inputs, **self.kwargs)

    def rows_of(self, output: Any) -> int:
        return next(iter(_tensors(output))).shape[0]

    def difference(self, ours: Any, theirs: Any) -> Difference | None:
        """Returns where outputs differ: in tokens first, with the scores of both sequences; then in other tensors."""
        tokens = _sequences(ours), _sequences(theirs)
        if tokens[0] is not None and tokens[1] is not None:
            start = self._generated_from()
            different = first_token_difference(*tokens, start)
            if different is not None:
                return self._with_scores(different, tokens, start)
        for index, (one, other) in enumerate(zip(_tensors(ours), _tensors(theirs))):
            if one.shape != other.shape:
                return Difference(f"output {index} has shape {tuple(one.shape)} instead of {tuple(other.shape)}")
            atol = tolerance("logits", one.dtype) * max(other.nan_to_num(0, 0, 0).abs().max().item(), 1)
            if one.is_floating_point() and not torch.allclose(one, other, rtol=0, atol=atol, equal_nan=True):
                return Difference(f"output {index} differs by {(one - other).abs().max().item():.2g}")
        return None

    def _generated_from(self) -> int:
        """The column of the sequences with the first generated token."""
        inputs = self.inputs.get("input_ids") if isinstance(self.inputs, Mapping) else self.inputs
        if is_decoder := self.model.config.is_encoder_decoder:
            inputs = self.kwargs.get("decoder_input_ids")
        return int(is_decoder) if inputs is None else inputs.shape[1]

    def _with_scores(self, different: Difference, tokens: tuple[Tensor, Tensor], start: int) -> Difference:
        """The sums of the log-probabilities of both rows: of beams whole, of others up to where they differ."""
        if different.row is None or different.step is None:
            return different
        beams = self.kwargs.get("num_beams", self.model.generation_config.num_beams) or 1
        length = None if beams > 1 else start + different.step + 1
        rows = [sequences[different.row, :length] for sequences in tokens]
        try:
            ours, theirs = (self._log_prob_sum(different.row, len(tokens[0]), row[row != ABSENT]) for row in rows)
        except (TypeError, ValueError) as error:  # a generate of the model's own that takes no processors
            text = f"{different.text} (scores are not known: {type(error).__name__}: {error})"
            return replace(different, text=text)
        return replace(different, ours=ours, theirs=theirs)

    def _log_prob_sum(self, row: int, rows: int, sequence: Tensor) -> float:
        """Returns the sum over a sequence `[length]`, the prompt included, for the input of this one of so many rows.

        A greedy call is made to generate it for each input.
        """
        kwargs = {name: value for name, value in self.kwargs.items() if name not in _NOT_OF_SCORES}
        kwargs |= {"num_beams": 1, "num_return_sequences": 1, "do_sample": False, "max_new_tokens": len(sequence)}
        kwargs |= {"return_dict_in_generate": True, "output_logits": True}
        kwargs["prefix_allowed_tokens_fn"] = lambda _, input_ids: [int(sequence[len(input_ids)])]
        kwargs["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(len(sequence))])
        level = logging.get_verbosity()
        logging.set_verbosity_error()  # of settings that are meant for beams or samples
        try:
            logits = torch.stack(replace(self, kwargs=kwargs).run().logits, dim=1)  # [inputs, steps, vocabulary_size]
        finally:
            logging.set_verbosity(level)
        log_probs = logits[row * len(logits) // rows].log_softmax(dim=-1)
        return log_probs.gather(1, sequence[-len(log_probs) :, None]).sum().item()


def _sequences(output: Any) -> Tensor | None:
    """The tokens `[rows, length]` of an output; None if it has none, as that of a model which speaks."""
    sequences = output.get("sequences") if isinstance(output, Mapping) else output
    is_tokens = isinstance(sequences, Tensor) and sequences.dim() == 2 and not sequences.is_floating_point()
    return sequences if is_tokens else None


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, in order; those of caches are left out."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = [value for name, value in output.items() if name not in CACHE_NAMES]
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, (list, tuple)) else []
