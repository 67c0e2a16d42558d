"""`python -m fastgen verify MODEL INPUT`: a model of transformers without fastgen and with it, on lines of text.
Tests: tests/cli/test_verify_command.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.cli.errors import InputError

if TYPE_CHECKING:
    from fastgen.optimizer.verify import Verification

_MAX_NEW_TOKENS = 32


def main(argv: list[str]) -> int:
    """0 if the outputs are equal, 1 if they differ; argparse exits with 2 for arguments that are not accepted."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    try:
        found = _verify(args, _settings(rest))
    except InputError as error:
        parser.error(str(error))
    print(json.dumps(found.as_dict()) if args.json else found)
    return 0 if found.equal else 1


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
    parser.add_argument(
        "model", metavar="MODEL", help="a folder or a name of the hub, or demo: the model in the package"
    )
    parser.add_argument("input", metavar="INPUT", help="a text file, one input in each line")
    parser.add_argument("--lines", type=int, default=8, metavar="N", help="the first N lines, as one batch (8)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser


def _settings(words: list[str]) -> dict[str, Any]:
    """`--num_beams 4 --do_sample true` as keyword arguments of generate."""
    from transformers import GenerationConfig

    settings: dict[str, Any] = {}
    if len(words) % 2:
        raise InputError(f"{words[-1]}: a setting needs a name and a value (accepted: --num_beams 4)")
    for flag, value in zip(words[::2], words[1::2]):
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or not hasattr(GenerationConfig(), name):
            raise InputError(f"{flag}: no setting of generate (accepted: those of GenerationConfig, --num_beams 4)")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings if "max_length" in settings else {"max_new_tokens": _MAX_NEW_TOKENS, **settings}


def _verify(args: argparse.Namespace, settings: dict[str, Any]) -> Verification:
    import fastgen
    from fastgen.models import demo

    if args.lines < 1:
        raise InputError(f"--lines {args.lines} (accepted: 1 or more)")
    try:
        lines = Path(args.input).read_text(encoding="utf-8").splitlines()[: args.lines]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"INPUT {args.input}: {error}") from error
    if not lines:
        raise InputError(f"INPUT {args.input}: no lines")
    model, tokenizer = _load(str(demo.demo_path()) if args.model == demo.DEMO else args.model)
    if "max_new_tokens" in settings:
        model.generation_config.max_length = None  # or the library warns in each call that one of them counts
    inputs = dict(tokenizer(lines, padding=True, truncation=True, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    try:
        return fastgen.verify(model, inputs, **settings)
    except ValueError as error:  # of generate, about a setting
        raise InputError(str(error)) from error


def _load(name: str) -> tuple[Any, Any]:
    """The model in `eval()` and its tokenizer, which pads where the model needs it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        side = "right" if config.is_encoder_decoder else "left"
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side=side)
        model = kind.from_pretrained(name).eval()
    except (OSError, ValueError) as error:
        raise InputError(f"MODEL {name}: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer
