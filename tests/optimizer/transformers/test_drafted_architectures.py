"""Drafts of variants and of fastgen's own models: the logits of each step are those of the library."""

import pytest
from architectures import ARCHITECTURES
from drafted_calls import forced_calls_of
from reports import capturing

from fastgen.optimizer.transformers import drafts

pytestmark = pytest.mark.slow

# fastgen's own models, and variants of a configuration; test_auto_classes.py has the rest.
OWN = ("mqa_transformer", "grouped_bart", "grouped_t5", "unilm")
NAMES = [each.id for each in ARCHITECTURES if each.name or each.model_type in OWN]


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch):
    monkeypatch.setattr(drafts.DraftedSteps, "_cost", lambda self, rows, size: 1.0)


@pytest.mark.parametrize(
    ("cuda_graphs", "rows", "calls"), (("off", 2, 1), ("on", 1, 2)), ids=("two rows", "captured, second call")
)
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_drafted_steps_are_the_librarys(name, cuda_graphs, rows, calls):
    code = "PREPARES_INPUTS" if name == "unilm" else None
    with capturing(cuda_graphs, drafts="auto"):
        results = forced_calls_of(name, rows, 1 if code else calls)
    assert max(difference for _, difference in results) < 1e-4
    report, _ = results[-1]
    if code is None:
        assert 0 < report.accepted < report.drafted, report
    else:
        assert code in report.codes() and not report.drafted
