"""User code in a decoding loop: functions, another `__call__`, values of each row, other widths."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from parity import assert_equal_outputs, outcome, run_both
from reports import LEFT, capturing
from tiny_models import padded, token_ids, unchanged
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

import fastgen
from fastgen.testing import configured

ENDS = {"eos_token_id": list(range(3, 90, 6)), "max_new_tokens": 40}
SAMPLE = {"do_sample": True, "eos_token_id": [3, 9, 15, 21]}
WAYS = pytest.mark.parametrize(
    "way", [{}, SAMPLE | {"num_return_sequences": 2}, {"num_beams": 3}], ids=("greedy", "samples", "beams")
)
CAPTURES = pytest.mark.parametrize("captures", (False, True), ids=("eager", "captured"))
ROWS = 6

pytestmark = pytest.mark.usefixtures("share_always")


llama = partial(unchanged, "llama")


def generate(way: dict[str, Any], **arguments: Any) -> Any:
    """Compares tokens with and without fastgen; returns fastgen's report."""
    model = llama()
    both = run_both(lambda: model.generate(**padded(7, 3, 5, 6, 2, 4), **ENDS | way | arguments))
    assert torch.equal(both.stock, both.fast)
    assert all(state.state != "failed" for state in fastgen.status())
    return both.report


def by_batch_index(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + torch.linspace(0, 1, len(scores))[:, None] * torch.linspace(0, 2, scores.shape[1])


# Another `__call__`.


@WAYS
@CAPTURES
@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("RepetitionPenaltyLogitsProcessor", "__call__", {"repetition_penalty": 1.4}),
        ("NoRepeatNGramLogitsProcessor", "__call__", {"no_repeat_ngram_size": 2}),
        ("SuppressTokensLogitsProcessor", "__call__", {"suppress_tokens": [20]}),
        ("LogitsProcessorList", "__call__", {}),
    ],
)
def test_a_replaced_call_of_a_processor_sees_all_rows(monkeypatch, name, method, options, way, captures):
    assert LEFT in generate(way, **options).shared
    monkeypatch.setattr(getattr(logits_process, name), method, by_batch_index)
    with capturing("on" if captures else "off"):
        report = generate(way, **options)
    assert LEFT not in report.shared and {"PROCESSOR_BY_ROW", "METHOD_REPLACED"} & report.codes()


@WAYS
def test_a_replaced_method_of_a_processor_sees_all_rows(monkeypatch, way):
    original = logits_process.SequenceBiasLogitsProcessor._prepare_bias_variables

    def prepare(self: Any, scores: torch.Tensor) -> None:
        original(self, scores)
        self.length_1_bias = by_batch_index(self, None, torch.zeros_like(scores))

    monkeypatch.setattr(logits_process.SequenceBiasLogitsProcessor, "_prepare_bias_variables", prepare)
    assert LEFT not in generate(way, sequence_bias={(31,): 2.0}).shared


def test_a_method_replaced_before_fastgen_is_called():
    try:
        fastgen.disable()
        with mock.patch.object(logits_process.NoRepeatNGramLogitsProcessor, "__call__", by_batch_index):
            fastgen.enable()
            report = generate({}, no_repeat_ngram_size=2)
            fastgen.disable()
    finally:
        fastgen.enable()
    assert "METHOD_REPLACED" in report.codes()


def ends(self: Any, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    return (input_ids[:, -3:].sum(dim=1) % 7 == 0) | (input_ids.shape[1] > 30)


@WAYS
@CAPTURES
@pytest.mark.parametrize(
    ("owner", "code"),
    ((stopping_criteria.EosTokenCriteria, "STOPPING_CRITERION"), (StoppingCriteriaList, "METHOD_REPLACED")),
)
def test_a_replaced_call_of_a_criterion_gets_all_tokens(monkeypatch, owner, code, way, captures):
    monkeypatch.setattr(owner, "__call__", ends)
    with capturing("on" if captures else "off"):
        assert code in generate(way).codes()


# A value of each row.

VALUES = torch.tensor([[0.5], [3.0], [0.7], [4.0], [0.6], [5.0]])
VALUES_OF_ROWS = {
    "temperature": (lambda: logits_process.TemperatureLogitsWarper(1.0), VALUES),
    "penalty": (lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.0), 1 + VALUES / 5),
    "top_p": (lambda: logits_process.TopPLogitsWarper(0.9), VALUES / 5.01),
    "min_p": (lambda: logits_process.MinPLogitsWarper(0.1), VALUES / 10),
    "mass": (lambda: logits_process.TypicalLogitsWarper(0.9), VALUES / 5.01),
    "epsilon": (lambda: logits_process.EtaLogitsWarper(0.1), VALUES[:, 0] / 30),
    "length_1_bias": (
        lambda: logits_process.SequenceBiasLogitsProcessor({(31,): 1.0}),
        VALUES * torch.linspace(0, 0.5, 99),
    ),
}


