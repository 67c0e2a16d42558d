"""The command line of fastgen-generate-for-transformers: what --help says, and flags to a RunConfig."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NoReturn

import fastgen
from fastgen.cli.errors import InputError
from fastgen.cli.transformers.flags.argument_types import named_jsonl
from fastgen.cli.transformers.flags.flag_checks import check_flags
from fastgen.cli.transformers.flags.run_config import EXCLUSIVE, GROUPS, RunConfig

PROG = "fastgen-generate-for-transformers"

DESCRIPTION = """\
Generate text for every line of INPUT with a Hugging Face model and write one record per line to OUTPUT, in the same
order. A line that is empty stays empty."""

EPILOG = f"""\
Flags may be written with - for _ (--max-gen-length). A flag that is not given leaves the model's generation_config
alone. Line breaks inside an output become spaces where OUTPUT is text.

examples:
  {PROG} facebook/bart-large-cnn test.source out.txt --bs 16 --beam 4 --device cuda --fp16
  {PROG} facebook/nllb-200-distilled-600M in.jsonl out.jsonl.gz \\
      --src_lang eng_Latn --tgt_lang deu_Latn --batch_tokens 4096
  {PROG} gpt2 prompts.txt out.txt --causal_lm --max_new_tokens 64 --do_sample --seed 1
  {PROG} openai/whisper-small files.txt out.txt --task automatic-speech-recognition --src_lang en
  {PROG} facebook/seamless-m4t-v2-large lines.txt out.jsonl \\
      --task text-to-speech --src_lang eng --tgt_lang fra
  {PROG} demo test.source out.txt --compare
  {PROG} gpt2 out.jsonl next.jsonl --causal_lm --text_field outputs.0.text

OUTPUT of JSON can be INPUT again. Its fields outputs, input_tokens and error are then called outputs_1, …, in the next
run outputs_2, …; a line that had no output stays empty.

OUTPUT is written as OUTPUT.part and renamed when it is complete. What OUTPUT.part holds is always whole records of the
first lines of INPUT, and the same command with --resume goes on after them; where OUTPUT is complete it has nothing to
do, which OUTPUT.run.json tells it. An OUTPUT that is there is never replaced without --overwrite.
OUTPUT.gz is packed when it is complete.

exit status: 0 all done; 1 some inputs failed (each is listed with its line number and has an empty record), or the run
could not go on; 2 a flag, file or model cannot be used; 130 interrupted (Ctrl-C), 143 ended by SIGTERM."""


class OneLineParser(argparse.ArgumentParser):
    """Raises InputError instead of printing the usage and leaving, so that every mistake is reported the same way."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the flags that RunConfig has. What is not given is not in its result: RunConfig has the default."""
    parser = OneLineParser(
        PROG,
        usage="%(prog)s MODEL INPUT OUTPUT [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"fastgen {fastgen.__version__}", help="show the version and leave"
    )
    group: argparse._ActionsContainer = parser
    exclusive: dict[tuple[str, ...], argparse._ActionsContainer] = {}
    for each in fields(RunConfig):
        options = dict(each.metadata)
        if each.name in ("model", "input", "output"):
            parser.add_argument(each.name, metavar=each.name.upper(), **options)
            continue
        if each.name in GROUPS:
            group = parser.add_argument_group(GROUPS[each.name])
        options.pop("setting", None)
        target = group
        if (rivals := next((names for names in EXCLUSIVE if each.name in names), None)) is not None:
            if rivals not in exclusive:
                exclusive[rivals] = group.add_mutually_exclusive_group()
            target = exclusive[rivals]
        names = [f"--{each.name}", *filter(None, [options.pop("also", None)])]
        target.add_argument(*names, dest=each.name, default=argparse.SUPPRESS, **options)
    return parser


def underscored(argv: Sequence[str]) -> list[str]:
    """--max-gen-length=5 -> --max_gen_length=5, up to a bare "--"; other arguments stay as they are."""
    flags_end = argv.index("--") if "--" in argv else len(argv)
    names_and_values = [argument.partition("=") for argument in argv[:flags_end]]
    flags = [
        "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else name + equals + value
        for name, equals, value in names_and_values
    ]
    return flags + list(argv[flags_end:])


def parse_arguments(argv: Sequence[str]) -> RunConfig:
    """Flags from a command line; raises InputError for bad or contradictory ones."""
    args = RunConfig(**vars(build_parser().parse_args(underscored(argv))))
    inferred = args.input_format is None and named_jsonl(args.input)
    input_format = args.input_format or ("jsonl" if inferred else "text")
    output_format = args.output_format or ("jsonl" if named_jsonl(args.output) or args.speaks else input_format)
    args = replace(args, input_format=input_format, output_format=output_format)
    check_flags(args)
    if inferred and not args.quiet:
        print(
            f"note: INPUT {args.input} is read as JSON records (--input_format text reads it as text)", file=sys.stderr
        )
    return replace(args, text_field=args.text_field or "text")
