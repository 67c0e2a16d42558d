"""What is wrong with DATA or --path, in one line: only fairseq's tasks and loaders know what they make of them.

So these are not looked at beforehand; an error that they have caused gets the name of the argument.

Tests: tests/cli/fairseq/test_cli_fairseq_mistakes.py
"""

from __future__ import annotations

import pickle
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fairseq import checkpoint_utils, utils
from fairseq.file_io import PathManager

from fastgen.cli.errors import InputError
from fastgen.optimizer.fairseq.checkpoints import refusal

# The function of fairseq, and its replacement.
READS_CHECKPOINTS = checkpoint_utils.load_checkpoint_to_cpu.__name__

_NO_MODEL = "Model file not found: "


def check_path(args: Namespace) -> None:
    """Raises InputError where there is no --path."""
    if args.path is None:
        raise InputError("--path is missing (accepted: the file of a checkpoint)")


@contextmanager
def named(cfg: Any) -> Iterator[None]:
    """Raises InputError for those errors of fairseq inside the block that an argument explains; others pass."""
    try:
        yield
    except Exception as error:
        if explanation := of_checkpoint(cfg, error) or _explanation(cfg, error):
            raise InputError(explanation) from error
        raise


def of_checkpoint(cfg: Any, error: Exception) -> str | None:
    """What is wrong with the checkpoint that was being read, if one was: errors are of any kind then."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    path = next((frame.f_locals["path"] for frame in frames if frame.f_code.co_name == READS_CHECKPOINTS), None)
    if path is None:
        return None
    if isinstance(error, pickle.UnpicklingError):
        return f"{_flag(cfg, path)}{refusal(path, error.__cause__ or error)}"
    first_sentence = f"{type(error).__name__}: {error}".partition(". ")[0].rstrip(": ")
    return f"{_flag(cfg, path)}{path}: is no checkpoint, or a damaged one ({first_sentence})"


def _explanation(cfg: Any, error: Exception) -> str | None:
    message, data = str(error), getattr(cfg.task, "data", None)
    if isinstance(error, FileNotFoundError) and data and not PathManager.exists(utils.split_paths(data)[0]):
        return f"DATA {data}: does not exist (accepted: a folder that fairseq-preprocess wrote)"
    if message.startswith("Could not infer language pair"):
        return f"DATA {data}: no file there is named for a pair of languages (needs --source-lang and --target-lang)"
    if message.startswith(_NO_MODEL):
        path = message.removeprefix(_NO_MODEL)
        return f"{_flag(cfg, path)}{path}: does not exist (accepted: a checkpoint)"
    return None


def _flag(cfg: Any, path: str) -> str:
    """The flag that gave a checkpoint's path; nothing for files that a model reads besides."""
    given = {"--path ": cfg.common_eval.path, "--lm-path ": cfg.generation.lm_path}
    return next((flag for flag, value in given.items() if value and path in value), "")
