"""What the comparison fuzzer lets a program put into decoding loops: see fuzz_changes.py for how it is called."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import torch
from fuzz_changes import Generate, steered
from torch import Tensor, nn
from torch.nn import functional
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

import fastgen
from fastgen.testing import configured

PROCESSORS: tuple[Callable[[], Any], ...] = (
    lambda: logits_process.TemperatureLogitsWarper(0.7),
    lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.4),
    lambda: logits_process.TopPLogitsWarper(0.8),
    lambda: logits_process.TopKLogitsWarper(20),
    lambda: logits_process.MinPLogitsWarper(0.05),
    lambda: logits_process.NoRepeatNGramLogitsProcessor(2),
    lambda: logits_process.SuppressTokensLogitsProcessor([20, 21]),
    lambda: logits_process.InfNanRemoveLogitsProcessor(),
)


def other_scores(self: Any, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
    """What a row gets depends on which one it is, and on all of its tokens."""
    return steered(scores) - functional.one_hot(input_ids.sum(dim=1) % scores.shape[1], scores.shape[1])


def other_ends(self: Any, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
    return input_ids[:, -3:].sum(dim=1) % 7 == 0


def replaced_calls(random: Random, model: nn.Module, generate: Generate) -> Any:
    """Replaces `__call__` of a processor, a criterion or one of their lists for one call, between two others."""
    processor = random.choice(PROCESSORS)()
    owner, call = random.choice(
        (
            (type(processor), other_scores),
            (type(processor), other_scores),
            (LogitsProcessorList, other_scores),
            (stopping_criteria.EosTokenCriteria, other_ends),
            (stopping_criteria.MaxLengthCriteria, _ends_at_length_or_before),
            (StoppingCriteriaList, _ends_at_length_or_before),
        )
    )
    before = generate(model) if random.random() < 0.5 else None
    with mock.patch.object(owner, "__call__", call):
        within = generate(model, logits_processor=LogitsProcessorList([processor]))
    return before, within, generate(model)


def _ends_at_length_or_before(self: Any, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
    """`self` is the criterion of length, or the list that holds it."""
    return other_ends(self, input_ids, scores) | (input_ids.shape[1] >= self.max_length)


class _Noting(LogitsProcessor):
    def __init__(self) -> None:
        self.rows = 1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.rows = len(scores)
        return scores


def values_of_each_row(random: Random, model: nn.Module, generate: Generate) -> Any:
    """One to three of the library's processors, that hold a number for each row."""
    noting = _Noting()
    before, processors = generate(model, logits_processor=[noting]), LogitsProcessorList()
    values = torch.rand(noting.rows, 1, generator=torch.Generator().manual_seed(random.randrange(1 << 30)))
    ways = {
        "temperature": (lambda: logits_process.TemperatureLogitsWarper(1.0), 0.5 + values),
        "penalty": (lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.0), 1 + values),
        "top_p": (lambda: logits_process.TopPLogitsWarper(0.9), 0.2 + values / 2),
        "min_p": (lambda: logits_process.MinPLogitsWarper(0.1), values / 5),
        "mass": (lambda: logits_process.TypicalLogitsWarper(0.9), 0.2 + values / 2),
        "epsilon": (lambda: logits_process.EpsilonLogitsWarper(0.1), values / 10),
    }
    for name in random.sample(sorted(ways), random.choice((1, 1, 3))):
        make, of_rows = ways[name]
        processors.append(make())
        setattr(processors[-1], name, of_rows if random.random() < 0.8 else nn.Parameter(of_rows, requires_grad=False))
    return before, generate(model, logits_processor=processors)


class _Returning(LogitsProcessor):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self.function = function

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return self.function(scores)


def other_scores_of_a_processor(random: Random, model: nn.Module, generate: Generate) -> Any:
    """Scores of fewer or more tokens, of one row for all, or no scores at all."""
    function = random.choice(
        (
            lambda scores: scores[:, :90],
            lambda scores: functional.pad(scores, (0, 7), value=-torch.inf),
            lambda scores: functional.pad(scores, (0, 7), value=-torch.inf)[:, 3:],
            lambda scores: scores[:1],
            lambda scores: None,
            lambda scores: [scores],
            lambda scores: scores.double(),
        )
    )
    with configured(strict=False):  # the library refuses some of them
        return generate(model, logits_processor=[_Returning(function)]), _switched_off(), generate(model)


def replaced_functions(random: Random, model: nn.Module, generate: Generate) -> Any:
    """Replaces functions of torch that choose tokens; the model may have been used before."""
    of_functional = [(functional, name) for name in ("softmax", "log_softmax")]
    owner, name = random.choice([(torch, name) for name in ("argmax", "multinomial", "topk", "sort")] + of_functional)
    original, calls = getattr(owner, name), []

    def function(values: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(list(values.shape))
        if values.is_floating_point() and values.dim() == 2:
            values = steered(values) if kind < 0.5 else values.roll(1, -1)
        return original(values, *args, **kwargs)

    kind = random.random()
    before = generate(model) if random.random() < 0.5 else None
    with mock.patch.object(owner, name, mock.Mock(wraps=function) if random.random() < 0.3 else function):
        within = generate(model)
    return before, within, calls if name in ("argmax", "multinomial") else [], generate(model)


def padding_that_is_not_finite(random: Random, model: nn.Module, generate: Generate) -> Any:
    embeddings, pad = model.get_input_embeddings(), model.generation_config.pad_token_id
    if getattr(embeddings, "weight", None) is None or pad is None:
        return generate(model)
    head = model.get_output_embeddings()
    if head is not None and head.weight is embeddings.weight and random.random() < 0.8:
        head.weight = nn.Parameter(head.weight.detach().clone())
    embeddings.weight.data[pad] = random.choice((torch.nan, torch.inf, -torch.inf))
    return generate(model)


def _without_rows(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:0] for name, value in inputs.items()}


def _without_columns(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:, :0] for name, value in inputs.items()}


def _with_a_dimension_more(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[..., None] if name == "input_ids" else value for name, value in inputs.items()}


def _with_half_a_mask(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:, 1:] if name == "attention_mask" else value for name, value in inputs.items()}


def _with_tokens_beyond_the_vocabulary(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + 5000 if name == "input_ids" else value for name, value in inputs.items()}


def refused_calls(random: Random, model: nn.Module, generate: Generate) -> Any:
    """Calls that the library refuses, or that are as odd; nothing is switched off by them."""
    edits = (_without_rows, _without_columns, _with_a_dimension_more, _with_half_a_mask)
    edit = random.choice((*edits, _with_tokens_beyond_the_vocabulary))
    with configured(strict=False):  # which raises fastgen's errors
        return generate(model, edit=edit), _switched_off(), generate(model)


_off: set[str] = set()


def _switched_off() -> list[str]:
    """The patches that have failed since this was asked last."""
    failed = {state.name for state in fastgen.status() if state.state == "failed"} - _off
    _off.update(failed)
    return sorted(failed)


PROGRAMS_OF_LOOPS: dict[str, Callable[[Random, nn.Module, Generate], Any]] = {
    "replaced calls": replaced_calls,
    "values of each row": values_of_each_row,
    "other scores of a processor": other_scores_of_a_processor,
    "replaced functions": replaced_functions,
    "padding that is not finite": padding_that_is_not_finite,
    "refused calls": refused_calls,
}
