"""fastgen-eval-lm-for-fairseq is fairseq-eval-lm under fastgen."""

import re

import pytest
from fairseq_command_data import evaluation, language_model_data, upstream

from fastgen.cli.fairseq.command import eval_lm


@pytest.fixture
def arguments(tmp_path_factory):
    return evaluation(language_model_data(tmp_path_factory.getbasetemp()))


def results(text: str) -> list[str]:
    """Returns the logged words and loss, because speeds and times differ from run to run."""
    return re.findall(r"fairseq_cli.eval_lm:(\d+ .*|Loss.*|num. model params.*|\w+\t.*)", text)


def test_words_and_loss_are_fairseq_eval_lms(arguments, capfd, caplog):
    args = [*arguments, "--output-word-probs", "--output-word-stats"]
    expected = upstream("eval_lm", *args)
    for flags in ([], ["--no-fastgen"]):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert eval_lm([*args, *flags]) == 0
        assert capfd.readouterr().out == expected.stdout
        logged = "\n".join(f"{each.levelname}:{each.name}:{each.getMessage()}" for each in caplog.records)
        printed = results(logged)
        assert len(printed) > 50 and printed == results(expected.stderr)
