"""Parity of fairseq models with the unpatched library on a GPU, in fp32 without TF32, and in fp16."""

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.utils import move_to_cuda
from fairseq_generation import compare, generate, run_both
from fairseq_models import CASES, Case, build, source_sample, translation_task
from hooks import watched
from reports import capturing
from versions import needs_gpu

pytestmark = needs_gpu

# The largest difference of scores that rounding of fp16 explains in models of two layers.
HALF_TOLERANCE = 0.05
LENGTHS_OF_32 = [4 + index * 7 % 20 for index in range(32)]
MODES = {"beams": {}, "one beam": {"beam": 1}, "samples": {"sampling": True, "sampling_topk": 9}}


def on_gpu(name: str) -> Case:
    case = CASES[name]()
    models = [model.cuda() for model in case.models]
    return Case(models, case.task, move_to_cuda(case.sample), move_to_cuda(case.inference))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_fp32_hypotheses_are_those_of_the_unpatched_library(name, mode):
    compare(on_gpu(name), **MODES[mode])


@pytest.mark.parametrize(
    "name", ("transformer", "pre-norm, learned positions", "bart", "transformer_align", "transformer_lm")
)
@pytest.mark.parametrize("mode", MODES)
def test_hypotheses_of_cuda_graphs_are_those_of_fairseq(name, mode):
    with capturing():
        report = compare(on_gpu(name), **MODES[mode], min_len=6, max_len_b=40).report
    assert report.kernels["decode step, CUDA graph"] > 2


def test_hypotheses_under_a_default_device_are_those_of_fairseq():
    """What belongs to the host must name it under `torch.set_default_device("cuda")`."""
    case = on_gpu("transformer")
    with torch.device("cuda"), capturing():
        assert compare(case, min_len=6, max_len_b=40).report.kernels["decode step, CUDA graph"] > 2


def test_finished_sentences_leave_a_captured_batch_in_halves():
    """The second call captures nothing, and no call copies more keys than two whole caches have."""
    task = translation_task()
    case = Case([build("transformer", task, 53, 5.0).cuda()], task, move_to_cuda(source_sample(task, LENGTHS_OF_32)))
    options = {"beam": 4, "max_len_b": 30}
    filling, capture = watched("fill a static cache"), watched("capture a step")
    with capturing(smallest_capacity=64), filling as fills, capture as captures:
        ends = {max(len(each["tokens"]) for each in beams) for beams in compare(case, **options).fast}
        assert len(ends) > 8
        rows = [fill.args[0].rows for fill in fills]
        assert rows[0] == 128 and len(rows) > 2 and all(count.bit_count() == 1 for count in rows)
        assert sum(rows) <= 2 * 128 and len(captures) <= len(rows)
        captures.clear()
        assert compare(case, **options).report.replays > 20
        assert not captures


@pytest.mark.parametrize("name", CASES)
def test_fp16_scores_of_the_first_words_agree(name):
    """Rounding may change later words."""
    case = on_gpu(name)
    for model in case.models:
        model.half()
    for part in (case.sample["net_input"],):
        part.update({key: value.half() for key, value in part.items() if value.is_floating_point()})
    both = run_both(lambda: generate(case, max_len_b=2), accelerated=case.accelerated)
    for stock, fast in zip(both.stock, both.fast, strict=True):
        scores = [torch.stack([hypothesis["score"] for hypothesis in side]).float() for side in (stock, fast)]
        torch.testing.assert_close(scores[1], scores[0], atol=HALF_TOLERANCE, rtol=0.0)
