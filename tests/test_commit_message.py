"""`tools/commit_message.py`: which messages of commits it accepts, and what it says about the rest."""

import subprocess
from pathlib import Path

import pytest
from python_process import REPOSITORY

from tools.commit_message import MOST_CHARACTERS, main, problems

SUBJECT = "Merge the two scorers into one"
BODY = "\n\nThey had equal loops. 84 lines fewer.\n"


@pytest.mark.parametrize(
    "message",
    [
        SUBJECT + BODY,
        f"{SUBJECT.ljust(MOST_CHARACTERS, 'e')}{BODY}",
        f"Pass the mask on{BODY}",
        f"Speed up beams{BODY}",
        f"Re-measure drafts{BODY}",
        f"# a comment of git\n{SUBJECT}{BODY}# On branch main\n",
        f"{SUBJECT}{BODY}# ------------------------ >8 ------------------------\ndiff; --git\n",
        "Merge branch 'words'\n",
        'Revert "Merge; two"\n',
        "fixup! anything; at all\n",
    ],
)
def test_messages_with_a_verb_and_a_body_are_accepted(message):
    assert problems(message) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("", "the subject has 0 characters"),
        (f"{SUBJECT.ljust(MOST_CHARACTERS + 1, 'e')}{BODY}", "the subject has 73 characters"),
        (f"Merge scorers; drop a loop{BODY}", 'the subject has a ";"'),
        (f"The scorers are one{BODY}", "begins with 'The'"),
        (f"Merged the scorers{BODY}", "begins with 'Merged'"),
        (f"Merges the scorers{BODY}", "begins with 'Merges'"),
        (f"merge the scorers{BODY}", "begins with 'merge'"),
        (f"words: merge the scorers{BODY}", "begins with 'words:'"),
        (SUBJECT, "there is no body"),
        (f"{SUBJECT}\n\nSigned-off-by: Somebody <somebody@localhost>\n", "there is no body"),
        (f"{SUBJECT}\nThey had equal loops.\n", "the second line is"),
    ],
)
def test_a_message_is_refused_for_each_of_its_problems(message, problem):
    lines = problems(message)
    assert any(problem in line for line in lines)
    assert all("(accepted: " in line for line in lines)


def test_each_problem_of_a_message_is_a_line(tmp_path, capsys):
    file = tmp_path / "message"
    file.write_text(f"{SUBJECT}{BODY}", encoding="utf-8")
    assert main([str(file)]) == 0 and capsys.readouterr().out == ""
    file.write_text("the; scorers", encoding="utf-8")
    assert main([str(file)]) == 1 and capsys.readouterr().out.count("\n") == 3
    assert main([]) == 2


def test_the_hook_runs_as_pre_commit_calls_it(tmp_path):
    """With the Python of the system: it imports nothing of fastgen."""
    entry = (REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (command,) = [line.partition("entry: ")[2] for line in entry.splitlines() if "commit_message" in line]
    file = Path(tmp_path, "COMMIT_EDITMSG")
    file.write_text("no verb", encoding="utf-8")
    done = subprocess.run([*command.split(), str(file)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1 and "begins with 'no'" in done.stdout
