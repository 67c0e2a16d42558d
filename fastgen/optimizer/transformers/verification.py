"""Comparisons of fastgen with the library: `fastgen.verify`, and the comparison before the first use of a model class.

The second is made if no test has compared them: on a version of transformers newer than any tested, and for model
classes that are not part of transformers. It runs inside the first prefill that would share: the original repeats the
call for a few steps, and so does fastgen, with everything shared and with nothing shared, however short the prompt. A
difference switches the patches off, altogether or for that class, with a warning that says what differed.

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

# A model whose facts change more often than this between calls is not compared any more.
MOST = 8
GROUP = "transformers.shared_caches"

# Settings that choose tokens, lengths and outputs: a greedy call without them scores an existing sequence.
_NOT_OF_SCORES = frozenset({
    "num_beams", "num_return_sequences", "do_sample", "early_stopping", "length_penalty", "streamer",
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "stopping_criteria",
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
})  # fmt: skip

# The number of comparisons by `_key`; and what differed, for classes that are left alone.
_compared: Counter[tuple] = Counter()
_refused: dict[type, str] = {}

# Held during a comparison, which changes the random state of all threads. Nobody waits for it: the model's code runs
# inside, and might wait for other threads.
_COMPARING = threading.Lock()


def refused_reasons(model: HostModel) -> list[Reason]:
    """Returns what differed when the model's class was compared; empty if nothing did, or without a comparison."""
    return [Reason("DIFFERS", _refused[type(model)])] if type(model) in _refused else []


