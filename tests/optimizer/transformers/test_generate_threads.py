"""Several threads generate at the same time, with and without fastgen, on one model and on two."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from parity import assert_equal_outputs
from reports import CROSS, PROMPT, is_shared
from tiny_models import BEAMS, padded, tiny

import fastgen

OUTPUTS = {"return_dict_in_generate": True, "output_scores": True}


pytestmark = pytest.mark.usefixtures("share_always")


class Rendezvous:
    """A logits processor that makes the steps of two threads alternate."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)

    def __call__(self, input_ids, scores):
        self.barrier.wait(timeout=600)  # if the other thread fails
        return scores


def in_threads(*calls: Callable) -> list:
    """Returns the results of the calls, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def generate(model, inputs, meeting=None):
    """Returns the output of `generate`, and the report in its thread."""
    processors = {"logits_processor": [meeting]} if meeting else {}
    output = model.generate(**inputs, **BEAMS, **OUTPUTS, min_new_tokens=7, **processors)
    return output, fastgen.explain()


def stock(model, inputs):
    with fastgen.disabled():
        return generate(model, inputs)[0]


@pytest.mark.parametrize("names", [("llama", "bart"), *zip(*[("llama", "gpt2", "bart", "t5")] * 2)], ids=str)
def test_two_threads_generate_on_one_model_and_on_two(names):
    models = {name: tiny(name) for name in names}
    calls = [(models[name], inputs) for name, inputs in zip(names, (padded(9, 5), padded(4, 12, 7, seed=2)))]
    meeting = Rendezvous()
    results = in_threads(*(lambda call=call: generate(*call, meeting) for call in calls))
    for (model, inputs), (output, report) in zip(calls, results):
        assert_equal_outputs(stock(model, inputs), output)
        assert report.model == type(model).__name__ and report.inputs == len(inputs["input_ids"])
        assert is_shared(report, PROMPT, *[CROSS] * model.config.is_encoder_decoder)


def test_disabled_in_one_thread_does_not_disable_another():
    model, inputs, meeting = tiny("llama"), padded(9, 5), Rendezvous()

    def without():
        with fastgen.disabled():
            return generate(model, inputs, meeting)

    (plain, no_report), (fast, report) = in_threads(without, lambda: generate(model, inputs, meeting))
    assert no_report.codes() == {"NO_CALL"}
    assert is_shared(report, PROMPT)
    assert_equal_outputs(plain, fast)


def test_disabling_while_another_thread_generates_lets_it_finish():
    model, inputs, at_step = tiny("llama"), padded(9, 5), threading.Event()
    resume = threading.Event()

    def wait(input_ids, scores):
        at_step.set()
        resume.wait()
        return scores

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(generate, model, inputs, wait)
        at_step.wait()
        try:
            fastgen.disable()
            resume.set()
            output, report = running.result()
        finally:
            resume.set()
            fastgen.enable()
    assert is_shared(report, PROMPT)
    assert_equal_outputs(stock(model, inputs), output)
    assert not any(type(layer).__module__.startswith("fastgen") for layer in output.past_key_values.layers)
    assert torch.equal(generate(model, inputs)[0].sequences, output.sequences)
