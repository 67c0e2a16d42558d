"""The flags of the fairseq commands, and messages about mistakes in them.

DATA and --path are not checked beforehand, because only fairseq's tasks and loaders know what they accept: errors that
they cause get the name of the argument.

Tests: tests/cli/fairseq/test_cli_fairseq_mistakes.py, tests/cli/fairseq/test_cli_fairseq_eval_lm.py
"""

from __future__ import annotations

import argparse
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from typing import Any

from fairseq import checkpoint_utils, options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq_cli import eval_lm
from fairseq_cli import generate as upstream

import fastgen
from fastgen.batch.errors import InputError, RunError, check_packages
from fastgen.batch.threads import usable_cpus
from fastgen.cli.fairseq import pipeline
from fastgen.cli.fairseq.command import add_flags, say
from fastgen.optimizer.fairseq.checkpoints import allowed, refusal

MOST_WORKERS = 8  # by default: a superfluous one sleeps, and costs a fork
LARGEST_POOL = 256
IN_ANY_CASE = ("decode_hypothesis", "use_el_attn")  # flags of FastSeq
READS_CHECKPOINTS = checkpoint_utils.load_checkpoint_to_cpu.__name__  # fairseq's function, and its replacement
NO_MODEL = "Model file not found: "


def generation_parser() -> argparse.ArgumentParser:
    """Returns the parser of fairseq-generate with the flags of fastgen's command."""
    parser = options.get_generation_parser()
    # fairseq-generate has this flag in addition to its parser's, for tasks that need the arguments of a model.
    parser.add_argument("--arch", "-a", metavar="ARCH", default="wav2vec2", help="model architecture, for some tasks")
    group = add_flags(parser)
    group.add_argument(
        *("--postprocess-workers", "--postprocess_workers", "--post-process-workers"),
        type=int,
        default=min(MOST_WORKERS, usable_cpus()),
        metavar="N",
        help="processes that turn outputs into text while the model runs; 0: none (default: one per CPU, at most 8)",
    )
    for name in IN_ANY_CASE:
        what = "accepted for FastSeq's command lines: what it asks for is done in any case"
        group.add_argument(f"--{name.replace('_', '-')}", f"--{name}", action="store_true", help=what)
    group.add_argument("--workers", help=argparse.SUPPRESS)
    return parser


def generate() -> None:
    """Parses and checks sys.argv, and generates."""
    args = parse(generation_parser())
    if models := vars(args).pop("workers"):
        raise InputError(f"--workers {models} is not a flag of this command (accepted: --num-shards N --shard-id I)")
    for name in IN_ANY_CASE:
        if vars(args).pop(name):
            say(f"--{name.replace('_', '-')} changes nothing: what it asks for is done in any case")
    workers, no_fastgen = (vars(args).pop(name) for name in ("postprocess_workers", "no_fastgen"))
    check(args, workers, no_fastgen)
    main = upstream.main if no_fastgen else partial(pipeline.generate, workers=workers)
    run(convert_namespace_to_omegaconf(args), no_fastgen, main)


def evaluate_language_model() -> None:
    """Parses sys.argv and evaluates under fastgen, in the number of processes that fairseq-eval-lm would use."""
    add_flags(parser := options.get_eval_lm_parser())
    no_fastgen = vars(args := parse(parser)).pop("no_fastgen")
    distributed_utils.call_main(convert_namespace_to_omegaconf(args), evaluate, no_fastgen=no_fastgen)


def evaluate(cfg: Any, no_fastgen: bool, **unused: Any) -> None:
    """Evaluates in one process. The processes that fairseq starts import it from here, and fastgen with it."""
    run(cfg, no_fastgen, eval_lm.main)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns fairseq's arguments in sys.argv. Raises InputError if --path or the folder DATA is missing."""
    args = options.parse_args_and_arch(parser)
    if args.path is None:
        raise InputError("--path is missing (accepted: the file of a checkpoint)")
    data = vars(args).get("data")
    if data and not PathManager.exists(utils.split_paths(data)[0]):
        raise InputError(f"DATA {data}: does not exist (accepted: a folder that fairseq-preprocess wrote)")
    return args


