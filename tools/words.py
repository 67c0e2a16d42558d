"""Checks words: of Python files their docstrings, names and tests; of pages, of comments in C++, and of comments,
strings and names of the package the plain words.

    python tools/words.py fastgen tests docs csrc README.md

Prints a line for each finding, with what to write instead, and exits with status 1 if there is any. Outside of the
package, comprehensions may bind any name, because their variables end on the same line. Keywords of calls are not bound
by the caller. In a page, code and what is generated between two markers are not read.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

OPENINGS = ("Of", "As", "Those", "That")
PACKAGE = "fastgen"  # whose comments, strings and names are checked as well
NAMES = frozenset({"found", "given", "known", "made", "kept", "one"})
MOST_CHARACTERS = 60

# Words of a dialect that the documentation of transformers or vLLM would not use, and what to write instead.
PLAIN = (
    (r"(?<!in )(?<!in-)(?<!takes )places?", "index, position, slot, file"),
    (r"asked", "requested"),
    (r"(?<!each )others", "the rest, the other rows"),
    (r"(so|as) (many|few)(?! as)", "n rows, the same number of rows"),
    (r"(stands?|stood) for", "represents, replaces"),
    (r"(hears?|heard)", "processes"),
    (r"(is|are) tried with", "run … for a change in …"),
    (r"of which|of equal ones", "repeat the noun, or begin a sentence"),
    (r"(?<!there )(is|are|was|were) no(?! longer| more)", "is not a …, has no …"),
    (r"(?<!how )(?<!as )(begin|begins|are|is|look) alike", "have a common prefix, are equal"),
    (r"(goes|go|went|going) on", "continues"),
    (r"(is|are) gone", "was removed, has ended"),
    (r"however many", "even if all"),
    (r"\d[\d.]* to [\d.]*\d times|\d times as \w+|\d times the speed", "1.1–2.3×"),
)
PLAIN_WORDS = [(re.compile(rf"(?<![\w`-])({words})(?![\w`-])", re.IGNORECASE), better) for words, better in PLAIN]
FIELD = re.compile(r"\{[^{}\n]*\}")  # of an f-string
CODE = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)|https?://\S+")
BEGIN_GENERATED = re.compile(r"<!-- (tools/generated_pages\.py|measured|make matrix|gpu-check: begin) -->")
END_GENERATED = re.compile(r"<!-- (end|end of make matrix|gpu-check: end) -->")

# Names of the dialect in the package, and what to write instead.
IN_PACKAGE = {
    **dict.fromkeys(("one", "each"), "the noun: row, module, name"),
    **dict.fromkeys(("place", "places"), "index, position, slot, offset"),
    **dict.fromkeys(("before", "after", "earlier", "later"), "previous and next, old and new, start"),
    "asked": "requested, wanted",
    "others": "rest, remaining, or the plural of the noun",
}

Finding = tuple[int, str]
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


def main(arguments: list[str]) -> int:
    files = sorted({file for name in arguments for file in checked_files(Path(name))})
    if not files:
        accepted = f"files that end in {', '.join(CHECKS)}"
        print(f"no files to check in {' '.join(arguments) or 'no folder'} (accepted: {accepted}, or folders of these)")
        return 2
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    findings = [(file, line, text) for file in files for line, text in CHECKS[file.suffix](texts[file])]
    package = [file for file in files if file.suffix == ".py" and file.parts[0] == PACKAGE]
    for file in package:
        findings += [(file, line, text) for line, text in check_prose(texts[file]) + check_names(texts[file])]
    for file, line, text in findings:
        print(f"{file}:{line}: {text}")
    return 1 if findings else 0


def checked_files(path: Path) -> list[Path]:
    """Returns `path` itself, or the files in it and in its folders that have a check."""
    return sorted(file for file in path.rglob("*") if file.suffix in CHECKS) if path.is_dir() else [path]


# Python.


def check(source: str) -> list[Finding]:
    """Returns the findings in one Python file's source, by line."""
    tree = ast.parse(source)
    return sorted({*openings(tree), *bound_names(tree), *names_of_tests(tree)})


