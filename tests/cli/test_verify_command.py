"""`python -m fastgen verify MODEL INPUT` compares outputs and reports by text, JSON and status."""

import json
import re
from typing import Any

import pytest

pytest.importorskip("transformers")

import huggingface_hub.constants

from fastgen import __main__ as program
from fastgen.cli.verify import main
from fastgen.models.demo import sample_path
from fastgen.optimizer.decoding import timing
from fastgen.optimizer.transformers.verification import VerifiedCall

DEMO = ["demo", str(sample_path()), "--lines", "2", "--max_new_tokens", "6"]


@pytest.fixture(autouse=True)
def _few_turns(monkeypatch):
    monkeypatch.setattr(timing, "MOST_TURNS", timing.LEAST_TURNS)


def test_equal_outputs_end_with_0(capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["verify", *DEMO, "--num_beams", "2"])
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    lines = printed.out.splitlines()
    assert lines[0] == "equal: 2 rows" and lines[1].startswith("  transformers: ")
    assert lines[2].startswith("  fastgen: ") and re.search(r"times as fast|no ratio: ", lines[3])


def test_json_is_one_line(capsys):
    assert main([*DEMO, "--json", "--do_sample", "true", "--num-return-sequences", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 4


def test_different_outputs_end_with_1(capsys, monkeypatch):
    run, runs = VerifiedCall.run, []

    def wrong_under_fastgen(call: VerifiedCall) -> Any:
        """Changes the last tokens of the second call, which runs fastgen."""
        output = run(call)
        runs.append(call)
        if len(runs) == 2:
            output[:, -1] += 1
        return output

    monkeypatch.setattr(VerifiedCall, "run", wrong_under_fastgen)
    assert main(DEMO) == 1
    assert capsys.readouterr().out.startswith("different: step 5 of row 0 gives token ")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["demo", "no-such-file"], "INPUT no-such-file"),
        (["no-such-model", str(sample_path())], "MODEL no-such-model"),
        (["dem", str(sample_path())], "MODEL dem: is not a folder, and was not found on the hub (did you mean demo?)"),
        ([*DEMO, "--num_beam", "3"], "error: --num_beam 3: there is no such setting (did you mean num_beams?)"),
        ([*DEMO, "--num_beams"], "--num_beams: a setting needs a name and a value"),
        ([*DEMO, "--num_beams", "four"], "error: --num_beams: 'four' is not a number (accepted: a whole number"),
        ([*DEMO, "--lines", "0"], "--lines 0 (accepted: 1 or more)"),
        ([*DEMO, "--num_beams", "2", "--num_return_sequences", "3"], "num_return_sequences"),
    ],
)
def test_refused_arguments_end_with_2(argv, named, capsys, monkeypatch):
    # The variable HF_HUB_OFFLINE is read when the package is imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and named in capsys.readouterr().err