def check(args: argparse.Namespace, workers: int, no_fastgen: bool) -> None:
    """Raises InputError if fairseq-generate would stop with an assertion or a traceback, or ignore a flag."""
    # Tasks other than translation have no languages, and moses takes English.
    languages = [vars(args).get(f"{side}_lang", "en") for side in ("source", "target")]
    shard = f"--shard-id {args.shard_id}"
    shards = args.num_shards
    ignored = f"--num-shards {shards} is ignored by fairseq's own command (accepted: without --no-fastgen)"
    mistakes = {
        f"--postprocess-workers {workers} (accepted: 0 to {LARGEST_POOL})": not 0 <= workers <= LARGEST_POOL,
        f"--beam {args.beam} (accepted: 1 or more)": args.beam < 1,
        f"--nbest {args.nbest} (accepted: 1 or more)": args.nbest < 1,
        f"--sampling needs --nbest {args.beam}, the value of --beam": args.sampling and args.nbest != args.beam,
        f"{shard} (accepted: 0 to {shards - 1})": not 0 <= args.shard_id < shards,
        ignored: shards > 1 and no_fastgen,
        "--replace-unk needs --dataset-impl raw": args.replace_unk is not None and args.dataset_impl != "raw",
        "--tokenizer moses needs --source-lang and --target-lang": args.tokenizer == "moses" and None in languages,
    }
    for message in (message for message, holds in mistakes.items() if holds):
        raise InputError(message)
    if args.scoring == "wer":
        check_packages("editdistance", needed_by="--scoring wer")


def run(cfg: Any, no_fastgen: bool, main: Callable[[Any], Any]) -> None:
    """Calls `main`, unpatched with no_fastgen. Raises InputError for errors of fairseq that can be explained."""
    try:
        with ExitStack() as contexts:
            if no_fastgen:
                contexts.enter_context(fastgen.disabled())
                contexts.enter_context(allowed())
            main(cfg)
    except BrokenProcessPool as error:
        raise RunError("a worker process was ended before its work was done") from error
    except Exception as error:
        if explanation := explain(cfg, error):
            raise InputError(explanation) from error
        raise


def explain(cfg: Any, error: Exception) -> str | None:
    """Returns what is wrong with DATA, --path or --lm-path if that has caused an error of fairseq, otherwise None."""
    message = str(error)
    data = getattr(cfg.task, "data", None)
    results_path = cfg.common_eval.results_path
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for path in [frame.f_locals["path"] for frame in frames if frame.f_code.co_name == READS_CHECKPOINTS][:1]:
        if isinstance(error, pickle.UnpicklingError):
            return f"{_flag(cfg, path)}{refusal(path, error.__cause__ or error)}"
        first_sentence = f"{type(error).__name__}: {error}".partition(". ")[0].rstrip(": ")
        return f"{_flag(cfg, path)}{path}: is not a checkpoint, or a damaged one ({first_sentence})"
    if isinstance(error, OSError) and results_path and str(error.filename).startswith(results_path):
        return f"--results-path {results_path}: {error.filename} cannot be written ({error.strerror})"
    if message.startswith("Could not infer language pair"):
        return f"DATA {data}: no file there is named for a pair of languages (needs --source-lang and --target-lang)"
    if message.startswith(NO_MODEL):
        path = message.removeprefix(NO_MODEL)
        return f"{_flag(cfg, path)}{path}: does not exist (accepted: a checkpoint)"
    lm_path = cfg.generation.lm_path
    if lm_path is not None and any(frame.f_locals.get("filenames") == [lm_path] for frame in frames):
        return f"--lm-path {lm_path}: cannot be loaded ({error}); its dictionary must be the target's and be in {data}"
    return None


def _flag(cfg: Any, path: str) -> str:
    """Returns the flag that names a checkpoint; "" for other files that a model reads."""
    paths = {"--path ": cfg.common_eval.path, "--lm-path ": cfg.generation.lm_path}
    return next((flag for flag, value in paths.items() if value and path in value), "")