def call_to_verify(original: Callable, model: HostModel, args: tuple, kwargs: dict[str, Any]) -> partial:
    """Returns the unpatched `generate` of this model, with all arguments by name."""
    arguments = inspect.signature(GenerationMixin.generate).bind_partial(model, *args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    del arguments["self"]
    return partial(original, model, **arguments)


def first_use_reasons(model: HostModel, generation_config: Any, prompt_length: int, call: GenerateCall) -> list[Reason]:
    """Returns why a call that shares cannot be trusted to fastgen; compares it first if that was not done yet."""
    original, steps = call.host.to_verify, (generation_config.max_length or 0) - prompt_length
    if original is None and call.host.share is not None:  # in `_first_steps_difference`
        return []
    if original is None or original.args[0] is not model:
        unfit = ["this call has nothing to compare"]
    elif is_verified(key := _key(original, generation_config, call)):
        return []
    elif _compared[key[1:]] >= MOST:
        unfit = ["its modules keep state that changes between calls"]
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
    """Returns what differs in the first steps of this call. Raises NotComparable if they show nothing.

    First prompts of any length are shared, then none, so that later calls run only code that was compared.
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
        except Exception as error:  # if user code raises it, the call itself will, too
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
    """Returns the difference between the outputs of two calls of `generate` with logits, or None.

    In half precision rounding may change a token, and all later ones.
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
    """Returns what determines which code a model runs, and whether a comparison would show errors of it.

    It begins with the model's likeness: its classes and their code, training flags, attributes and configuration. Then
    come the names of the forward's arguments, whether rows are moved or sampled, and whether there are several inputs:
    an error in expanding rows is invisible with one.
    """
    model, config = original.args[0], generation_config
    several = ((config.num_beams or 1) > 1, (config.num_return_sequences or 1) > 1, call.inputs > 1)
    generation_names = inspect.signature(GenerationMixin.generate).parameters.keys() | vars(config).keys()
    likeness = call.facts_of(model, checks.KNOWN).likeness()
    return likeness, type(model), frozenset(original.keywords.keys() - generation_names), *several


def _has_state(value: Any) -> bool:
    """Whether a first call might change the value for a second one."""
    if isinstance(value, (list, tuple)):
        return any(_has_state(item) for item in value)
    return value is not None and not isinstance(value, (bool, int, float, str, Tensor, GenerationConfig))


def _subject(model: HostModel) -> str:
    return f"{type(model).__module__}.{type(model).__name__} on transformers {transformers_version}"


# `fastgen.verify`.


@dataclass
class TransformersCall:
    """A call `model.generate(inputs, **kwargs)`, or `model.generate(**inputs, **kwargs)` if inputs are a mapping."""

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
        """Returns the first difference: in tokens, with the scores of both sequences; otherwise in other tensors."""
        tokens = _sequences(ours), _sequences(theirs)
        if tokens[0] is not None and tokens[1] is not None:
            start = self._generated_from()
            different = first_token_difference(*tokens, start)
            if different is not None:
                return self._with_scores(different, tokens, start)
        for index, (tensor, expected) in enumerate(zip(_tensors(ours), _tensors(theirs))):
            if tensor.shape != expected.shape:
                return Difference(f"output {index} has shape {tuple(tensor.shape)} instead of {tuple(expected.shape)}")
            atol = tolerance("logits", tensor.dtype) * max(expected.nan_to_num(0, 0, 0).abs().max().item(), 1)
            if tensor.is_floating_point() and not torch.allclose(tensor, expected, rtol=0, atol=atol, equal_nan=True):
                return Difference(f"output {index} differs by {(tensor - expected).abs().max().item():.2g}")
        return None

    def _generated_from(self) -> int:
        """Returns the column of the first generated token."""
        inputs = self.inputs.get("input_ids") if isinstance(self.inputs, Mapping) else self.inputs
        if is_decoder := self.model.config.is_encoder_decoder:
            inputs = self.kwargs.get("decoder_input_ids")
        return int(is_decoder) if inputs is None else inputs.shape[1]

    def _with_scores(self, different: Difference, tokens: tuple[Tensor, Tensor], start: int) -> Difference:
        """Adds the sums of both rows' log-probabilities: of whole rows for beams, else up to the difference."""
        if different.row is None or different.step is None:
            return different
        beams = self.kwargs.get("num_beams", self.model.generation_config.num_beams) or 1
        length = None if beams > 1 else start + different.step + 1
        rows = [sequences[different.row, :length] for sequences in tokens]
        try:
            ours, theirs = (self._log_prob_sum(different.row, len(tokens[0]), row[row != ABSENT]) for row in rows)
        except (TypeError, ValueError) as error:  # the model's own generate takes no processors
            text = f"{different.text} (scores are unknown: {type(error).__name__}: {error})"
            return replace(different, text=text)
        return replace(different, ours=ours, theirs=theirs)

    def _log_prob_sum(self, row: int, rows: int, sequence: Tensor) -> float:
        """Returns the sum over a sequence `[length]` with its prompt, for the input that this row belongs to.

        A greedy call is forced to generate the sequence for each input.
        """
        kwargs = {name: value for name, value in self.kwargs.items() if name not in _NOT_OF_SCORES}
        kwargs |= {"num_beams": 1, "num_return_sequences": 1, "do_sample": False, "max_new_tokens": len(sequence)}
        kwargs |= {"return_dict_in_generate": True, "output_logits": True}
        kwargs["prefix_allowed_tokens_fn"] = lambda _, input_ids: [int(sequence[len(input_ids)])]
        kwargs["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(len(sequence))])
        level = logging.get_verbosity()
        logging.set_verbosity_error()  # silences warnings about settings for beams or samples
        try:
            logits = torch.stack(replace(self, kwargs=kwargs).run().logits, dim=1)  # [inputs, steps, vocabulary_size]
        finally:
            logging.set_verbosity(level)
        log_probs = logits[row * len(logits) // rows].log_softmax(dim=-1)
        return log_probs.gather(1, sequence[-len(log_probs) :, None]).sum().item()


def _sequences(output: Any) -> Tensor | None:
    """Returns the tokens `[rows, length]` of an output; None if it has none, like a speech model's."""
    sequences = output.get("sequences") if isinstance(output, Mapping) else output
    is_tokens = isinstance(sequences, Tensor) and sequences.dim() == 2 and not sequences.is_floating_point()
    return sequences if is_tokens else None


def _tensors(output: Any) -> list[Tensor]:
    """Returns all tensors of an output, in order, except those of caches."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = [value for name, value in output.items() if name not in CACHE_NAMES]
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, (list, tuple)) else []
