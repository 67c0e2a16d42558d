"""What can be known of a run before anything is loaded: whether it can work, and whether the pipeline can do it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from importlib.util import find_spec
from multiprocessing import get_all_start_methods
from typing import Any

import torch

from fastgen.cli.errors import InputError
from fastgen.cli.fairseq.scores import unsupported_reasons

MOST_WORKERS = 8


def default_workers() -> int:
    """One per core that this process may use, up to MOST_WORKERS: one that is not needed sleeps, and costs a fork."""
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def unsupported_run_reasons(cfg: Any, workers: int) -> list[str]:
    """Why this run is left to fairseq-generate's own loop."""
    reasons = [] if workers else ["--postprocess-workers 0"]
    if "fork" not in get_all_start_methods():
        reasons.append(f"processes cannot be forked on {sys.platform}")
    if torch.cuda.is_initialized():
        reasons.append("CUDA is in use before the model is loaded, by a module of --user-dir")
    if cfg.common.tpu:
        reasons.append("--tpu")
    scorer = cfg.scoring if isinstance(cfg.scoring, str) else cfg.scoring._name
    return reasons + unsupported_reasons(scorer)


def check_path(args: Namespace) -> None:
    """Raises InputError where there is no --path."""
    if args.path is None:
        raise InputError("--path is missing (accepted: the file of a checkpoint)")


def check(args: Namespace) -> None:
    """Raises InputError where fairseq-generate would stop with an assertion or a traceback."""
    check_path(args)
    for flag, value in (("--beam", args.beam), ("--nbest", args.nbest)):
        if value < 1:
            raise InputError(f"{flag} {value} (accepted: 1 or more)")
    if args.sampling and args.nbest != args.beam:
        raise InputError(f"--sampling needs --nbest {args.beam}, the value of --beam (given: {args.nbest})")
    if args.replace_unk is not None and args.dataset_impl != "raw":
        raise InputError(f"--replace-unk needs --dataset-impl raw (given: {args.dataset_impl})")
    # Other tasks than translations have no languages, and moses takes English.
    if args.tokenizer == "moses" and None in (vars(args).get(f"{side}_lang", "en") for side in ("source", "target")):
        raise InputError("--tokenizer moses needs --source-lang and --target-lang (accepted: as in DATA, such as en)")
    if args.scoring == "wer" and find_spec("editdistance") is None:
        raise InputError("--scoring wer needs the package editdistance: pip install editdistance")
