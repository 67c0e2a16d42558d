"""fastgen-generate-for-transformers: generate text for every line of a file with a Hugging Face model.

The counterpart of fastseq-generate-for-transformers, with its flags. Whatever can be wrong with the flags and the
files is found before torch and transformers are imported, so the modules that need them are imported by run.py.
"""

import os
import sys
from contextlib import nullcontext, suppress
from importlib.util import find_spec

import fastgen
from fastgen.cli.errors import FAILED, INTERRUPTED, UNUSABLE, InputError, RunError
from fastgen.cli.pipeline.interrupt import interruptible
from fastgen.cli.threads import set_openmp_variables
from fastgen.cli.transformers.files.paths import Files, check_files
from fastgen.cli.transformers.flags.arguments import PROG, parse_arguments
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.stop import Stopped


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status; what a user can do something about is one line on stderr.

    0 all done, 1 some inputs failed or the run could not go on, 2 flags, files or a model that cannot be used, 130
    interrupted, 143 ended by SIGTERM.
    """
    set_openmp_variables()
    try:
        with interruptible():
            args = parse_arguments(sys.argv[1:] if argv is None else argv)
            _check_packages()
            files = check_files(args)
            return _run(args, files)
    except InputError as error:
        return _stop(f"error: {error}", UNUSABLE)
    except BrokenPipeError:
        return _stop("error: nobody reads the standard output any more; what was written is complete records", FAILED)
    except (OSError, RunError) as error:
        return _stop(f"error: {error}", FAILED)
    except Stopped as stopped:
        return _stop("interrupted", stopped.status)
    except KeyboardInterrupt:
        return _stop("interrupted", INTERRUPTED)


def _check_packages() -> None:
    if missing := [name for name in ("transformers", "tqdm") if find_spec(name) is None]:
        raise InputError(f"needs the package {' and '.join(missing)}: pip install {' '.join(missing)}")


def _run(args: RunConfig, files: Files) -> int:
    if not args.quiet:
        print(f"loading {args.model}", file=sys.stderr, flush=True)
    # Workers are what runs beside the model; threads that a tokenizer starts by itself would take cores from it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from fastgen.cli.transformers.model.library_messages import said_once
    from fastgen.cli.transformers.run import run

    fastgen.enable()  # not `enabled()`, which would win over a caller's `disabled()`
    with said_once(args.quiet), fastgen.disabled() if args.without_fastgen_opt else nullcontext():
        return run(args, files)


def _stop(message: str, status: int) -> int:
    with suppress(OSError):  # nobody may read it
        print(f"{PROG}: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
