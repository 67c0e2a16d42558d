"""fastgen-generate-for-transformers: generates text for every line of a file with a Hugging Face model.

It is the counterpart of fastseq-generate-for-transformers, with its flags; fastgen.batch does the work.

Tests: tests/batch/test_run.py, tests/cli/transformers/test_ends.py
"""

from __future__ import annotations

import sys
from contextlib import suppress

from fastgen.batch.errors import InputError, RunError, check_packages
from fastgen.batch.run import run
from fastgen.batch.threads import keep_freed_memory, set_openmp_variables
from fastgen.cli.exits import FAILED, SIGNALS, UNUSABLE, Signals, reader_may_leave, stoppable
from fastgen.cli.transformers.args import PROG, parse_arguments


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status; errors that a user can fix are one line on stderr.

    0 all done, 1 some inputs failed or the run could not continue, 2 flags, files or a model that cannot be used, 130
    interrupted, 143 ended by SIGTERM. Exits with 141 if the reader of the output has closed it.
    """
    set_openmp_variables()
    keep_freed_memory()
    stop = Signals()
    try:
        with reader_may_leave(), stoppable(*SIGNALS) as stop:
            return _run(sys.argv[1:] if argv is None else argv, stop)
    except InputError as error:
        message = f"error: {error}"
        status = UNUSABLE
    except (OSError, RunError) as error:
        message = f"error: {error}"
        status = FAILED
    except KeyboardInterrupt:  # Ray raises its own, which has no status
        message = "interrupted"
        status = stop.status
    with suppress(OSError):  # stderr may be closed
        print(f"{PROG}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _run(argv: list[str], stop: Signals) -> int:
    args = parse_arguments(argv)
    check_packages("transformers", "tqdm", "filelock")
    if args.workers is not None:  # --ray needs it
        check_packages("ray", "accelerate", needed_by=args.setting("ray") or args.setting("workers"))
    from fastgen.cli.transformers.progress import Progress

    failures, scores = run(args, stop, Progress(args.quiet))
    for name, value in scores.items():
        print(f"{name:<16}{f'{value:.4f}' if isinstance(value, float) else value}")
    return FAILED if failures else 0


if __name__ == "__main__":
    sys.exit(main())
