"""fastgen-eval-lm-for-fairseq: fairseq-eval-lm under fastgen."""

from __future__ import annotations

from typing import Any

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import eval_lm  # sets up logging before anything is parsed

import fastgen
from fastgen.cli.fairseq import mistakes
from fastgen.cli.fairseq.command import add_flags
from fastgen.optimizer.fairseq.checkpoints import allowed


def run() -> None:
    """Parses sys.argv and evaluates, in as many processes as fairseq-eval-lm would use."""
    parser = options.get_eval_lm_parser()
    add_flags(parser)
    args = options.parse_args_and_arch(parser)
    no_fastgen = vars(args).pop("no_fastgen")
    mistakes.check_path(args)
    distributed_utils.call_main(convert_namespace_to_omegaconf(args), evaluate, no_fastgen=no_fastgen)


def evaluate(cfg: Any, no_fastgen: bool, **unused: Any) -> None:
    """What each process does. It is found here by the processes that fairseq starts, which import fastgen for it."""
    with mistakes.named(cfg):
        if no_fastgen:
            with fastgen.disabled(), allowed():
                eval_lm.main(cfg)
        else:
            eval_lm.main(cfg)
