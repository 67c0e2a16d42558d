"""Sources of hosts are accepted by their hash, and other code by one trial."""

import ast
import json
import os
import random
import subprocess
import sys
import types

import pytest
import torch
from hooks import accept, fresh_trust, proven, refused

import fastgen
from fastgen.optimizer import trust
from fastgen.optimizer.decoding.report import LeaveAlone, Reason
from fastgen.optimizer.trust import NotComparable
from fastgen.testing import configured

UNKNOWN = {"host": "0123"}


def forget_sources():
    trust._hashes.cache_clear()
    trust.contracts.cache_clear()


@pytest.fixture(autouse=True)
def _fresh():
    forget_sources()
    with fresh_trust():
        yield
    forget_sources()


@pytest.fixture
def hash_in(tmp_path, monkeypatch):
    """Returns the hash of a source in a module with this text."""

    def hashed(text: str, path: str = "") -> str | None:
        file = tmp_path / f"{random.getrandbits(64):x}.py"
        file.write_text(text)
        monkeypatch.setitem(sys.modules, "hashed_host", types.ModuleType("hashed_host"))
        sys.modules["hashed_host"].__file__ = str(file)
        forget_sources()
        return trust.hash_of("hashed_host" + path)

    return hashed


BASE = "class A:\n    def f(self, x):\n        return x * 2\n\ndef g():\n    return A().f(3)\n"
HARMLESS = {
    "comment": BASE.replace("return x * 2", "return x * 2  # twice"),
    "docstrings": '"""A file."""\n' + BASE.replace("(self, x):\n", '(self, x):\n        """Doubles."""\n'),
    "annotations": BASE.replace("(self, x)", "(self, x: int) -> int"),
    "layout": BASE.replace("x * 2", "(x\n            * 2)"),
}
IN_SUBSTANCE = {
    "number": BASE.replace("x * 2", "x * 3"),
    "operator": BASE.replace("x * 2", "x + 2"),
    "name": BASE.replace("x * 2", "self * 2"),
    "default": BASE.replace("(self, x)", "(self, x=1)"),
    "string that is used": BASE.replace("x * 2", "'x' * 2"),
    "decorator": BASE.replace("    def", "    @staticmethod\n    def"),
    "order": BASE.replace("return x * 2", "y = x\n        x = y\n        return x * 2"),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_comments_docstrings_annotations_and_layout_do_not_count(hash_in, change):
    assert hash_in(BASE) == hash_in(HARMLESS[change])


@pytest.mark.parametrize("change", IN_SUBSTANCE)
def test_what_code_does_counts(hash_in, change):
    assert hash_in(BASE) != hash_in(IN_SUBSTANCE[change])


def test_a_function_has_a_hash_of_its_own(hash_in):
    of_method = hash_in(BASE, ":A.f")
    assert of_method != hash_in(BASE) and of_method == hash_in(BASE.replace("f(3)", "f(4)"), ":A.f")
    assert of_method != hash_in(BASE.replace("x * 2", "x * 3"), ":A.f")


@pytest.mark.parametrize("source", ("no_such_module", "builtins", "fastgen.optimizer.trust:NoSuchName"))
def test_code_that_cannot_be_read_is_unknown(source):
    assert trust.hash_of(source) is None and trust.unknown_sources([source]) == {source: None}


def test_the_hash_is_equal_on_all_versions_of_python(tmp_path):
    file = tmp_path / "host.py"
    file.write_text("type_of = f'{1 + 1!r:>{4}}' 'b'\nx: int = 3\ndef f(a, /, *b, c=1, **d):\n    return a[1:2, ::3]\n")
    program = f"""
import ast, sys, types
sys.path[:0] = {[str(tmp_path)]}
names = {{"ast": ast, "_WITHOUT_EFFECT": {sorted(trust._WITHOUT_EFFECT)}}}
exec({ast.unparse(_functions("_described", "_is_docstring"))!r}, names)
print(names["_described"](ast.parse(open({str(file)!r}).read())))
"""
    described = set()
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        command = [f"python{version}", "-c", program]
        try:
            described.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        except (FileNotFoundError, subprocess.CalledProcessError):
            continue  # not installed
    assert len(described) <= 1


def _functions(*names: str) -> ast.Module:
    with open(trust.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    body = [node for node in tree.body if getattr(node, "name", "") in names]
    for node in body:
        node.args.args[0].annotation = node.returns = None
    return ast.Module(body, [])


def test_the_installed_transformers_is_accepted():
    import transformers.models.bart.modeling_bart  # noqa: F401

    from fastgen.optimizer.transformers.sources import FILES

    assert not trust.unknown_sources(name for name in FILES if name in sys.modules)
    assert not trust.unknown_sources(["transformers.models.bart.modeling_bart"])


def test_accepting_a_source_adds_to_those_of_other_versions(hash_in, tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "CONTRACTS", tmp_path / "contracts.json")
    trust.CONTRACTS.write_text('{"hashed_host": {"0": "1"}, "other": {"2": "3"}}')
    accepted = hash_in(BASE)
    accept(["hashed_host", "no_such_module"])
    contracts = json.loads(trust.CONTRACTS.read_text())
    assert contracts["other"] == {"2": "3"} and contracts["hashed_host"].pop("0") == "1"
    assert [*contracts["hashed_host"].values()] == [accepted]


# Trials.


def choose(ours, theirs, difference=lambda ours, theirs: None if ours == theirs else f"{ours} for {theirs}"):
    return trust.ours_or_theirs(UNKNOWN, ("a test",), ours, theirs, difference, "a function")


def test_accepted_code_runs_no_trial():
    assert trust.ours_or_theirs({}, (), lambda: 1, lambda: 2, lambda *both: "different", "a function") == 1


def test_equal_results_are_compared_once():
    calls = []
    for _ in range(3):
        choose(lambda: calls.append("ours"), lambda: calls.append("theirs"))
    assert calls == ["theirs", "ours", "ours", "ours"] and len(proven()) == 1


def test_different_results_leave_code_to_the_host_with_a_warning():
    with pytest.warns(RuntimeWarning, match="fastgen leaves a function to the library: 1 for 2") as warned:
        assert [choose(lambda: 1, lambda: 2) for _ in range(3)] == [2, 2, 2]
    assert len(warned) == 1 and refused() == {"1 for 2"}


def test_both_draw_equal_random_numbers_and_the_caller_the_next():
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)

    def draw() -> float:
        return torch.rand(1).item()

    assert [choose(draw, draw), torch.rand(1).item()] == expected and proven()


def test_an_error_of_ours_refuses_and_does_not_reach_the_caller():
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        assert choose(lambda: 1 / 0, lambda: 2) == 2
    assert refused()


def test_an_error_of_the_host_is_the_callers():
    with pytest.raises(KeyError):
        choose(lambda: 1, lambda: {}["no"])
    assert not proven() and not refused()


@pytest.mark.parametrize("error", (NotComparable("too short"), LeaveAlone([Reason("TOO_SMALL", "too small")])))
def test_a_trial_may_show_nothing(error):
    def ours() -> int:
        raise error

    assert [choose(ours, lambda: 2) for _ in range(trust.MOST_TRIALS + 2)] == [2] * (trust.MOST_TRIALS + 2)
    assert not proven() and not refused()


def test_the_host_runs_without_fastgen_in_a_trial():
    on = []
    choose(lambda: None, lambda: on.append(fastgen.optimizer.PATCH_SET.is_on))
    assert on == [False]


def test_a_trial_inside_a_trial_is_the_hosts():
    inner = []
    choose(
        lambda: inner.append(trust.trial("inner", lambda: 1, lambda: 2, lambda *both: None, "a function")), lambda: None
    )
    assert inner == [2] and "inner" not in proven()


def test_a_proof_serves_later_processes_beside_damaged_lines(tmp_path):
    with configured(cache=str(tmp_path)):
        choose(lambda: 1, lambda: 1)
        (key,), (file,) = proven(), tmp_path.iterdir()
        assert json.loads(file.read_bytes()) == {"key": key, "value": "proven"}
        file.write_bytes(b"\x00{nonsense\n[1]\n" + file.read_bytes())
        program = f"from fastgen.optimizer import trust; print(trust.is_proven({key!r}), trust.is_proven('other'))"
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={**os.environ, "FASTGEN_CACHE": str(tmp_path)},
        )
        assert done.stdout.split() == ["True", "False"], done.stderr
