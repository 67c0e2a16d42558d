"""With FASTGEN_REPEATABLE=1 a call returns the same bits whatever was called before it."""

from unittest import mock

import pytest
import torch
from hooks import broken, captured_graphs, replaced
from reports import replays
from tiny_models import padded, tiny

import fastgen
from fastgen.ops.tracing import Diverged
from fastgen.optimizer.decoding.captures import CannotPad
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN
from fastgen.optimizer.transformers.outputs import SEQUENCES_SCORES, only_outputs
from fastgen.testing import configured

pytestmark = pytest.mark.skipif(
    not LAYERS_ARE_KNOWN, reason="nothing is captured with the static caches of this transformers"
)


def scores_of_beams(name: str, calls_before: tuple[int, ...], eos: list[int] | None = None) -> torch.Tensor:
    """Returns the scores of 40 steps, or 120 that inputs leave at `eos`, after calls with so many steps each."""
    model = tiny(name)
    for seed, steps in enumerate((*calls_before, 40 if eos is None else 120), start=8 - len(calls_before)):
        scores = beams(model, seed, steps, eos)
    assert replays(fastgen.explain())
    return scores


def beams(
    model: torch.nn.Module, seed: int = 8, steps: int = 40, eos: list[int] | None = None, **options
) -> torch.Tensor:
    side = "right" if model.config.is_encoder_decoder else "left"
    with only_outputs(SEQUENCES_SCORES):
        outputs = model.generate(
            **padded(3, 7, 5, 9, 4, side=side, seed=seed),
            num_beams=4,
            max_new_tokens=steps,
            eos_token_id=eos,
            pad_token_id=1,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    return outputs.sequences_scores


@pytest.fixture
def repeatable():
    with configured(repeatable=True):
        yield


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_scores_do_not_depend_on_earlier_calls(name, repeatable):
    alone = scores_of_beams(name, ())
    for calls_before in ((40,), (12, 60)):
        assert torch.equal(scores_of_beams(name, calls_before), alone)


@pytest.mark.usefixtures("repeatable", "share_always")
def test_scores_do_not_depend_on_calls_that_inputs_left():
    alone = scores_of_beams("llama", (), [5, 7])
    assert "finished inputs: removed from the batch" in fastgen.explain().shared
    assert torch.equal(scores_of_beams("llama", (120, 120, 120), [5, 7]), alone)


def capture_other_arguments(model: torch.nn.Module) -> None:
    beams(model, logits_to_keep=2)


def fail_to_pad(model: torch.nn.Module) -> None:
    with broken("pad inputs", CannotPad):
        beams(model)


def differ(model: torch.nn.Module) -> None:
    with (
        replaced("compare a replay", lambda original, *logits: True),
        pytest.warns(RuntimeWarning, match="does not capture the decode steps"),
    ):
        beams(model)


def diverge(model: torch.nn.Module) -> None:
    """Makes the next call replay a step that diverges."""
    beams(model)
    (graph,) = captured_graphs(model).values()
    graph.step(1).replay.run = mock.Mock(side_effect=Diverged("a scalar has changed"))


@pytest.mark.usefixtures("repeatable", "share_always")
@pytest.mark.parametrize("before", [capture_other_arguments, fail_to_pad, differ, diverge])
def test_scores_do_not_depend_on_what_failed_before(before):
    expected, replayed = beams(alone := tiny("llama")), replays(fastgen.explain())
    before(model := tiny("llama"))
    assert torch.equal(beams(model), expected)
    assert captured_graphs(alone).keys() <= captured_graphs(model).keys()
    assert replays(fastgen.explain()) >= replayed - 1


def test_a_graph_of_other_arguments_is_captured_anew():
    capture_other_arguments(model := tiny("llama"))
    beams(model)
    assert replays(fastgen.explain()) > 35


def test_without_the_switch_captured_steps_are_used_sooner():
    replayed = []
    for calls_before in ((), (40,)):
        scores_of_beams("llama", calls_before)
        replayed.append(replays(fastgen.explain()))
    assert replayed[0] < 35 < replayed[1]
