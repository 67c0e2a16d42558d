"""Trust in a host's code: accepted by its source, or proved by a trial at its first use.

fastgen repeats what functions of its hosts do, or relies on it. A *source* names such code: a module,
"transformers.cache_utils", or a function or class of one, "lm_eval.models.huggingface:HFLM._model_call". contracts.json
has the hashes of the sources for which the tests of this repository found equal results; `pytest --write-contracts`
writes them. Version numbers are not checked.

    unknown_sources(names)   those whose hash is not accepted, with their hashes: none, and everything is on
    trial(key, ours, theirs, difference)
                             for a key of unknown sources and of all that chooses code: the first time it runs both,
                             and the caller gets the host's result. If fastgen's differs, it is not used for this key;
                             otherwise it is, in this process and, by a file in the cache folder, in later ones

A hash is that of the syntax tree without docstrings, comments and annotations: equal on every version of Python.

Tests: tests/optimizer/test_trust.py
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastgen.ops import measurements
from fastgen.optimizer.decoding.call import add_reasons, undo_of_random_numbers
from fastgen.optimizer.decoding.report import PREFILL, LeaveAlone, Reason
from fastgen.patching import disabled, warn

logger = logging.getLogger("fastgen")

CONTRACTS = Path(__file__).with_name("contracts.json")

# A key for which this number of trials showed nothing, or could not be made, is left to the host.
MOST_TRIALS = 3

# Fields of the syntax tree that do not change what code does, or that only some versions of Python have.
_WITHOUT_EFFECT = frozenset({
    "annotation", "ctx", "kind", "returns", "simple", "type_comment", "type_ignores", "type_params",
})  # fmt: skip

Result = TypeVar("Result")


class NotComparable(Exception):
    """A trial shows nothing: the key stays unknown, and nothing is refused."""


# Sources.


def hash_of(source: str) -> str | None:
    """Returns the hash of a source, whose module must be imported; None if its code cannot be read."""
    return None if (texts := _hashes(source)) is None else texts[1]


@functools.cache
def _hashes(source: str) -> tuple[str, str] | None:
    """Returns the hash of the module's text and that of the source's syntax tree, or None."""
    module, _, path = source.partition(":")
    try:
        text = inspect.getsource(sys.modules[module])
        of_text = _digest(text)
        key = f"{source} {of_text}"
        accepted = contracts().get(source, {})
        of_tree = accepted.get(of_text) or _stored().get(key)
        if of_tree is None:  # parsing all files takes 0.7 s
            of_tree = _digest(_described(_node_at(ast.parse(text), path)))
            measurements.store("trust", "", {"key": key, "value": of_tree})
        return of_text, of_tree
    except (KeyError, OSError, SyntaxError, TypeError):
        return None


def _node_at(node: Any, path: str) -> ast.AST:
    """Returns the function or class at a path of names. Raises KeyError if there is none."""
    for name in filter(None, path.split(".")):
        node = {child.name: child for child in node.body if hasattr(child, "name")}[name]
    return node


def _described(node: Any) -> str:
    """Returns a text that is equal for syntax trees that do the same."""
    if isinstance(node, list):
        return f"[{','.join(map(_described, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list) and value and _is_docstring(value[0]):
            value = value[1:]
        if name not in _WITHOUT_EFFECT and value not in (None, []):
            fields.append(f"{name}={_described(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def contracts() -> dict[str, dict[str, str]]:
    """Returns the accepted hashes of each source, by the hash of its module's text, which is faster to compute."""
    return json.loads(CONTRACTS.read_text(encoding="utf-8"))


def unknown_sources(sources: Iterable[str]) -> dict[str, str | None]:
    """Returns the sources whose hash is not accepted, with their hash; None for code that cannot be read."""
    hashes = {source: hash_of(source) for source in sources}
    return {source: digest for source, digest in hashes.items() if digest not in contracts().get(source, {}).values()}


# Trials.

# What differed, by key; None if nothing did.
_outcomes: dict[Hashable, str | None] = {}
_inconclusive: Counter[Hashable] = Counter()

# Held during a trial, which changes the random state of all threads. Nobody waits for it: the model's code runs inside,
# and might wait for other threads.
_RUNNING = threading.Lock()


