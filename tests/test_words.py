"""`tools/words.py`: which docstrings, names, tests and words of pages it finds, and which it leaves alone."""

from __future__ import annotations

import pytest

from tools.words import check, check_comments, check_names, check_page, check_prose, main


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


@pytest.mark.parametrize(
    "text",
    [
        "the place of the token",
        "requests that are asked for",
        "it does not stop the others",
        "units of so many rows",
        "a graph with as many rows",
        "one row stands for equal rows",
        "Whisper hears 30 seconds",
        "a change is tried with these tests",
        "a row of which the mask is hidden",
        "where a class is no module",
        "prompts that begin alike",
        "the call goes on",
        "1.1 to 2.3 times as fast",
        "it is 3.2 times as fast",
        "However many inputs fail",
        "the token that stands\nfor the prompt",
    ],
)
def test_words_of_a_dialect_are_findings_in_pages_and_comments(text):
    [(line, advice)] = check_page(f"# Title\n\n{text}\n")
    assert line == 3 and ": write " in advice
    commented = "// ".join(["", *text.splitlines(keepends=True)])
    [(line, _)] = check_comments(f"int first = 1;\n{commented}\n")
    assert line == 2


@pytest.mark.parametrize(
    "text",
    [
        "written in place",
        "in place of a copy",
        "threads wait for each other",
        "there is no network",
        "its weights are no longer equal",
        "as many as there are beams",
        "`is no place for others`",
        "[a link](place.md#others)",
        "```bash\necho others\n```",
        "<!-- measured -->\nother engines, others\n<!-- end -->",
    ],
)
def test_plain_words_and_code_are_no_findings_in_pages(text):
    assert check_page(text) == []


def test_code_of_kernels_may_use_any_word():
    assert check_comments("int64_t place = others; // index\n") == []


def test_words_reads_pages_and_kernels_of_a_folder(tmp_path, capsys):
    for name, text in (("page.md", "a place\n"), ("kernel.cpp", "// a place\n"), ("data.json", "a place\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{tmp_path}/kernel.cpp:1", f"{tmp_path}/page.md:1"]


@pytest.mark.parametrize(
    "line",
    [
        "rows = [each for each in range(3)]",
        "for one in rows: ...",
        "before = 1",
        "def name(asked): ...",
        "self.others = 1",
        "_place, rest = pair",
    ],
)
def test_names_of_the_package_are_not_those_of_a_dialect(line):
    [(number, text)] = check_names(f"first = 1\n{line}\n")
    assert number == 2 and ": write " in text


def test_functions_of_the_package_may_have_any_name():
    assert check_names("def after(self, count): ...\nlater_count = in_place = 1\n") == []


def test_comments_and_messages_of_the_package_use_plain_words():
    lines = ['name = f"{others} are here"', "# the rest and", "# so many others", "others[key] = '`so many`'"]
    source = "\n".join([*lines, ""])
    assert [line for line, _ in check_prose(source)] == [3, 3]
    assert [line for line, _ in check_prose('"""Returns what\nis no folder."""\n')] == [2]
