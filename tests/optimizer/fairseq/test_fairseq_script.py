"""Generators of fairseq compiled with `torch.jit.script`: their sources are read, patched or not."""

from argparse import Namespace

import pytest
import torch
from fairseq_generation import BEAMS, assert_same_hypotheses
from fairseq_models import CASES

import fastgen

SCRIPTED = {
    "transformer": {},
    "pre-norm, learned positions": {},
    "cross_self_attention": {},
    "bart": {},
    "ensemble": {},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "sampling": {"sampling": True, "sampling_topk": 5},
    "diverse_beam_groups": {"diverse_beam_groups": 3},
    "match_source_len": {"match_source_len": True},
}


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_scripted_generator_has_the_same_hypotheses(name):
    """They are those of upstream's scripted generator, and of the plain one but for n-grams.

    Upstream's scripted code blocks no n-grams on a CPU.
    """
    case = CASES[name if name in CASES else "transformer"]()
    inputs = {key: value for key, value in case.sample["net_input"].items() if key != "prev_output_tokens"}

    def call(script: bool) -> list:
        generator = case.task.build_generator(case.models, Namespace(**BEAMS | SCRIPTED[name]))
        torch.manual_seed(7)
        return (torch.jit.script(generator) if script else generator)({"net_input": inputs}, **case.inference)

    with fastgen.disabled():
        stock = call(script=False)
    scripted = call(script=True)
    assert_same_hypotheses(stock, scripted)
    if name != "no_repeat_ngram_size":
        assert_same_hypotheses(call(script=False), scripted)