def is_proven(key: Hashable) -> bool:
    """Whether a trial for this key, in this process or an earlier one, showed no difference."""
    if key not in _outcomes and isinstance(key, str) and _stored().get(key) == "proven":
        _outcomes[key] = None
    return key in _outcomes and _outcomes[key] is None


def unfit(key: Hashable) -> list[str]:
    """Returns why no trial for this key can be made now; empty if one can."""
    if _RUNNING.locked():
        return ["another comparison is running"]
    return ["its first calls showed nothing to compare"] if _inconclusive[key] >= MOST_TRIALS else []


def refusal(key: Hashable) -> str | None:
    """Returns what differed in a trial for this key, or None."""
    return _outcomes.get(key)


def trial(
    key: Hashable,
    ours: Callable[[], Any],
    theirs: Callable[[], Result],
    difference: Callable[[Any, Result], object],
    subject: str,
) -> Result:
    """Returns the host's result, `theirs()`; unless the key was tried, compares it with `ours()`.

    key: what chooses code; a text is stored for later processes. ours: runs with the random numbers that `theirs` had;
    may raise NotComparable. difference: returns how both differ, or None. subject: what is left alone then, for the
    warning.
    """
    if key in _outcomes or unfit(key):
        with disabled():
            return theirs()
    restore = undo_of_random_numbers()
    with disabled():
        result = theirs()
    if not _RUNNING.acquire(blocking=False):
        return result
    restore_final = undo_of_random_numbers()
    try:
        restore()
        with torch.no_grad():
            different = difference(ours(), result)
        _conclude(key, different, subject)
    except NotComparable as nothing:
        _inconclusive[key] += 1
        logger.info("a trial of %s shows nothing: %s", subject, nothing)
    except (LeaveAlone, torch.cuda.OutOfMemoryError) as left_alone:
        logger.info("a trial of %s shows nothing: %r", subject, left_alone)
    except Exception as error:
        _conclude(key, f"{type(error).__name__}: {error}", subject)
    finally:
        restore_final()
        _RUNNING.release()
    return result


def ours_or_theirs(
    unknown: dict[str, str | None],
    parts: tuple[Any, ...],
    ours: Callable[[], Result],
    theirs: Callable[[], Result],
    difference: Callable[[Result, Result], object],
    subject: str,
) -> Result:
    """Returns `ours()` if no source is unknown or a trial has shown no difference; otherwise `theirs()`.

    unknown: see `unknown_sources`. parts: what else chooses code.
    """
    if not unknown:
        return ours()
    key = (parts, *unknown.items()) if None in unknown.values() else key_of(*parts, *sorted(unknown.items()))
    if is_proven(key):
        return ours()
    left_alone: list[Reason] = []

    def noting() -> Result:
        try:
            return ours()
        except LeaveAlone as error:
            left_alone[:] = error.reasons
            raise

    result = trial(key, noting, theirs, difference, subject)
    add_reasons(PREFILL, left_alone or [reason_for(key, subject)])
    return result


def reason_for(key: Hashable, subject: str) -> Reason:
    """Returns why a call of this key was left to the host, after a trial."""
    if different := refusal(key):
        return Reason("DIFFERS", f"{subject}: {different}")
    return Reason("FIRST_USE", f"{subject} is compared at its first use")


def _conclude(key: Hashable, different: object, subject: str) -> None:
    _outcomes[key] = None if different is None else str(different)
    if different is not None:
        warn(f"fastgen leaves {subject} to the library: {different}")
    elif isinstance(key, str):
        measurements.store("trust", "", {"key": key, "value": "proven"})


def key_of(*parts: Any) -> str:
    """Returns a key for later processes, of parts whose texts say all, and of fastgen's own code."""
    return _digest(repr((_own_code(), *parts)))


@functools.cache
def _own_code() -> str:
    """Returns a hash of fastgen's sources: a proof is one of these."""
    return _digest("".join(path.read_text(encoding="utf-8") for path in sorted(CONTRACTS.parents[1].rglob("*.py"))))


@functools.cache
def _stored() -> dict[str, str]:
    """Returns what earlier processes have stored: "proven" by key, and hashes of sources by those of their texts."""
    entries = [entry for entry in measurements.stored("trust", "") if isinstance(entry, dict)]
    return {str(entry.get("key")): str(entry.get("value")) for entry in entries}
