"""The start and the end of the commands fastgen-generate-for-fairseq and fastgen-eval-lm-for-fairseq.

Tests: tests/cli/fairseq/test_cli_fairseq_ends.py
"""

from __future__ import annotations

import argparse
import gc
import importlib
import pickle
import signal
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import fastgen
from fastgen.batch.errors import InputError, RunError
from fastgen.batch.threads import keep_freed_memory, set_openmp_variables
from fastgen.cli.exits import FAILED, INTERRUPTED, UNUSABLE, reader_may_leave, stoppable
from fastgen.optimizer.fairseq import how_to_install, import_hint

FOR_SCORES_OF_TRAINING = {"sklearn", "sklearn.metrics", "scipy.stats"}


def run(prog: str, what: str, argv: list[str] | None = None) -> int:
    """Calls a function of args.py with `argv` as the program's arguments, and returns the exit status.

    0 done, 1 failed, 2 a flag, file or model cannot be used, 130 interrupted. Expected errors are one line on stderr.
    Exits with 141 if the reader of the output has closed it.
    """
    set_openmp_variables()
    keep_freed_memory()
    original_argv = sys.argv
    # fairseq reads --user-dir from sys.argv, whatever arguments its parser gets.
    sys.argv = [prog, *(original_argv[1:] if argv is None else argv)]
    try:
        with reader_may_leave():
            # --version is handled before the import of fairseq, which takes seconds and may fail.
            add_flags(parser := argparse.ArgumentParser(add_help=False, allow_abbrev=False))
            parser.parse_known_args()
            fastgen.enable()  # not `enabled()`, which would override a caller's `disabled()`
            with stoppable(signal.SIGINT):
                getattr(_import("fastgen.cli.fairseq.args", is_program=argv is None), what)()
    except (InputError, RunError, OSError, pickle.UnpicklingError) as error:
        say(f"error: {' '.join(str(error).split()) or type(error).__name__}")
        is_unusable = isinstance(error, (InputError, FileNotFoundError, pickle.UnpicklingError))
        return UNUSABLE if is_unusable else FAILED
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    finally:
        sys.argv = original_argv
    return 0


def _import(module: str, is_program: bool) -> ModuleType:
    """Imports and returns a module that imports fairseq. Raises InputError with what to install if that fails.

    Garbage collection is off meanwhile: imports create no garbage, but looking for it takes a quarter of their time.
    is_program: whether later collections skip the imported objects, which would take half a second of a run of ten.
    scikit-learn and scipy.stats, which fairseq imports for metrics of training, take a whole second, and are deferred.
    """
    if find_spec("fairseq") is None:
        raise InputError(f"needs the package fairseq: {how_to_install()}")
    collects = gc.isenabled()
    deferred = FOR_SCORES_OF_TRAINING - sys.modules.keys()
    sys.modules |= {name: _Deferred(name) for name in deferred}
    gc.disable()
    try:
        return importlib.import_module(module)
    except ValueError as error:
        if hint := import_hint(error):
            raise InputError(hint) from error
        raise
    finally:
        for name in deferred:
            del sys.modules[name]
        if is_program:
            gc.freeze()
        if collects:
            gc.enable()


class _Deferred(ModuleType):
    """A stand-in for a module and its attributes, which imports the module when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> _Deferred:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Deferred(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return resolve_name(self.__name__)(*args, **options)


def say(message: str) -> None:
    """Prints a line on stderr that begins with the name of the running command."""
    print(f"{sys.argv[0]}: {message}", file=sys.stderr)


def add_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds and returns the group of fastgen's flags, with those that both commands have."""
    group = parser.add_argument_group("fastgen")
    group.add_argument("--version", action="version", version=f"fastgen {fastgen.__version__}", help="show the version")
    what = "run fairseq's own command, unpatched but for the loading of checkpoints"
    group.add_argument("--no-fastgen", action="store_true", help=what)
    return group


generate = partial(run, "fastgen-generate-for-fairseq", "generate")
eval_lm = partial(run, "fastgen-eval-lm-for-fairseq", "evaluate_language_model")
