"""Host libraries and replacements that tests of the patch layer write, and patch sets for them.

PYTEST_DONT_REWRITE: test modules import functions from here before they name this file as a plugin for its fixtures.
"""

import importlib
import itertools
import sys

import pytest

from fastgen.patching import Patch, PatchSet

_numbers = itertools.count()

HOST = """
__version__ = "1.5"

def function(x, scale=1):
    return x * scale

class Base:
    def method(self, x):
        "Returns x."
        return ("original", x)

    @classmethod
    def of_class(cls, x):
        return (cls.__name__, x)

    @staticmethod
    def static(x):
        return ("static", x)

class Child(Base):
    attribute = 3
"""

FAST = """
def fast(original, *args, **kwargs):
    return ("fast", original(*args, **kwargs))
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module that can be imported, and returns its name, which no other test uses."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(source, kind="host"):
        name = module_name(kind)
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    yield write_module
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@pytest.fixture
def host(write):
    return importlib.import_module(write(HOST))


@pytest.fixture
def fast(write):
    return write(FAST, "fast") + ":fast"


def make_patch(target, replacement, **changes):
    fields = {"lowest": "1.0", "parameters": ("x",), "group": "group"} | changes
    return Patch(target, target, replacement, **fields)


def armed(*patches, **kwargs):
    patch_set = PatchSet(patches, **kwargs)
    patch_set.arm()
    return patch_set


def module_name(kind="host"):
    """Returns a name that no other test uses: hooks that wait for a module outlive their test."""
    return f"{kind}_{next(_numbers)}"


def only_state(patch_set):
    (state,) = patch_set.states()
    return state
