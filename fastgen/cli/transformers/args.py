"""The command line of fastgen-generate-for-transformers: turns flags into a BatchConfig, and has the help.

Every setting of a run is a flag, and so is every field of transformers' GenerationConfig. Names and meanings are
FastSeq's, so that its command lines still work.

Tests: tests/batch/test_settings.py, tests/cli/transformers/test_flags.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import Field
from functools import partial
from itertools import groupby
from typing import Any, NoReturn

import fastgen
from fastgen.batch.config import (
    COMMON,
    FASTSEQ_NAMES,
    OTHER_NAMES,
    BatchConfig,
    generation_fields,
    kind_of_records,
    settings_of_run,
)
from fastgen.batch.errors import InputError, did_you_mean

PROG = "fastgen-generate-for-transformers"
# Flags of FastSeq and of earlier versions that have no effect, with their options for argparse.
IGNORED: dict[str, dict[str, Any]] = {
    "padding": {"nargs": "?"},
    "return_tensors": {"nargs": "?"},
    "output_summaries_only": {"action": "store_true"},
}
HELP = "Generate for every line of INPUT with a model and write one record per line to\nOUTPUT, in the same order."
EPILOG = f"""\
Every field of GenerationConfig is a flag (--temperature 0.7, --top_p 0.9,
--num_return_sequences 4, --no_repeat_ngram_size 3, --length_penalty 2, ...).
What is not given stays the model's own. --help_all lists all other flags.

Lines that fail are listed, and have an empty record. INPUT and OUTPUT may be
compressed (.gz, .xz, .zst) and URLs (s3://…, hf://…). exit status: 0 all done,
1 some inputs failed, 2 a flag, file or model cannot be used, 130 Ctrl-C,
141 the reader closed OUTPUT, 143 SIGTERM. All details: docs/commands.md
  {PROG} facebook/bart-base in.txt out.txt --beam 4
  {PROG} gpt2 in.txt out.txt --causal_lm --do_sample"""

# The settings of generate that --help lists; the rest are also flags.
COMMON_SETTINGS = {
    "num_beams": "number of beams (or --num_beams)",
    "max_new_tokens": "most tokens to generate, without the prompt",
    "max_length": "longest output; counts a causal LM's prompt",
    "min_length": "shortest output in tokens",
}
SAMPLE = "sample instead of taking the most likely token"


class _Parser(argparse.ArgumentParser):
    """A parser that raises InputError instead of printing the usage and exiting, like the checks of other settings."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def build_parser(everything: bool = False) -> argparse.ArgumentParser:
    """Returns the parser of all flags; its result has only those on the command line. everything: help lists all."""
    width = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34 if everything else 26, width=80)
    parser = _Parser(
        PROG, usage="%(prog)s MODEL INPUT OUTPUT [flags]", description=HELP, epilog=EPILOG, formatter_class=width,
        allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    for name in ("--help", "--help_all"):
        parser.add_argument(name, action="help", help=f"show {'the common' if name == '--help' else 'all'} flags")
    version = f"fastgen {fastgen.__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version")
    for title, settings in groupby(settings_of_run(), key=lambda setting: setting.metadata["group"]):
        group = parser.add_argument_group(title) if title else parser
        if title == COMMON:
            for name, help in COMMON_SETTINGS.items():
                _add_setting(group, name, help=help, metavar="N")
            const = ("do_sample", True)
            group.add_argument("--do_sample", dest="gen", action="append_const", const=const, help=SAMPLE)
        for setting in settings:
            hidden = {} if everything or title in ("", COMMON) else {"help": argparse.SUPPRESS}
            _add_flag(group, setting, setting.metadata["argparse"] | hidden)
    for name in generation_fields():
        if name not in (*COMMON_SETTINGS, "do_sample"):
            _add_setting(parser, name, nargs="?", const="true", help=argparse.SUPPRESS)
    for name, options in IGNORED.items():
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **options)
    return parser


def _add_flag(group: argparse._ActionsContainer, setting: Field[Any], options: dict[str, Any]) -> None:
    """Adds the flag of a setting of the run."""
    if not setting.metadata["group"]:
        group.add_argument(setting.name, metavar=setting.name.upper(), **options)
    elif setting.name == "gen":
        group.add_argument("--gen", action="append", type=_key_value, **options)
    elif setting.default is False:
        group.add_argument(f"--{setting.name}", action="store_true", **options)
    else:
        group.add_argument(f"--{setting.name}", **options)


def _add_setting(group: argparse._ActionsContainer, name: str, **options: Any) -> None:
    """Adds the flag of a setting of generate."""
    flag = f"--{FASTSEQ_NAMES.get(name, name)}"
    group.add_argument(flag, dest="gen", action="append", type=partial(setting, name), **options)


def setting(name: str, text: str) -> tuple[str, Any]:
    """Returns a setting of generate and its value: a JSON literal, otherwise the text itself."""
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if not (equals and key.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting (accepted: key=value, such as num_beams=4)")
    return setting(key, value)


def as_flag(name: str, value: Any = None) -> str:
    """Returns a setting in the form of a flag."""
    is_of_run = name in {setting.name for setting in settings_of_run()}
    if not is_of_run and name not in generation_fields():
        return f"--gen {name}" if value is None else f"--gen {name}={value}"
    flag = f"--{FASTSEQ_NAMES.get(name, name)}"
    return flag if value is None or (is_of_run and value is True) else f"{flag} {value}"


def parse_arguments(argv: Sequence[str]) -> BatchConfig:
    """Returns the settings of a command line; - and _ are the same. Raises InputError for invalid ones."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = build_parser(everything="--help-all" in argv[:end] or "--help_all" in argv[:end])
    flags = [name.removeprefix("--") for name in parser._option_string_actions]
    words = []
    for word in argv[:end]:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name[2:].replace("-", "_")
            name = OTHER_NAMES.get(name, name)
            name = FASTSEQ_NAMES.get(name, name)
            if name not in flags:
                hint = did_you_mean(name, [*flags, *FASTSEQ_NAMES, *OTHER_NAMES], "see --help", "--")
                raise InputError(f"--{name} is not known{hint}")
            word = f"--{name}{equals}{value}"
        words.append(word)
    settings = vars(parser.parse_args([*words, *argv[end:]]))
    for name in [name for name in IGNORED if name in settings]:
        del settings[name]
        print(f"note: --{name} changes nothing", file=sys.stderr)
    # FastSeq's number for "not set".
    settings["gen"] = [pair for pair in settings.get("gen", []) if pair != ("min_length", -1)]
    config = BatchConfig(**settings, named=as_flag)
    if "input_format" not in settings and config.reads_records and not config.quiet:
        kind = kind_of_records(config.input) or "JSON"
        note = f"note: INPUT {config.input} is read as {kind} records (--input_format text reads it as text)"
        print(note, file=sys.stderr)
    return config
