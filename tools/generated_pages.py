"""Writes what pages of docs/ say of the code: reasons.md and flags.md.

usage: generated_pages.py

Needs transformers and fairseq. Texts before the first table of a page are the page's own.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType

from fastgen.batch.config import CHECKS, FASTSEQ_NAMES, OTHER_NAMES, names_of, settings_of_run
from fastgen.batch.values import Check
from fastgen.cli import verify
from fastgen.cli.fairseq import args as fairseq_args
from fastgen.cli.fairseq.command import add_flags
from fastgen.cli.transformers.args import PROG, build_parser
from fastgen.optimizer.decoding import report
from fastgen.reasons import CHOSEN, CODES

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- tools/generated_pages.py -->\n", "<!-- end -->\n"
MEANINGS = {code: meaning for codes in CODES.values() for code, meaning in codes.items()}
PARTS = [report.PREFILL, report.PREFIX, report.LOOP, report.STEPS, report.COMPACTION, report.DRAFTS]
# The modules of each host's checks. Those of fastgen.optimizer.decoding are for both hosts.
HOSTS = {
    "T": ("fastgen.optimizer.transformers", "fastgen.optimizer.trl"),
    "F": ("fastgen.optimizer.fairseq",),
}


def reasons() -> str:
    """Returns a table of codes for each section of `CODES`."""
    parts_of = _parts_of_codes()
    sections = []
    for title, codes in CODES.items():
        rows = [(f"`{code}`", meaning, parts_of.get(code, "")) for code, meaning in codes.items()]
        columns = 2 if title == CHOSEN else 3  # what saves nothing is not left to the library
        head = ("code", "meaning", "left to the library")[:columns]
        sections.append(f"## {title}\n\n{_table(head, [row[:columns] for row in rows])}")
    return "\n".join(sections)


def _parts_of_codes() -> dict[str, str]:
    """Returns the parts of a call that each reason leaves to the library, with the hosts in which it does."""
    for name in itertools.chain(*HOSTS.values()):  # registers the checks
        for module in pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", []), f"{name}."):
            importlib.import_module(module.name)
    hosts_of: dict[str, dict[str, set[str]]] = {}
    for function, parts in report.CHECKS:
        hosts = [host for host, names in HOSTS.items() if function.__module__.startswith(names)]
        for code, part in itertools.product(_codes_of(function.__code__), parts):
            hosts_of.setdefault(code, {}).setdefault(part, set()).update(hosts or HOSTS)
    return {
        code: ", ".join(
            f"{part} ({' '.join(host for host in HOSTS if host in of_part[part])})" for part in PARTS if part in of_part
        )
        for code, of_part in hosts_of.items()
    }


def _codes_of(code: CodeType) -> set[str]:
    """Returns the codes of reasons among the constants of a function."""
    within = [_codes_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return MEANINGS.keys() & {*code.co_consts}.union(*within)


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
    without = ", ".join(f"`{name}`" for name in names_of(python=False))
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
    """Returns what a setting accepts, as its message says it; empty for any text."""
    accepted = re.sub(r"a whole number, (-?\d+) to \d+", r"a whole number of \1 or more", check.accepted)
    return "" if accepted == "a string" else _escaped(accepted)


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    first, *lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([first, "|---" * len(head) + "|", *lines]) + "\n"


PAGES: dict[str, Callable[[], str]] = {"reasons.md": reasons, "flags.md": flags}


def page(name: str) -> str:
    """Returns the page with what is generated between its marks."""
    text = (DOCS / name).read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{PAGES[name]()}\n{END}{after}"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
