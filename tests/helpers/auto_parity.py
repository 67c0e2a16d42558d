"""What fastgen does for a tiny model of each auto class, with equal outputs; as a script, writes docs/architectures.md.

Three calls, with everything that fastgen might do forced: two prompts of unequal length that begin alike, in a greedy
search for a text that copies them (twice: the second call replays captured steps and checks drafts), in a beam search,
and with samples.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from architecture_parity import shared_by_default, shares
from architectures import ARCHITECTURES
from auto_models import WITHOUT_MODEL, auto_classes, auto_inputs, auto_model
from copied_text import Forced, Noting, copying
from hooks import costs, fresh_trust
from parity import assert_equal_outputs, outcome, run_both
from reports import LEFT, capturing
from tiny_models import token_ids

import fastgen
from fastgen.optimizer.decoding.report import COMPACTION, DRAFTS, LOOP, PREFILL, PREFIX, STEPS, Report
from fastgen.optimizer.transformers import drafts
from fastgen.testing import configured

NEW = 12
ENDS = [*range(2, 12)]  # so many of 99 tokens that some samples end early, and hardly all
COLUMNS = ("prompts", "common prefix", "loops", "captured steps", "drafts", "finished inputs")
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
EVERY_CLASS, NO_MODEL, AT_REAL_SIZE = "Every class", "Classes without a tiny model", "Shared by default at real size"


@contextmanager
def everything_is_tried() -> Iterator[None]:
    """Forces whatever fastgen can do, however tiny the model is."""
    steps = {"_cost": lambda self, rows, size: 1.0, "_overhead": lambda self, size: 1.0}  # otherwise measured
    without_costs = mock.patch.multiple(drafts.DraftedSteps, **steps)
    thresholds = {"min_leaving": 0.0, "min_steps_expected": 1}
    trust = fresh_trust(accepted=True)  # outputs of first uses are the library's
    with trust, configured(share="always"), capturing(drafts="auto"), without_costs, costs(**thresholds):
        yield


def reports_of(model: Any) -> list[Report | str | None]:
    """Compares a greedy search, a beam search and samples with those of the library; returns fastgen's reports.

    In place of a report: the text of the error that the library raises, also with fastgen; None for a call that does
    not go through fastgen.
    """
    inputs = auto_inputs(model)
    source = inputs.get("input_ids")
    rows = len(next(iter(inputs.values())))
    start = 1 if source is None or model.config.is_encoder_decoder else source.shape[1]
    text = Forced(copying(token_ids(rows, 12) if source is None else source, NEW), start)

    def call(*processors: Any, **arguments: Any) -> Callable[[], Any]:
        def generate() -> Any:
            noting = Noting()
            called = {"logits_processor": [noting, *processors]} if processors else {}
            return model.generate(**inputs, **called, **arguments, max_new_tokens=NEW), noting.calls

        return lambda: outcome(generate)

    greedy = same(call(text, do_sample=False, num_beams=1), times=2)
    beams = same(call(do_sample=False, num_beams=4))
    model.generation_config.eos_token_id = ENDS
    return [greedy, beams, same(call(do_sample=True, num_return_sequences=4))]


def same(call: Callable[[], Any], times: int = 1) -> Report | str | None:
    """Compares a call with the library's, then calls again; returns the last report, see `reports_of`."""
    both = run_both(call, must_report=False)
    assert_equal_outputs(both.stock, both.fast)
    if isinstance(both.stock[0], str):
        return ": ".join(both.stock)
    report = both.report
    for _ in range(times - 1):
        torch.manual_seed(7)
        before = fastgen.explain()
        assert_equal_outputs(both.stock, call(), name="second call")
        report = None if fastgen.explain() is before else fastgen.explain()
    return report


def cells_of(model: Any) -> list[str]:
    """Returns the cells of the model's class in the table: what it gets, or the code of the first reason why not."""
    with everything_is_tried():
        results = reports_of(model)
    reports = [report for report in results if isinstance(report, Report)]
    if not reports:
        if None not in results:
            raise ValueError(results[0])
        return ["not through fastgen"] + [""] * (len(COLUMNS) - 1)

    def cell(part: str, is_done: Callable[[Report], object], about: list[Report]) -> str:
        if about and all(map(is_done, about)):
            return "yes"
        codes = [reason.code for report in about if (reason := report.reason_for(part)) is not None]
        return f"`{codes[0]}`" if codes else "no"

    greedy, beams, samples = ([result] if isinstance(result, Report) else [] for result in results)
    prompts = shares((beams or samples or greedy)[0])
    return [
        cell(PREFILL, lambda report: False, beams or samples) if prompts == "nothing" else prompts,
        cell(PREFIX, lambda report: report.prefix_length, reports),
        cell(LOOP, lambda report: report.reason_for(LOOP) is None, reports),
        cell(STEPS, lambda report: report.replays, reports),
        cell(DRAFTS, lambda report: report.drafted, greedy),
        cell(COMPACTION, lambda report: LEFT in report.shared, samples),
    ]


def read_table(heading: str) -> dict[str, list[str]]:
    """Returns the cells of each row of a table of the page, by the name in its first column."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:2] == "| "]
    return {name: cells for name, *cells in rows[1:]}


def with_table(page: str, heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns the page with another table at the end of a section."""
    start = page.index("\n| ", page.index(f"## {heading}\n")) + 1
    end = page.find("\n## ", start)
    head, *lines = (f"| {' | '.join(cells)} |\n" for cells in (columns, *rows))
    return page[:start] + head + "|---" * len(columns) + "|\n" + "".join(lines) + ("" if end < 0 else page[end:])


def write_page() -> None:
    """Writes all tables again, and leaves the texts between them."""
    transformers.logging.set_verbosity_error()
    classes = [(name, *cells_of(auto_model(name))) for name in auto_classes() if name not in WITHOUT_MODEL]
    at_real_size = [(architecture.id, shared_by_default(architecture)) for architecture in ARCHITECTURES]
    page = with_table(PAGE.read_text(encoding="utf-8"), EVERY_CLASS, ("class", *COLUMNS), classes)
    page = with_table(page, NO_MODEL, ("class", "error"), WITHOUT_MODEL.items())
    page = with_table(page, AT_REAL_SIZE, ("architecture", "shared"), at_real_size)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_page()
