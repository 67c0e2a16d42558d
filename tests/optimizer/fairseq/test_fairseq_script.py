"""Generators of fairseq that users compile with `torch.jit.script`: its sources are read, patched or not."""

from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq")

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
def test_scripted_generator_gives_the_same(name):
    """`torch.jit.script` takes the generator as it is; what comes out does what upstream's does, and the plain one.

    n-grams are blocked as upstream's scripted code does it: on a CPU it blocks nothing, where the plain one does.
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
