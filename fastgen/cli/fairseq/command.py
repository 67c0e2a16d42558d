"""What the fairseq commands share: fastgen's own flags, the environment of a run, errors and exit statuses."""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fastgen
from fastgen.cli.errors import FAILED, INTERRUPTED, READER_GONE, UNUSABLE, InputError
from fastgen.cli.pipeline.interrupt import interruptible


def run_command(prog: str, run: Callable[[], None], argv: list[str] | None) -> int:
    """Runs a command with `argv` as its arguments and returns its exit status; expected errors are one line each.

    0 done, 1 failed on the way, 2 a flag, file or model cannot be used, 130 interrupted, 141 nobody reads any more.
    """
    before = sys.argv
    # fairseq looks for --user-dir in sys.argv, whatever arguments its parser is given.
    sys.argv = [prog, *(before[1:] if argv is None else argv)]
    try:
        _show_version()
        fastgen.enable()  # not `enabled()`, which would win over a caller's `disabled()`
        with interruptible():
            run()
            sys.stdout.flush()
    except (InputError, FileNotFoundError, pickle.UnpicklingError) as error:
        return _stop(f"error: {_one_line(error)}", UNUSABLE)
    except BrokenPipeError:
        # What is left in the buffer cannot be written: the interpreter must not try again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except OSError as error:
        return _stop(f"error: {_one_line(error)}", FAILED)
    except KeyboardInterrupt:
        return _stop("interrupted", INTERRUPTED)
    finally:
        sys.argv = before
        if argv is None:
            gc.freeze()  # the program ends: Python would look through all of torch and fairseq for garbage once more
    return 0


def _show_version() -> None:
    """Where --version is given: before fairseq, which takes seconds, or is what is broken."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_version(parser)
    parser.parse_known_args()


def _add_version(parser: argparse._ActionsContainer) -> None:
    version = f"fastgen {fastgen.__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version and leave")


def say(message: str) -> None:
    """A line on stderr that begins with the name of the command that `run_command` runs."""
    print(f"{sys.argv[0]}: {message}", file=sys.stderr)


def add_no_fastgen(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The group of fastgen's flags, with those that both commands have."""
    group = parser.add_argument_group("fastgen")
    _add_version(group)
    group.add_argument(
        "--no-fastgen",
        action="store_true",
        help="run fairseq's own command, unpatched but for the loading of checkpoints",
    )
    return group


@contextmanager
def without_fastgen() -> Iterator[None]:
    """The unchanged library; fairseq's checkpoints load all the same, as under torch before 2.6."""
    from fastgen.optimizer.fairseq.checkpoints import allowed

    with fastgen.disabled(), allowed():
        yield


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _stop(message: str, status: int) -> int:
    say(message)
    return status