@CAPTURES
@pytest.mark.parametrize("way", [{}, SAMPLE], ids=("greedy", "sample"))
@pytest.mark.parametrize("name", VALUES_OF_ROWS)
def test_values_of_each_row_keep_all_rows(name, way, captures):
    processor, value = VALUES_OF_ROWS[name][0](), VALUES_OF_ROWS[name][1]
    processor.prepared_bias_variables, processor.multi_token_biases = True, []
    setattr(processor, name, value)
    with capturing("on" if captures else "off"):
        report = generate(way, top_k=0, logits_processor=LogitsProcessorList([processor]))
    assert LEFT not in report.shared and "PROCESSOR_BY_ROW" in report.codes()


@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda values: values.numpy()], ids=("parameter", "array"))
def test_values_of_each_row_may_be_of_other_types(kind):
    processor = logits_process.RepetitionPenaltyLogitsProcessor(1.0)
    processor.penalty = kind(1 + VALUES / 5)
    assert LEFT not in generate({}, logits_processor=LogitsProcessorList([processor])).shared


@WAYS
def test_a_list_as_long_as_the_batch_keeps_no_rows(way):
    rows = ROWS * way.get("num_return_sequences", 1) * way.get("num_beams", 1)
    tokens = list(range(3, 3 + 4 * rows, 4))
    options = {"eos_token_id": tokens, "suppress_tokens": [token + 1 for token in tokens], "min_new_tokens": 2}
    assert LEFT in generate(way, **options, repetition_penalty=1.1).shared


# Other functions of torch.


def replacement(original: Any, seen: list) -> Any:
    """Returns a function that notes its calls, and prefers other tokens."""

    def function(*args: Any, **kwargs: Any) -> Any:
        seen.append([list(value.shape) for value in args if isinstance(value, torch.Tensor)])
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            args = args[0].roll(1, -1), *args[1:]
        return original(*args, **kwargs)

    return function


@CAPTURES
@pytest.mark.parametrize(
    ("owner", "name", "way"),
    [
        (torch, "argmax", {}),
        (torch, "multinomial", SAMPLE),
        (functional, "softmax", SAMPLE),
        (torch, "topk", {"num_beams": 3}),
        (torch, "topk", SAMPLE | {"top_k": 20}),
        (torch, "isin", {}),
        (functional, "log_softmax", {"num_beams": 3}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_replaced_function_of_torch_sees_what_it_would(owner, name, way, captures):
    seen: list = []
    with capturing("on" if captures else "off"):
        with mock.patch.object(owner, name, replacement(getattr(owner, name), seen)):
            assert "FUNCTION_REPLACED" in generate(way).codes()
        assert len(seen) % 2 == 0 and seen[: len(seen) // 2] == seen[len(seen) // 2 :]
        assert LEFT in generate(way).shared


@pytest.mark.parametrize("other", [torch.argmin, mock.Mock(wraps=torch.argmin)], ids=("function in C", "mock"))
def test_a_function_put_in_the_place_of_another_is_called(other):
    with mock.patch.object(torch, "argmax", other):
        assert "FUNCTION_REPLACED" in generate({}).codes()


@pytest.mark.parametrize("way", [{}, SAMPLE], ids=("greedy", "sample"))
def test_a_torch_mode_sees_the_functions_of_the_loop(way):
    class Other(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if func in (torch.argmax, torch.multinomial):
                args = args[0].roll(1, -1), *args[1:]
            return func(*args, **kwargs or {})

    with Other():
        assert "TORCH_MODE" in generate(way).codes()


# Other scores.


class Returns(LogitsProcessor):
    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        self.change = change

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return self.change(scores)


SCORES: dict[str, Callable[[torch.Tensor], Any]] = {
    "fewer tokens": lambda scores: scores[:, :80],
    "more tokens": lambda scores: functional.pad(scores, (0, 31), value=-torch.inf),
    "one row for all": lambda scores: scores[:1],
    "double precision": lambda scores: scores.double(),
    "none": lambda scores: None,
    "another dimension": lambda scores: scores[:, None],
    "no tokens": lambda scores: scores[:, 0],
    "a list": lambda scores: [scores],
}


@pytest.mark.parametrize(("strict", "captures"), ((False, False), (True, True)), ids=("lenient", "strict, captured"))
@pytest.mark.parametrize(
    "way", ({"num_beams": 3}, {"num_beams": 4}, {}, SAMPLE), ids=("as many", "beams", "greedy", "sample")
)
@pytest.mark.parametrize("kind", SCORES)
def test_scores_of_any_shape_do_as_in_the_library(kind, way, strict, captures):
    """With as many beams as inputs some are broadcast; otherwise the error is the library's."""
    outcomes = []
    for switch in (fastgen.disabled, fastgen.enabled):
        torch.manual_seed(0)
        with configured(strict=strict), switch(), capturing("on" if captures else "off"):
            arguments = ENDS | way | {"logits_processor": [Returns(SCORES[kind])]}
            outcomes.append(outcome(partial(llama().generate, token_ids(3, 5), **arguments)))
    assert_equal_outputs(*outcomes)
    assert all(state.state != "failed" for state in fastgen.status())
