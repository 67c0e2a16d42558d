"""Parity of all architectures with the unpatched library on a GPU, in fp32 without TF32, and in fp16."""

import pytest
from architecture_parity import MODES, expected_sharing, measure, shares
from architectures import ARCHITECTURES
from parity import assert_same
from reports import PREFILL
from tiny_models import SAMPLES, padded, tiny
from versions import needs_gpu

pytestmark = needs_gpu

# The largest difference of scores that rounding of fp16 explains in models of two layers.
HALF_TOLERANCE = 0.05
IN_HALF = [
    each for each in ARCHITECTURES if each.id != "longt5"
]  # its tiny encoder overflows to NaN: draws end in an error


@pytest.fixture(autouse=True)
def _shared(share_always):
    """Shares the prompts of models that are too tiny for it by default."""


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


def test_compiled_steps_of_static_caches_share_the_prefill():
    inputs = {key: value.cuda() for key, value in padded(9, 5).items()}
    report = assert_same(tiny("llama").cuda(), inputs, **SAMPLES, cache_implementation="static")
    assert report.shared == [PREFILL]
