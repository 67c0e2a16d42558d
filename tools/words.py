"""Checks the words of Python files: how docstrings open, names that name nothing, how long names of tests are.

    python tools/words.py fastgen tests tools

Prints a line for each finding, with what to write instead, and exits with status 1 if there is any. Comprehensions may
bind any name, because their variables end on the same line. Keywords of calls are not bound by the caller.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

OPENINGS = ("Of", "As", "Those", "That")
NAMES = frozenset({"found", "given", "known", "made", "kept", "one"})
MOST_CHARACTERS = 60

Finding = tuple[int, str]
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


def main(arguments: list[str]) -> int:
    files = sorted({file for argument in arguments for file in python_files(Path(argument))})
    if not files:
        print(f"no Python files in {' '.join(arguments) or 'no folder'}: name files or folders to check")
        return 2
    findings = [(file, line, text) for file in files for line, text in check(file.read_text(encoding="utf-8"))]
    for file, line, text in findings:
        print(f"{file}:{line}: {text}")
    return 1 if findings else 0


def python_files(path: Path) -> list[Path]:
    """Returns `path` itself, or the Python files in it and in its folders."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def check(source: str) -> list[Finding]:
    """Returns the findings in one file's source, by line."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
