"""Writes what pages of docs/ say of the code: reasons.md, flags.md, and the table of how-it-works.md.

usage: generated_pages.py

Needs transformers and fairseq. Texts before the first table of a page are the page's own.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastgen.batch.config import CHECKS, FASTSEQ_NAMES, OTHER_NAMES, BadValue, Check, settings_of_run
from fastgen.batch.generator import OF_FILES
from fastgen.cli import verify
from fastgen.cli.fairseq import args as fairseq_args
from fastgen.cli.fairseq.command import add_flags
from fastgen.cli.transformers.args import PROG, build_parser
from fastgen.optimizer.decoding import graphs
from fastgen.optimizer.decoding.report import Reason
from fastgen.optimizer.fairseq import checks as of_fairseq
from fastgen.optimizer.transformers import checks as of_transformers
from fastgen.optimizer.transformers import prefixes
from fastgen.reasons import CHOSEN, CODES

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- tools/generated_pages.py -->\n", "<!-- end -->\n"
MEANINGS = {code: meaning for codes in CODES.values() for code, meaning in codes.items()}
HOSTS = {"T": of_transformers.CallChecks, "F": of_fairseq.CallChecks}
# The parts of a call, and what leaves them to each host: tables of its `CallChecks` by name, and functions.
PARTS: dict[str, dict[str, list[Any]]] = {
    "prefill": {"T": ["prefill_sync", "row_states"]},
    "prefix": {"T": [prefixes.unsupported_reasons, prefixes.model_reasons, "prefix"]},
    "loop": {"T": ["settings", "loop"], "F": ["loop", of_fairseq.plan]},
    "capture": {"T": [graphs.can_capture, "capture", "rows"], "F": [graphs.can_capture, "capture", "rows"]},
    "compaction": {"T": ["compaction"]},
    "drafts": {"T": ["drafts"]},
}


def reasons() -> str:
    """Returns a table of codes for each section of `CODES`."""
    return "\n".join(
        f"## {title}\n\n{_table(('code', 'meaning'), [(f'`{code}`', meaning) for code, meaning in codes.items()])}"
        for title, codes in CODES.items()
    )


def left_alone() -> str:
    """Returns the table of reasons by which a part of a call is the library's: one of them is enough."""
    cells: dict[str, dict[str, str]] = {}
    for part, tables in PARTS.items():
        for host, places in tables.items():
            codes = set().union(*(_codes_of(place, HOSTS[host]) for place in places))
            for code in codes - CODES[CHOSEN].keys():
                row = cells.setdefault(code, dict.fromkeys(PARTS, ""))
                row[part] = f"{row[part]} {host}".strip()
    rows = [(f"{MEANINGS[code]} (`{code}`)", *cells[code].values()) for code in MEANINGS if code in cells]
    return _table(("if", *PARTS), rows)


def _codes_of(place: Any, owner: type, done: set[Callable] | None = None) -> set[str]:
    """Returns the codes that a function, or what `owner` has by this name, gives a reason of, or has from functions."""
    done = set() if done is None else done
    value = inspect.getattr_static(owner, place) if isinstance(place, str) else place
    if isinstance(value, (property, functools.cached_property)):
        value = value.fget if isinstance(value, property) else value.func
    if not inspect.isfunction(value) or value in done or not value.__module__.startswith("fastgen.optimizer"):
        return set()
    done.add(value)
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    variables = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = {name: each for name, each in value.__globals__.items() if name not in variables}
    codes: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in MEANINGS:
            codes.add(node.value)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            codes |= _codes_of(node.attr, owner, done) if hasattr(owner, node.attr) else _row(node.attr, owner)
        elif isinstance(target := _named(node, names), Reason):
            codes.add(target.code)
        elif inspect.isfunction(target):
            codes |= _codes_of(target, owner, done)
    return codes


