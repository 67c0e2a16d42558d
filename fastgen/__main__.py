"""`python -m fastgen`: shows what is patched and why, or runs a program that cannot be edited under fastgen.

`python -m fastgen verify MODEL INPUT` compares a model without fastgen and with it, see fastgen/cli/verify.py.

Tests: tests/test_main.py
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import io
import logging
import os
import pkgutil
import platform
import runpy
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import fastgen
from fastgen import ops
from fastgen.batch.threads import set_openmp_variables
from fastgen.cli.exits import reader_may_leave
from fastgen.ops.kernel import Kernel
from fastgen.optimizer import PATCH_SET, PATCHES
from fastgen.patching import table

_PROG = "python -m fastgen"
_DISTRIBUTION = "fastgen-generate"
_PACKAGES = ("torch", "transformers", "fairseq")


def main(argv: list[str]) -> None:
    """Prints the report, or runs the program in `argv` and exits with its exit status."""
    if argv[:1] == ["verify"]:
        set_openmp_variables()
        from fastgen.cli import verify

        with reader_may_leave():
            sys.exit(verify.main(argv[1:]))
    first = next((i for i, word in enumerate(argv) if word == "-m" or not word.startswith("-")), len(argv))
    own = argv[:first]
    program = argv[first:]
    with reader_may_leave():
        _parser().parse_args(own)
        if not program:
            print(report())
            return
    set_openmp_variables()
    fastgen.enable()  # also with FASTGEN_AUTO=0
    if program[0] != "-m":
        run_script(*program)
    elif len(program) == 1:
        _stop(2, "-m needs the name of a module")
    else:
        run_module(*program[1:])


def _parser() -> argparse.ArgumentParser:
    """Returns a parser of the options before the program; what follows belongs to the program."""
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} [-h] [--version] [SCRIPT [ARGUMENT ...] | -m MODULE [ARGUMENT ...] | verify MODEL INPUT ...]",
        description="Runs a program under fastgen as python would run it. Without a program, shows the versions, "
        "which patches are applied and which kernels are usable, and why the rest are not. verify compares a model "
        f"without fastgen and with it: see {_PROG} verify --help.",
    )
    parser.add_argument("--version", action="version", version=f"fastgen {fastgen.__version__}")
    return parser


def _stop(status: int, message: str) -> NoReturn:
    print(f"{_PROG}: {message}", file=sys.stderr)
    sys.exit(status)


def run_script(script: str, *args: str) -> None:
    """Runs `python script args...`: a source file, or a folder, zip or `.pyc` file, whose `sys.argv[0]` is absolute."""
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
    """Runs a file in a `__main__` that stays, because threads that outlive the last line look names up there.

    `runpy` would restore the former `__main__`, and make `sys.argv[0]` absolute or `__file__` relative.
    """
    program = types.ModuleType("__main__")
    program.__file__, program.__loader__ = path, SourceFileLoader("__main__", path)
    program.__dict__.update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = program
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, program.__dict__)


def _set_first_path(*entries: str) -> None:
    """Replaces the working directory in `sys.path`, added by `python -m`, by `entries`; `python -P` adds neither."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = entries


def run_module(module: str, *args: str) -> None:
    """Runs `python -m module args...`."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError as error:
        _stop(1, f"cannot find {module!r}: {error}")
    if spec is None:
        _stop(1, f"cannot find {module!r}: no such module")
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def report() -> str:
    """Returns versions, patches and kernels in one screen; imports the installed hosts, so that states are final."""
    notice = PATCH_SET.take_notice()
    errors = _import_hosts()
    PATCH_SET.load_replacements()
    versions = [f"fastgen {fastgen.__version__}", f"Python {platform.python_version()}"]
    versions += [_version(package) for package in _PACKAGES]
    states = fastgen.status()
    states[:] = [
        replace(state, reason=errors.get(state.name, state.reason)) if state.state == "pending" else state
        for state in states
    ]
    kernels = [(name, *_usable_and_not(listed)) for name, listed in ops.kernels().items()]
    head = [", ".join(versions), *_source_tree(Path(fastgen.__file__).parents[1]), *_build_of_kernels(), *_rates()]
    if notice:
        head.insert(1, notice)
    return "\n".join([*head, "", "Patches", repr(states), "", "Kernels", table(kernels)])


def _build_of_kernels() -> list[str]:
    """Says for which instructions the C++ kernels in use were built, or why none is in use."""
    if not find_spec("torch"):
        return []
    from fastgen.ops import simd

    return [f"C++ kernels: {'; '.join(simd.machine_reasons()) or f'those for {simd.instructions()}'}"]


def _rates() -> list[str]:
    """Says by which rates of the CPU and the GPU, if torch has one, the cost model decides."""
    if not find_spec("torch"):
        return []
    import torch

    from fastgen.optimizer.decoding.cost_model import CPU, GPU

    return [f"Rates of a CPU: {CPU}", *[f"Rates of an H200: {GPU}"] * torch.cuda.is_available()]


def _usable_and_not(kernels: Sequence[Kernel]) -> tuple[str, str]:
    """Returns the names of the usable kernels, the first choice first, and the rest with the reasons against them."""
    by_reason: dict[str, list[str]] = {}
    for kernel in kernels:
        by_reason.setdefault("; ".join(kernel.unsupported_reasons()), []).append(kernel.name)
    usable = ", ".join(by_reason.pop("", ["none"]))
    return usable, "; ".join(f"{', '.join(names)}: {reasons}" for reasons, names in by_reason.items())


def _source_tree(tree: Path) -> list[str]:
    """Returns a note if `tree`, the folder that `fastgen` is imported from, is a checkout, without built kernels."""
    if not (tree / "setup.py").is_file():
        return []
    installed = list(metadata.distributions(name=_DISTRIBUTION))
    for folder in {Path(str(distribution.locate_file(""))).resolve() for distribution in installed} - {tree.resolve()}:
        if (folder / "fastgen" / "__init__.py").is_file():
            hides = f"It hides the fastgen installed in {folder}, and has only the kernels that were built in the tree."
            return [f"runs from the source tree {tree}", hides, f"Use another folder, or pip install -e {tree}"]
    is_editable = any(
        '"editable": true' in (distribution.read_text("direct_url.json") or "") for distribution in installed
    )
    return [f"runs from the source tree {tree}" + ("" if is_editable else f", not installed: pip install -e {tree}")]


def _import_hosts() -> dict[str, str]:
    """Imports the modules of all patches; returns the error for each patch whose module cannot be imported.

    Silences what hosts log at import, such as fairseq about missing packages for training.
    """
    errors = {}
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.INFO))
    try:
        for patch in PATCHES:
            if not find_spec(patch.host):
                continue
            try:
                importlib.import_module(patch.module)
            except Exception as error:
                errors[patch.name] = f"import {patch.module}: {type(error).__name__}: {error}"
    finally:
        logging.disable(disabled)
    return errors


def _version(package: str) -> str:
    """Returns "transformers 5.23.0"; adds a distribution with another name, as in "fairseq 0.12.3 (ve-fairseq)"."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        distributions = metadata.packages_distributions().get(package, ())
    for distribution in distributions:
        return f"{package} {metadata.version(distribution)} ({distribution})"
    return f"{package} not installed"


if __name__ == "__main__":
    main(sys.argv[1:])
