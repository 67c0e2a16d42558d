"""`python -m fastgen verify MODEL INPUT`: compares a model of transformers without fastgen and with it on text lines.

Tests: tests/cli/test_verify_command.py
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError
from fastgen.batch.files import Line, raw_lines
from fastgen.batch.signature import misspelt, model_folder
from fastgen.batch.task import task_for
from fastgen.cli.transformers.args import setting

if TYPE_CHECKING:
    from fastgen.optimizer.decoding.verify import Verification

_MAX_NEW_TOKENS = 32


def main(argv: list[str]) -> int:
    """Returns 0 if the outputs are equal, 1 if they differ; argparse exits with 2 for arguments not accepted."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    try:
        verification = _verify(args, rest)
    except (InputError, ValueError) as error:  # generate raises ValueError for a setting
        parser.error(str(error))
    print(json.dumps(verification.as_dict()) if args.json else verification)
    return 0 if verification.equal else 1


def _as_flag(name: str, value: object = None) -> str:
    """Returns a setting in the form of this command's flags."""
    return f"--{name}" if value is None else f"--{name} {value}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastgen verify",
        usage="python -m fastgen verify [-h] [--lines N] [--json] MODEL INPUT [--SETTING VALUE ...]",
        description="Generates from the lines of INPUT without fastgen and with it, and says what differs first, with "
        "time and memory. Exit status: 0 equal, 1 different, 2 arguments that are not accepted.",
        epilog="--SETTING VALUE: a setting of generate, such as --num_beams 4 --do_sample true --max_new_tokens 64 "
        "(32 if not given); VALUE as in JSON.",
        allow_abbrev=False,
    )
    model = "a folder or a name of the hub, or demo: the model in the package"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("input", metavar="INPUT", help="a text file, one input in each line")
    parser.add_argument(
        "--lines", type=int, default=8, metavar="N", help="the first N lines, as one batch (default: 8)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser


def _verify(args: argparse.Namespace, words: list[str]) -> Verification:
    """Verifies the lines, loaded, tokenized and batched as by the command. words: --SETTING VALUE and so on."""
    from transformers import AutoConfig

    import fastgen

    if args.lines < 1:
        raise InputError(f"--lines {args.lines} (accepted: 1 or more)")
    if len(words) % 2:
        raise InputError(f"{words[-1]}: a setting needs a name and a value (accepted: --num_beams 4)")
    lines = islice(raw_lines("INPUT", args.input), args.lines)
    gen = [setting(flag.removeprefix("--").replace("-", "_"), value) for flag, value in zip(words[::2], words[1::2])]
    if not {"max_length", "max_new_tokens"} & dict(gen).keys():
        gen.append(("max_new_tokens", _MAX_NEW_TOKENS))
    try:
        config = AutoConfig.from_pretrained(model_folder(args.model) or args.model)
    except (OSError, ValueError) as error:
        raise InputError(misspelt(args.model) or f"MODEL {args.model}: {error}") from error
    settings: dict[str, Any] = {"causal_lm": not config.is_encoder_decoder, "truncation": True, "join_outputs": True}
    task = task_for(BatchConfig(args.model, gen=gen, named=_as_flag, **settings))
    task.load()
    items = task.prepare([Line(number, line) for number, line in enumerate(lines, start=1)])
    for item in items:
        if item.error:
            raise InputError(f"INPUT {args.input}: line {item.line.number} {item.error}")
    if not (filled := [item for item in items if item.length]):
        raise InputError(f"INPUT {args.input}: no lines")
    return fastgen.verify(task.loaded.model, task.collate(filled), **task.loaded.settings)