def _named(node: ast.AST, names: dict[str, Any]) -> Any:
    """Returns what a name stands for in a module, or in one that it has imported."""
    if isinstance(node, ast.Attribute):
        module = _named(node.value, names)
        return getattr(module, node.attr, None) if inspect.ismodule(module) else None
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _row(name: str, owner: type) -> set[str]:
    """Returns the code of a row that an object makes once, for several of its tables."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner.__init__)))
    rows = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)]
    rows = [node.value.elts[0] for node in rows if ast.unparse(node.targets[0]) == f"self.{name}"]
    return {code.value for code in rows if isinstance(code, ast.Constant) and code.value in MEANINGS}


def flags() -> str:
    """Returns a table of flags for each group of each command."""
    accepts = {each.name: each.metadata["accepts"] for each in settings_of_run()} | CHECKS
    generation = fairseq_args.generation_parser()
    evaluation = add_flags(argparse.ArgumentParser(add_help=False))
    own = next(group for group in generation._action_groups if group.title == evaluation.title)
    texts = [f"## {PROG}\n"]
    for group in build_parser(everything=True)._action_groups:
        if table := _flags(group, accepts):
            texts.append(f"### {(group.title or '').capitalize()}\n\n{table}")
    others = {name: to for name, to in OTHER_NAMES.items() if to not in FASTSEQ_NAMES}
    other_names = ", ".join(f"`--{name}` is `--{to}`" for name, to in (FASTSEQ_NAMES | others).items())
    without = ", ".join(f"`{name}`" for name in OF_FILES)
    texts.append(f"Other names: {other_names}.\n")
    texts.append(f"`fastgen.TextGenerator` takes the settings by name, except {without}.\n")
    texts.append(f"### Values of settings of `generate`\n\n{_settings_of_generate()}")
    texts.append(f"## fastgen-generate-for-fairseq\n\nBesides the flags of fairseq-generate:\n\n{_flags(own, {})}")
    texts.append(f"## fastgen-eval-lm-for-fairseq\n\nBesides the flags of fairseq-eval-lm:\n\n{_flags(evaluation, {})}")
    texts.append("## python -m fastgen verify\n")
    texts += filter(None, (_flags(group, {}) for group in verify._parser()._action_groups))
    return "\n".join(texts)


def _flags(group: argparse._ArgumentGroup, accepts: Mapping[str, Check]) -> str:
    """Returns the table of the flags of a group that its command's help shows; "" if there is none."""
    rows = []
    for action in group._group_actions:
        if action.help == argparse.SUPPRESS:
            continue
        takes_value = action.nargs != 0
        name = next((name for name in action.option_strings if name.startswith("--")), "")
        flag = f"{name} {action.metavar if takes_value else ''}".strip()
        setting = getattr(action.type, "args", (action.dest,))[0]  # of generate, whose flags have one dest
        accepted = _accepted(accepts[setting]) if takes_value and setting in accepts else ""
        meaning, _, default = (action.help or "").partition(" (default: ")
        rows.append((f"`{flag}`", _escaped(meaning), accepted, _escaped(default.removesuffix(")"))))
    filled = [column for column in range(4) if any(row[column] for row in rows)]
    head, *rows = [[row[column] for column in filled] for row in (("flag", "meaning", "accepted", "default"), *rows)]
    return _table(head, rows) if rows else ""


def _settings_of_generate() -> str:
    values: dict[str, list[str]] = {}
    for name, check in CHECKS.items():
        values.setdefault(_accepted(check), []).append(f"`{name}`")
    return _table(("setting", "accepted"), [(", ".join(names), value) for value, names in values.items()])


def _accepted(check: Check) -> str:
    """Returns what a setting accepts, as its message says it."""
    try:
        check(object())
    except BadValue as error:
        accepted = str(error).partition("(accepted: ")[2].removesuffix(")")
        accepted = re.sub(r"a whole number, (-?\d+) to \d+", r"a whole number from \1 on", accepted)
        return "" if accepted == "a string" else _escaped(accepted)
    return ""


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    first, *lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([first, "|---" * len(head) + "|", *lines]) + "\n"


PAGES: dict[str, Callable[[], str]] = {"reasons.md": reasons, "flags.md": flags, "how-it-works.md": left_alone}


def page(name: str) -> str:
    """Returns the page with what is generated between its marks."""
    text = (DOCS / name).read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{PAGES[name]()}\n{END}{after}"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
