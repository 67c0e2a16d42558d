"""`fastgen.verify` generates both ways and reports the first difference, and how far the scores are apart."""

import copy
import json
import random

import numpy
import pytest
import torch
from tiny_models import BEAMS, GREEDY, SAMPLES, padded, tiny
from transformers import LlamaForCausalLM

import fastgen
from fastgen.optimizer.decoding import timing
from fastgen.optimizer.decoding.call import current_call
from fastgen.optimizer.decoding.verify import Run, Verification


@pytest.fixture(autouse=True)
def _few_turns(monkeypatch):
    monkeypatch.setattr(timing, "MOST_TURNS", timing.LEAST_TURNS)


@pytest.mark.parametrize("arguments", [GREEDY, BEAMS, SAMPLES], ids=("greedy", "beams", "samples"))
@pytest.mark.parametrize("name", ("gpt2", "bart"))
def test_equal_outputs_are_reported_with_speed_and_memory(share_always, name, arguments):
    result = fastgen.verify(tiny(name), padded(9, 5), **arguments)
    assert result.equal and result.difference is None
    assert result.rows == 2 * arguments.get("num_return_sequences", 1)
    assert len(result.ours.turns) == len(result.theirs.turns) >= 5 and min(result.ours.turns) > 0
    assert result.report is fastgen.explain() and bool(result.report.shared) == (result.rows > 2)
    text = repr(result).splitlines()
    assert text[0] == f"equal: {result.rows} rows" and text[1].startswith("  transformers: ")
    assert text[3].startswith(f"  {result.ratio}")
    read = json.loads(json.dumps(result.as_dict()))
    assert read["equal"] and read["report"]["verdict"] in repr(result)
    assert read["fastgen"]["memory"] is None or read["fastgen"]["memory"] >= 0
    assert read["fastgen"]["turns"] == result.ours.turns and read["speedup"] == result.speedup


@pytest.mark.parametrize(
    ("ours", "speedup", "summary"),
    [
        ([1.0, 1.0, 1.25], 2.0, "2.00 times as fast (1.60 to 2.00 in 3 turns)"),
        ([0.2, 1.0, 3.0], None, "no ratio: 3 turns differ too much, 0.67 to 10.00 times as fast"),
        ([0.001, 0.001, 0.001], None, "no ratio: a call of 1.0 ms is too short to compare (at least 10 ms)"),
    ],
    ids=("steady", "unsteady", "short"),
)
def test_a_ratio_is_given_only_where_the_turns_allow_one(ours, speedup, summary):
    runs = Run([2.0, 2.0, 2.0], 80_000_000), Run(ours, None)
    result = Verification("transformers", 4, None, *runs, 0.25, None)
    assert result.speedup == result.as_dict()["speedup"] == speedup
    text = repr(result).splitlines()
    assert text[1] == "  transformers: 2.000 s (2.000 to 2.000), 80 MB" and text[2].startswith("  fastgen: ")
    assert text[3] == f"  {summary}; other programs took 25% of the CPUs"


def test_a_call_that_adds_little_memory_does_not_take_0_mb():
    memory = [str(Run([0.5], memory)).partition(", ")[2] for memory in (0, 999_999, 2_000_000, None)]
    assert memory == ["under 1 MB", "under 1 MB", "2 MB", ""]


def test_input_ids_and_outputs_of_other_kinds_are_compared(share_always):
    input_ids = padded(9, 5)["input_ids"]
    kinds = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    assert fastgen.verify(tiny("gpt2"), input_ids, **BEAMS, **kinds).equal


def test_random_numbers_are_restored():
    model = tiny("gpt2")
    expected, after = [], []
    for drawn, verified in ((expected, False), (after, True)):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        if verified:
            assert fastgen.verify(model, padded(9, 5), **SAMPLES).equal
        drawn += [torch.rand(1).item(), random.random(), numpy.random.rand()]
    assert after == expected


