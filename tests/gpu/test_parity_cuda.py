"""Parity with the unpatched library on a GPU, in fp32 without TF32, and in fp16."""

import pytest
import torch
from architecture_parity import MODES, expected_sharing, measure, shares
from architectures import ARCHITECTURES
from parity import PREFILL, SAMPLES, assert_same, padded, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was compared on a GPU"),
]

# The largest difference of scores that fp16 rounding explains in models of two layers.
HALF_TOLERANCE = 0.05
IN_HALF = [one for one in ARCHITECTURES if one.id != "longt5"]  # whose tiny encoder overflows: all scores are NaN


@pytest.fixture(autouse=True)
def _shared(share_always):
    """Prompts of models so tiny would not be shared otherwise."""


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.id)
def test_fp32_tokens_and_scores_are_those_of_the_library(architecture):
    model = architecture.model().cuda()
    inputs = {name: value.cuda() for name, value in architecture.inputs().items()}
    for mode in MODES:
        parity = measure(model, inputs, mode)
        assert parity.tokens_equal, mode
        assert parity.largest_score_difference < 1e-4, mode
        assert shares(parity.report) == expected_sharing(architecture, mode), mode


@pytest.mark.parametrize("architecture", IN_HALF, ids=lambda architecture: architecture.id)
def test_fp16_scores_of_the_first_steps_agree(architecture):
    model = architecture.model().cuda().half()
    inputs = {
        name: value.cuda().half() if value.is_floating_point() else value.cuda()
        for name, value in architecture.inputs().items()
    }
    for mode in MODES:
        parity = measure(model, inputs, mode, new_tokens=2)
        assert parity.largest_score_difference < HALF_TOLERANCE, mode
        assert shares(parity.report) == expected_sharing(architecture, mode), mode


def test_static_caches_whose_steps_the_library_compiles():
    inputs = {key: value.cuda() for key, value in padded(9, 5).items()}
    report = assert_same(tiny("llama").cuda(), inputs, **SAMPLES, cache_implementation="static")
    assert report.shared == [PREFILL]
