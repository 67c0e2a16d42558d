"""`python -m fastgen`: shows what is patched and why, or runs a program under fastgen that nobody may edit."""

from __future__ import annotations

import argparse
import builtins
import importlib
import io
import os
import pkgutil
import platform
import runpy
import sys
import types
from importlib import metadata
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from typing import NoReturn

import fastgen
from fastgen import ops
from fastgen.optimizer import PATCH_SET, PATCHES
from fastgen.patching import table

_PROG = "python -m fastgen"
_PACKAGES = ("torch", "transformers", "fairseq")


def main(argv: list[str]) -> None:
    """Without arguments the report; otherwise the program in `argv`, with the exit status that it has by itself."""
    first = next((i for i, word in enumerate(argv) if word == "-m" or not word.startswith("-")), len(argv))
    own, program = argv[:first], argv[first:]
    _parser().parse_args(own)
    if not program:
        print(report())
        return
    fastgen.enable()  # under FASTGEN_AUTO=0, too
    if program[0] != "-m":
        run_script(*program)
    elif len(program) == 1:
        _stop(2, "-m needs the name of a module")
    else:
        run_module(*program[1:])


def _parser() -> argparse.ArgumentParser:
    """Takes the options before the program only: what follows belongs to the program."""
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} [-h] [--version] [SCRIPT [ARGUMENT ...] | -m MODULE [ARGUMENT ...]]",
        description="Runs a program under fastgen as python would run it. Without a program, shows the versions, "
        "which patches are applied and which kernels are usable, and why the others are not.",
    )
    parser.add_argument("--version", action="version", version=f"fastgen {fastgen.__version__}")
    return parser


def _stop(status: int, message: str) -> NoReturn:
    print(f"{_PROG}: {message}", file=sys.stderr)
    sys.exit(status)


def run_script(script: str, *args: str) -> None:
    """As `python script args...`: a source file, or a folder, zip or `.pyc` file (then `sys.argv[0]` is absolute)."""
    if not os.path.exists(script):
        _stop(2, f"can't open file {script!r}: no such file")
    sys.argv = [script, *args]
    path = os.path.abspath(script)
    if path.endswith(".pyc") or pkgutil.get_importer(path):
        _set_first_path()
        runpy.run_path(path, run_name="__main__")
    else:
        _set_first_path(os.path.dirname(os.path.realpath(path)))
        _run_source(path)


def _run_source(path: str) -> None:
    """Runs a file in a `__main__` that stays: threads that outlive the last line look up the program's names there.

    `runpy` would put the former `__main__` back, and make `sys.argv[0]` absolute or `__file__` relative.
    """
    program = types.ModuleType("__main__")
    program.__file__, program.__loader__ = path, SourceFileLoader("__main__", path)
    program.__dict__.update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = program
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, program.__dict__)


def _set_first_path(*entries: str) -> None:
    """Puts `entries` where `python -m fastgen` has put the working directory; `python -P` asks for neither."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = entries


def run_module(module: str, *args: str) -> None:
    """As `python -m module args...`."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError as error:
        _stop(1, f"cannot find {module!r}: {error}")
    if found is None:
        _stop(1, f"cannot find {module!r}: no such module")
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def report() -> str:
    """Versions, patches and kernels in one screen. Imports the hosts that are installed, so that states are real."""
    errors = _import_hosts()
    PATCH_SET.load_replacements()
    versions = [f"fastgen {fastgen.__version__}", f"Python {platform.python_version()}"]
    versions += [_version(package) for package in _PACKAGES]
    groups: dict[str, tuple[str, str]] = {}  # the patches of one are applied all or none
    for s in fastgen.status():
        groups.setdefault(s.group, (s.state, errors.get(s.name, s.reason) if s.state == "pending" else s.reason))
    states = [(group, *found) for group, found in groups.items()]
    kernels = [(k.name, k.implementation, "; ".join(k.reasons) or "usable") for k in ops.kernels()]
    return "\n".join([", ".join(versions), "", "Patches", table(states), "", "Kernels", table(kernels)])


def _import_hosts() -> dict[str, str]:
    """Imports the modules of all patches; for each patch whose module cannot be imported, why."""
    errors = {}
    for patch in PATCHES:
        if not find_spec(patch.host):
            errors[patch.name] = f"{patch.host} is not installed"
            continue
        try:
            importlib.import_module(patch.module)
        except Exception as error:
            errors[patch.name] = f"import {patch.module}: {type(error).__name__}: {error}"
    return errors


def _version(package: str) -> str:
    """ "transformers 5.23.0"; with the distribution where that has another name, "fairseq 0.12.3 (ve-fairseq)"."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        distributions = metadata.packages_distributions().get(package, ())
    for distribution in distributions:
        return f"{package} {metadata.version(distribution)} ({distribution})"
    return f"{package} not installed"


if __name__ == "__main__":
    main(sys.argv[1:])