class Differs(LlamaForCausalLM):
    """Gives the second row another token in its third step, in calls that go through fastgen."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        self.steps = 0 if outputs.logits.shape[1] > 1 else self.steps + 1
        if current_call() is not None and self.steps == 2:
            outputs.logits[1::2, -1, 77] += 100
        return outputs


def log_prob_sum(model: LlamaForCausalLM, inputs: dict, row: int, sequence: torch.Tensor) -> float:
    """Returns the log-probability of the tokens after the prompt, from one forward over all of them."""
    start = inputs["input_ids"].shape[1]
    mask = torch.cat([inputs["attention_mask"][row], torch.ones(len(sequence) - start, dtype=torch.int64)])
    positions = (mask.cumsum(0) - 1).clamp(min=0)
    with torch.no_grad(), fastgen.disabled():
        logits = LlamaForCausalLM.forward(
            model, sequence[None], attention_mask=mask[None], position_ids=positions[None]
        ).logits[0]
    scores = logits[start - 1 : -1].log_softmax(-1)
    return scores.gather(1, sequence[start:, None]).sum().item()


@pytest.mark.parametrize("num_beams", [1, 2])
def test_the_first_difference_has_step_row_scores_and_gap(num_beams):
    model, inputs = tiny("llama"), padded(9, 5)
    model.__class__, model.generation_config.eos_token_id = Differs, None
    arguments = {"max_new_tokens": 6, "do_sample": False, "num_beams": num_beams}
    result = fastgen.verify(model, inputs, **arguments)
    with fastgen.disabled():
        theirs = model.generate(**inputs, **arguments)
    ours = model.generate(**inputs, **arguments)
    step, row = (ours != theirs)[:, 9:].any(0).nonzero()[0].item(), result.difference.row
    assert not result.equal and result.difference.step == step
    assert num_beams > 1 or (step, row, ours[1, 11]) == (2, 1, 77)
    stop = None if num_beams > 1 else 9 + step + 1
    expected = [log_prob_sum(model, inputs, row, tokens[row, :stop]) for tokens in (ours, theirs)]
    assert result.difference.ours == pytest.approx(expected[0], abs=1e-3)
    assert result.difference.theirs == pytest.approx(expected[1], abs=1e-3)
    assert result.difference.gap == pytest.approx(expected[1] - expected[0], abs=1e-3)
    assert repr(result).startswith(f"different: step {step} of row {row} gives token {ours[row, 9 + step]} instead of ")
    assert json.loads(json.dumps(result.as_dict()))["difference"]["step"] == step


def test_a_model_that_cannot_generate_is_refused_by_name():
    with pytest.raises(TypeError, match="model is a Linear"):
        fastgen.verify(torch.nn.Linear(1, 1), torch.ones(1, 1))


def test_errors_of_generate_are_raised_and_numbers_restored():
    model, state = tiny("gpt2"), torch.get_rng_state()
    with pytest.raises(IndexError):
        fastgen.verify(model, torch.full((2, 3), 1000), **SAMPLES)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_fairseq_is_compared():
    pytest.importorskip("fairseq")
    from argparse import Namespace

    from fairseq_models import CASES

    from fastgen.optimizer.fairseq.generate import FairseqCall

    case = CASES["transformer"]()
    generator = case.task.build_generator(case.models, Namespace(beam=3, max_len_b=8))
    result = fastgen.verify(generator, case.sample)
    assert result.equal and result.host == "fairseq" and result.report.shared
    assert result.rows == 3 * result.report.inputs
    call = FairseqCall(generator, case.sample, {})
    theirs = call.run()
    ours = copy.deepcopy(theirs)
    ours[1][2]["tokens"][1] += 1
    ours[1][2]["score"] -= 0.5
    ours[0][0]["positional_scores"][2:] += 0.1
    difference = call.difference(ours, theirs)
    assert (difference.step, difference.row) == (1, 5) and difference.gap == pytest.approx(0.5)
    ours[1][2] = theirs[1][2]
    assert call.difference(ours, theirs).text == "step 2 of row 0 gives other scores"