def openings(tree: ast.Module) -> Iterator[Finding]:
    """Yields the docstrings that are only understood after the name above them."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (docstring := ast.get_docstring(node)):
            word = docstring.split(maxsplit=1)[0].rstrip(",:.") if docstring.strip() else ""
            if word in OPENINGS:
                line = node.body[0].lineno
                yield line, f'docstring opens with "{word}": write "Returns …" or a complete noun phrase'


def bound_names(tree: ast.Module) -> Iterator[Finding]:
    """Yields where a participle or `one` is bound: to a variable, an attribute, a parameter, a function, a module."""
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.comprehension)]
    skipped = {id(name) for target in targets for name in ast.walk(target)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for line, name in names_bound_by(node):
            if name.strip("_") in NAMES:
                yield line, f"`{name}` says nothing about its value: name the thing (attention, matches, suffixes)"


def names_bound_by(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the names that this node binds by itself, with their lines."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.lineno, node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.lineno, node.attr
    elif isinstance(node, ast.arg):
        yield node.lineno, node.arg
    elif isinstance(node, (*Functions, ast.ClassDef)):
        yield node.lineno, node.name
    elif isinstance(node, ast.alias) and node.asname:
        yield node.lineno, node.asname
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.lineno, node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.lineno, node.rest


def names_of_tests(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, Functions) and node.name.startswith("test_") and len(node.name) > MOST_CHARACTERS:
            text = f"test name of {len(node.name)} characters: write a claim of at most {MOST_CHARACTERS}"
            yield node.lineno, text


def check_names(source: str) -> list[Finding]:
    """Returns where a Python file of the package binds one of `IN_PACKAGE`, in comprehensions too; not functions."""
    nodes = (node for node in ast.walk(ast.parse(source)) if not isinstance(node, Functions))
    bound = [(line, name, name.strip("_")) for node in nodes for line, name in names_bound_by(node)]
    return [(line, f"`{name}`: write {IN_PACKAGE[word]}") for line, name, word in bound if word in IN_PACKAGE]


# Prose.


def check_page(text: str) -> list[Finding]:
    """Returns the findings in a Markdown page, outside of code and of what is generated between markers."""
    lines, in_code, is_generated = [], False, False
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        is_generated = not END_GENERATED.search(line) and (is_generated or bool(BEGIN_GENERATED.search(line)))
        lines.append("" if is_fence or in_code or is_generated else line)
    return plain_words(lines)


def check_comments(text: str) -> list[Finding]:
    """Returns the findings in the comments of a C++ file."""
    return plain_words(line.partition("//")[2] for line in text.splitlines())


def check_prose(source: str) -> list[Finding]:
    """Returns the findings in the comments of a Python file, and in its strings of several words."""
    lines = [""] * (source.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_message = token.type == tokenize.STRING and " " in token.string
        if is_message or token.type == tokenize.COMMENT:
            text = FIELD.sub(lambda field: " " * len(field[0]), token.string)
            for number, line in enumerate(text.splitlines(), start=token.start[0] - 1):
                lines[number] += " " + line
    return plain_words(lines)


def plain_words(lines: Iterable[str]) -> list[Finding]:
    """Returns the words of `PLAIN` in the lines, also where a line breaks between two of them."""
    texts = [CODE.sub(lambda code: "`" + " " * (len(code[0]) - 2) + "`", line).rstrip() for line in lines]
    joined = " ".join(text.lstrip() for text in texts)
    starts = [0]
    for text in texts:
        starts.append(starts[-1] + len(text.lstrip()) + 1)
    findings = []
    for pattern, better in PLAIN_WORDS:
        for match in pattern.finditer(joined):
            line = sum(start <= match.start() for start in starts)
            findings.append((line, f'"{match[0]}": write {better}'))
    return sorted(findings)


CHECKS: dict[str, Callable[[str], list[Finding]]] = {
    ".py": check,
    ".md": check_page,
    **dict.fromkeys((".h", ".cpp", ".cu"), check_comments),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
