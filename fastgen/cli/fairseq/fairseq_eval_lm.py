"""fastgen-eval-lm-for-fairseq: fairseq-eval-lm under fastgen."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from fastgen.cli.fairseq.command import add_no_fastgen, run_command, without_fastgen
from fastgen.cli.fairseq.imports import import_fairseq, without_collections

PROG = "fastgen-eval-lm-for-fairseq"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(PROG, run, argv)


def run() -> None:
    """Parse sys.argv and evaluate, in as many processes as fairseq-eval-lm would use."""
    with without_collections():
        import_fairseq()
        import fairseq_cli.eval_lm  # noqa: F401  (it sets up logging before anything is parsed)
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.distributed import utils as distributed_utils

    from fastgen.cli.fairseq.checks import check_path

    parser = options.get_eval_lm_parser()
    add_no_fastgen(parser)
    args = options.parse_args_and_arch(parser)
    no_fastgen = vars(args).pop("no_fastgen")
    check_path(args)
    distributed_utils.call_main(convert_namespace_to_omegaconf(args), evaluate, no_fastgen=no_fastgen)


def evaluate(cfg: Any, no_fastgen: bool, **unused: Any) -> None:
    """What each process does. It is found here by the processes that fairseq starts, which import fastgen for it."""
    from fairseq_cli import eval_lm

    from fastgen.cli.fairseq import mistakes

    with mistakes.named(cfg), without_fastgen() if no_fastgen else nullcontext():
        eval_lm.main(cfg)


if __name__ == "__main__":
    sys.exit(main())
