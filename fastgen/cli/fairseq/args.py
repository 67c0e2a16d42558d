"""The flags of the fairseq commands, what is wrong with them, and who does what they ask for.

fastgen-generate-for-fairseq takes every flag of fairseq-generate and prints the same lines in the same order, made
beside the model.

Tests: tests/cli/fairseq/test_cli_fairseq_mistakes.py, tests/cli/fairseq/test_cli_fairseq_eval_lm.py
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from multiprocessing import get_all_start_methods
from typing import Any

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import eval_lm  # sets up logging before anything is parsed
from fairseq_cli import generate as upstream

import fastgen
from fastgen.cli.errors import InputError
from fastgen.cli.fairseq import mistakes, pipeline
from fastgen.cli.fairseq.command import add_flags, say
from fastgen.cli.fairseq.postprocess import unsupported_scores
from fastgen.cli.fairseq.workers import WorkerError
from fastgen.optimizer.fairseq.checkpoints import allowed

MOST_WORKERS = 8  # unless told otherwise: one that is not needed sleeps, and costs a fork
LARGEST_POOL = 256
# Flags of FastSeq for what happens here in any case.
WITHOUT_EFFECT = {
    "decode_hypothesis": "sources, targets and hypotheses (D-) are always detokenised",
    "use_el_attn": "keys and values that beams share are always kept once per input",
}


def generate() -> None:
    """Parses sys.argv, looks for mistakes in it, and generates, with the pipeline where it can do what is asked for."""
    args = parse_arguments()
    no_fastgen, workers = (vars(args).pop(name) for name in ("no_fastgen", "postprocess_workers"))
    for name, why in WITHOUT_EFFECT.items():
        if vars(args).pop(name):
            say(f"--{name.replace('_', '-')} changes nothing: {why}")
    check(args)
    cfg = convert_namespace_to_omegaconf(args)
    with mistakes.named(cfg):
        if no_fastgen:
            with fastgen.disabled(), allowed():
                upstream.main(cfg)
        elif reasons := unsupported_reasons(cfg, workers):
            if args.num_shards > 1:
                raise InputError(f"--num-shards {args.num_shards} needs the pipeline: {'; '.join(reasons)}")
            say(f"without the pipeline: {'; '.join(reasons)}")
            upstream.main(cfg)
        else:
            try:
                pipeline.generate(cfg, workers)
            except WorkerError as error:
                raise OSError(f"post-processing: {error}") from error


def parse_arguments() -> argparse.Namespace:
    """sys.argv as fairseq-generate reads it, with fastgen's own flags beside fairseq's."""
    parser = options.get_generation_parser()
    # fairseq-generate has this flag besides those of its parser, for tasks that ask for the arguments of a model.
    parser.add_argument("--arch", "-a", metavar="ARCH", default="wav2vec2", help="model architecture, for some tasks")
    group = add_flags(parser)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group.add_argument(
        "--postprocess-workers",
        "--postprocess_workers",
        "--post-process-workers",
        type=number_of_workers,
        default=min(MOST_WORKERS, cores),
        metavar="N",
        help="processes that turn the model's output into text and score it while the model runs "
        "(default: enough; 0: in between, as fairseq-generate does)",
    )
    for name, why in WITHOUT_EFFECT.items():
        flags = {f"--{name.replace('_', '-')}", f"--{name}"}
        group.add_argument(*sorted(flags), action="store_true", help=f"accepted for FastSeq's command lines: {why}")
    return options.parse_args_and_arch(parser)


def number_of_workers(text: str) -> int:
    """A whole number that a machine can take."""
    if not (text.isdecimal() and int(text) <= LARGEST_POOL):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers (accepted: 0 to {LARGEST_POOL})")
    return int(text)


def check(args: argparse.Namespace) -> None:
    """Raises InputError where fairseq-generate would stop with an assertion or a traceback."""
    mistakes.check_path(args)
    for flag, value in (("--beam", args.beam), ("--nbest", args.nbest)):
        if value < 1:
            raise InputError(f"{flag} {value} (accepted: 1 or more)")
    if args.sampling and args.nbest != args.beam:
        raise InputError(f"--sampling needs --nbest {args.beam}, the value of --beam (given: {args.nbest})")
    if not 0 <= args.shard_id < args.num_shards:
        accepted = f"accepted: 0 to {args.num_shards - 1}, one less than --num-shards"
        raise InputError(f"--shard-id {args.shard_id} ({accepted})")
    if args.replace_unk is not None and args.dataset_impl != "raw":
        raise InputError(f"--replace-unk needs --dataset-impl raw (given: {args.dataset_impl})")
    # Other tasks than translations have no languages, and moses takes English.
    if args.tokenizer == "moses" and None in (vars(args).get(f"{side}_lang", "en") for side in ("source", "target")):
        raise InputError("--tokenizer moses needs --source-lang and --target-lang (accepted: as in DATA, such as en)")
    if args.scoring == "wer" and find_spec("editdistance") is None:
        raise InputError("--scoring wer needs the package editdistance: pip install editdistance")


def unsupported_reasons(cfg: Any, workers: int) -> list[str]:
    """Why this run is left to fairseq-generate's own loop."""
    reasons = [] if workers else ["--postprocess-workers 0"]
    if "fork" not in get_all_start_methods():
        reasons.append(f"processes cannot be forked on {sys.platform}")
    if torch.cuda.is_initialized():
        reasons.append("CUDA is in use before the model is loaded, by a module of --user-dir")
    if cfg.common.tpu:
        reasons.append("--tpu")
    return reasons + unsupported_scores(cfg.scoring if isinstance(cfg.scoring, str) else cfg.scoring._name)


def evaluate_language_model() -> None:
    """Parses sys.argv and evaluates under fastgen, in as many processes as fairseq-eval-lm would use."""
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
