"""What counts as tested is what was run."""

import json
from pathlib import Path

import pytest
from packaging.version import Version

from fastgen.optimizer import fairseq, transformers

TESTED = {"transformers": transformers.TESTED, "fairseq": fairseq.TESTED}
ROWS = json.loads((Path(__file__).parents[1] / "tools" / "matrix" / "results.json").read_text())


@pytest.mark.parametrize("host", TESTED)
def test_versions_that_were_run_count_as_tested(host):
    ran = sorted({Version(row[host]) for row in ROWS if row.get(host)})
    assert (str(ran[0]), str(ran[-1])) == TESTED[host]


def test_nothing_failed_in_what_was_run():
    assert [(row["name"], row["failed"]) for row in ROWS if row["failed"]] == []
