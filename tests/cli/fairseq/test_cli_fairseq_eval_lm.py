"""fastgen-eval-lm-for-fairseq is fairseq-eval-lm under fastgen."""

import re

import pytest
from fairseq_command_data import make_language_model, upstream
from python_process import run_python

COMMAND = "import sys; from fastgen.cli.fairseq.command import eval_lm; sys.exit(eval_lm())"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return make_language_model(tmp_path_factory.mktemp("fairseq-lm"))


def results(text: str) -> list[str]:
    """Returns the logged words and loss, because speeds and times differ from run to run."""
    return re.findall(r"fairseq_cli.eval_lm:(\d+ .*|Loss.*|num. model params.*|\w+\t.*)", text)


def test_words_and_loss_are_fairseq_eval_lms(arguments):
    args = [*arguments, "--output-word-probs", "--output-word-stats"]
    expected = upstream("eval_lm", *args)
    for flags in ([], ["--no-fastgen"]):
        done = run_python("-c", COMMAND, *args, *flags, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected.stdout
        printed = results(done.stderr)
        assert len(printed) > 50 and printed == results(expected.stderr)
