"""Prints the tests of what has changed, one a line: those that the `Tests:` lines of changed modules name.

A changed test file stands for itself, a changed helper for the test files that import it. Changed files are those that
differ from the commit at which this branch left main, and those that git does not track. For `make check CHANGED=1`.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The tests of files without a docstring, by the beginning of their path.
OTHERS = {
    "csrc/": ["tests/ops"],
    "setup.py": ["tests/ops"],
    "docs/": ["tests/test_docs.py"],
    "docs/tutorial-": ["tests/test_tutorials.py"],
    "docs/public-api.md": ["tests/test_public_api.py"],
    "README.md": ["tests/test_docs.py", "tests/test_tutorials.py"],
    "CONTRIBUTING.md": ["tests/test_docs.py"],
    "examples/": ["tests/test_examples.py"],
    "examples/fastgen.ipynb": ["tests/test_notebook.py"],
    "benchmarks/": ["tests/test_benchmarks.py", "tests/test_peers.py"],
    "tools/": ["tests/test_demo.py", "tests/test_changed_tests.py", "tests/test_gpu_check.py"],
    "tools/words.py": ["tests/test_words.py"],
    "tools/commit_message.py": ["tests/test_commit_message.py"],
}


def changed_files(root: Path = ROOT) -> list[str]:
    """Returns the paths of files that were changed or added on this branch and in the working tree."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout

    base = git("merge-base", "HEAD", "main").strip() or "HEAD"
    changed = git("diff", "--name-only", "--diff-filter=d", base)
    return sorted({*changed.splitlines(), *git("ls-files", "--others", "--exclude-standard").splitlines()})


def find_tests(name: str, root: Path = ROOT) -> set[str]:
    """Returns the tests of a file. Raises LookupError for a module with code that names none."""
    path = root / name
    if name.startswith("tests/"):
        if path.name == "conftest.py":
            return {str(Path(name).parent)}
        return {name} if path.name.startswith("test_") else users_of(path, root)
    if name.startswith("fastgen/") and path.suffix == ".py":
        if not named_tests(path) and has_code(path):
            raise LookupError(f"{name} has no tests: its docstring has to end in `Tests:` and their paths")
        return set(named_tests(path))
    return {test for start, tests in OTHERS.items() if name.startswith(start) for test in tests}


def named_tests(module: Path) -> list[str]:
    """Returns the tests that the docstring of a module names."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    line = re.search(r"\bTests: (tests/.*)", docstring, re.DOTALL)
    return line.group(1).rstrip(".").replace(",", " ").split() if line else []


def has_code(module: Path) -> bool:
    """Returns whether a module defines functions or classes."""
    body = ast.parse(module.read_text(encoding="utf-8")).body
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in body)


def users_of(helper: Path, root: Path) -> set[str]:
    """Returns the test files that import a helper or name its file, or do so through other helpers."""
    texts = {path: path.read_text(encoding="utf-8") for path in (root / "tests").rglob("*.py")}
    users, latest = {helper}, {helper}
    while latest:
        names = [rf"(from|import) ([\w.]+\.)?{path.stem}\b|\b{re.escape(path.name)}\b" for path in latest]
        latest = {path for path, text in texts.items() if re.search("|".join(names), text)} - users
        users |= latest
    return {str(path.relative_to(root)) for path in users if path.name.startswith("test_")}


def main() -> None:
    try:
        tests = {test for name in changed_files() for test in find_tests(name)}
    except LookupError as error:
        raise SystemExit(str(error.args[0])) from None
    print(*sorted(tests), sep="\n")


if __name__ == "__main__":
    main()
