"""`tools/words.py`: which docstrings, names and tests it finds, and which it leaves alone."""

from __future__ import annotations

import pytest

from tools.words import check, main


@pytest.mark.parametrize("word", ["Of", "As", "Those", "That"])
@pytest.mark.parametrize("head", ["", "class Name:\n    ", "def name():\n    ", "async def _name():\n    "])
def test_docstrings_that_need_the_name_above_are_findings(head, word):
    [(line, text)] = check(f'{head}"""{word} the last call."""\n')
    assert line == head.count("\n") + 1
    assert f'opens with "{word}"' in text
    assert check(f'{head}"""Returns the report {word.lower()} it."""\n') == []


@pytest.mark.parametrize(
    "line",
    [
        "found = 1",
        "found: int",
        "found += 1",
        "self.found = 1",
        "self._found, rest = pair",
        "(found := 1)",
        "for found in rows: ...",
        "with rows as found: ...",
        "import rows as found",
        "def name(*, found): ...",
        "def name(**found): ...",
        "def found(): ...",
        "name = lambda found: 1",
    ],
)
def test_names_that_say_nothing_are_findings(line):
    [(number, text)] = check(f"first = 1\n{line}\n")
    assert number == 2
    assert "found` says nothing" in text


@pytest.mark.parametrize(
    "line", ["[found for found in rows]", "{one: two for one, two in rows}", "name(given=1)", "first = self.known"]
)
def test_comprehensions_keywords_and_reads_are_no_findings(line):
    assert check(line + "\n") == []


def test_names_of_tests_have_at_most_60_characters():
    assert check(f"def {'test_'.ljust(60, 'a')}(): ...\n") == []
    [(line, text)] = check(f"def {'test_'.ljust(61, 'a')}(): ...\n")
    assert (line, "61 characters" in text) == (1, True)


def test_words_prints_places_and_exits_with_status_1(tmp_path, capsys):
    file = tmp_path / "module.py"
    file.write_text("rows = 1\n", encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    file.write_text("rows = 1\nfound = 1\n", encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{file}:2: `found` says nothing")
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
