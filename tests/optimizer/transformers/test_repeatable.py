"""With FASTGEN_REPEATABLE=1 a call gives the same bits whatever was called before it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from capturing import replays
from parity import padded, tiny

import fastgen
from fastgen.config import CONFIG
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN
from fastgen.optimizer.transformers.generate import SEQUENCES_SCORES, only_outputs

pytestmark = pytest.mark.skipif(
    not LAYERS_ARE_KNOWN, reason="nothing is captured with the static caches of this transformers"
)


def scores_of_beams(name: str, calls_before: tuple[int, ...]) -> torch.Tensor:
    """Of a call of 40 steps that follows calls with so many steps each."""
    model = tiny(name, "seq2seq" if name == "t5" else "causal")
    side = "right" if name == "t5" else "left"
    for seed, steps in enumerate((*calls_before, 40), start=8 - len(calls_before)):
        with only_outputs(SEQUENCES_SCORES):
            outputs = model.generate(
                **padded(3, 7, 5, side=side, seed=seed),
                num_beams=4,
                max_new_tokens=steps,
                eos_token_id=None,
                output_scores=True,
                return_dict_in_generate=True,
            )
    assert replays(fastgen.explain())
    return outputs.sequences_scores


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_scores_do_not_depend_on_calls_before(name):
    with mock.patch.object(CONFIG, "repeatable", True):
        alone = scores_of_beams(name, ())
        for calls_before in ((40,), (12, 60)):
            assert torch.equal(scores_of_beams(name, calls_before), alone)


def test_without_the_switch_captured_steps_are_used_sooner():
    replayed = []
    for calls_before in ((), (40,)):
        scores_of_beams("llama", calls_before)
        replayed.append(replays(fastgen.explain()))
    assert replayed[0] < 35 < replayed[1]
