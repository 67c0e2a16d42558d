"""What can be known of a run before anything is loaded: whether it can work, and whether the pipeline can do it."""

from __future__ import annotations

import os
import sys
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


def check(cfg: Any) -> None:
    """Raises InputError where fairseq-generate would stop with an assertion."""
    generation = cfg.generation
    if cfg.common_eval.path is None:
        raise InputError("--path is missing (accepted: a checkpoint, or several with : between them)")
    if generation.sampling and generation.nbest != generation.beam:
        raise InputError(f"--sampling needs --nbest {generation.beam}, the value of --beam (given: {generation.nbest})")
    if generation.replace_unk is not None and cfg.dataset.dataset_impl != "raw":
        raise InputError(f"--replace-unk needs --dataset-impl raw (given: {cfg.dataset.dataset_impl})")
