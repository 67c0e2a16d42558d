"""The command line of fastgen-generate-for-transformers: every flag, its values, and what contradicts.

Names and meanings are FastSeq's, so that its command lines keep working; every field of transformers' GenerationConfig
is a flag as well. Nothing here imports torch: a mistake is reported before anything slow happens.

Tests: tests/cli/transformers/test_cli_flags.py, tests/cli/transformers/test_cli_bad_flags.py
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import fastgen
from fastgen.cli.exits import InputError, did_you_mean
from fastgen.cli.transformers.flag_values import AUTO, UNSET, json_file, parsed, setting, whole

PROG = "fastgen-generate-for-transformers"
STREAM = "-"  # INPUT: standard input, OUTPUT: standard output
AUDIO_OUT = ("text-to-speech", "speech-to-speech")  # OUTPUT names audio files
# That fastgen knows, whatever MODEL has settings for.
TASKS = ("automatic-speech-recognition", "speech-to-text", *AUDIO_OUT, "translation")
# Names of Hugging Face, or of FastSeq, for what has another name here.
ALIASES = {
    "num_beams": "beam",
    "max_length": "max_gen_length",
    "min_length": "min_gen_length",
    "batch_size": "bs",
    "without_fastseq_opt": "without_fastgen_opt",
}
# Flags of FastSeq, and of earlier versions, that change nothing; how argparse reads them.
IGNORED: dict[str, dict[str, Any]] = {
    "padding": {"nargs": "?"},
    "return_tensors": {"nargs": "?"},
    "output_summaries_only": {"action": "store_true"},
}
# Of these only one is accepted at a time.
EXCLUSIVE = (
    *(("dtype", "fp16", "bf16"), ("truncation", "no_truncation"), ("max_length", "max_new_tokens")),
    *(("retry_failed", "overwrite"), ("retry_failed", "merge")),
)
# The groups of --help-all, by the first flag of each. --help has the first.
GROUPS = {
    "bs": "common flags",
    "seed": "more generation settings",
    "dtype": "model",
    "input_format": "formats of INPUT and OUTPUT",
    "prefix": "text, tokens and languages",
    "batch_tokens": "batches, threads and shards",
    "reference_path": "scores",
}
HELP = "Generate for every line of INPUT with a model and write one record per line to\nOUTPUT, in the same order."
EPILOG = f"""\
Every field of GenerationConfig is a flag (--temperature 0.7, --top_p 0.9,
--num_return_sequences 4, --no_repeat_ngram_size 3, --length_penalty 2, ...).
What is not given stays the model's own. --help-all lists all other flags.

Lines that fail are listed, and have an empty record. INPUT and OUTPUT may be
compressed (.gz, .xz, .zst) and URLs (s3://…, hf://…). exit status: 0 all done,
1 some inputs failed, 2 a flag, file or model cannot be used, 130 Ctrl-C,
143 SIGTERM. Examples and all details: docs/commands.md
  {PROG} facebook/bart-base in.txt out.txt --beam 4
  {PROG} gpt2 in.txt out.txt --causal_lm --do_sample"""


def _flag(help: str, default: Any = None, **options: Any) -> Any:
    """A field that is a flag; `options` are those of argparse's add_argument."""
    metadata = {"help": help, **options}
    if default == []:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def _switch(help: str) -> Any:
    return _flag(help, False, action="store_true")


_FORMATS = ("text", "jsonl", "openai")
# Settings of generate that --help lists; the others are flags, too.
COMMON_SETTINGS = {
    "num_beams": "number of beams (or --num_beams)",
    "max_new_tokens": "most tokens to generate, without the prompt",
    "max_length": "longest output; counts a causal LM's prompt",
    "min_length": "shortest output in tokens",
}
SAMPLE = "sample instead of taking the most likely token"


@dataclass(frozen=True)
class RunConfig:
    """What the command line asks for; `--help` says what each flag does, docs/commands.md says all of it."""

    model: str = _flag("local folder, hub name, or demo for the model in fastgen")
    input: str = _flag("text, an input per line, or JSON records (.jsonl); - stdin")
    output: str = _flag("file to write, JSON records for a .jsonl; - stdout")

    bs: int | None = _flag("most inputs per batch (or --batch_size)", type=whole(1), metavar="N")
    causal_lm: bool = _switch("MODEL is a decoder-only model (GPT-2, Llama, …)")
    chat: bool = _switch("lines are messages of a user, or lists of messages")
    task: str | None = _flag("speech-to-text, text-to-speech, translation, …", metavar="NAME")
    device: str | None = _flag("cpu, cuda, cuda:1, … (default: cuda if there is one)", metavar="NAME")
    workers: Any = _flag("processes with a model each, or auto (needs ray)", type=whole(1, AUTO), metavar="N")
    resume: bool = _switch("go on with the run that left OUTPUT.part")
    overwrite: bool = _switch("replace OUTPUT or --score_path that is there")
    retry_failed: bool = _switch("only the lines of OUTPUT that failed, in place")
    quiet: bool = _switch("no progress on stderr, only what went wrong")

    seed: int | None = _flag("seed of the samples (default: drawn, and kept for --resume)", type=whole(0), metavar="N")
    forced_bos_token: str | None = _flag("token that every output starts with, as text", metavar="TOKEN")
    generation_config: dict[str, Any] | None = _flag(
        "generation settings as JSON; flags win over them", type=json_file, metavar="FILE"
    )
    gen: list[tuple[str, Any]] = _flag(
        "any setting of generate; may be repeated", [], type=setting, action="append", metavar="KEY=VALUE"
    )

    dtype: str | None = _flag(
        "auto (as saved), float32, bfloat16 or float16",
        choices=("auto", "float32", "bfloat16", "float16"),
        metavar="TYPE",
    )
    fp16: bool = _switch("the same as --dtype float16")
    bf16: bool = _switch("the same as --dtype bfloat16")
    attn_implementation: str | None = _flag("eager, sdpa, … (default: the library's choice)", metavar="NAME")
    device_map: str | None = _flag("auto: over all devices, by accelerate", choices=("auto",), metavar="MAP")
    without_fastgen_opt: bool = _switch("run the unchanged library")

    input_format: str | None = _flag("text, jsonl or openai (default: by INPUT)", choices=_FORMATS, metavar="FORMAT")
    output_format: str | None = _flag(
        "text, jsonl or openai (default: by OUTPUT, else as INPUT)", choices=_FORMATS, metavar="FORMAT"
    )
    text_field: str | None = _flag('JSON field of the input (default: "text"); a.b is b of a', metavar="NAME")
    id_field: str | None = _flag("JSON field that names a record in messages", metavar="NAME")
    join_outputs: bool = _switch("several outputs on one line of text, joined with ####")
    output_sequence_scores: bool = _switch("in text, write SCORE<tab>TEXT (NA without beams)")

    prefix: str | None = _flag("text before every line that is not empty", metavar="TEXT")
    system: str | None = _flag("system message before each chat", metavar="TEXT")
    src_lang: str | None = _flag("language of INPUT, as the model calls it", metavar="LANG")
    tgt_lang: str | None = _flag("language of OUTPUT, as the model calls it", metavar="LANG")
    speaker_id: int | None = _flag("voice that speaks, from 0 on", type=whole(0), metavar="N")
    max_tokenizer_length: int | None = _flag("truncate inputs to N tokens", type=whole(1), metavar="N")
    truncation: bool = _switch("truncate inputs to the model's limit")
    no_truncation: bool = _switch("truncate nothing: what is too long fails")
    padding_side: str | None = _flag("left or right (default: MODEL's)", choices=("left", "right"), metavar="SIDE")
    include_special_tokens: bool = _switch("keep special tokens such as </s> in the output")
    clean_up_tokenization_spaces: bool = _switch("remove spaces before punctuation")

    batch_tokens: int | None = _flag("most tokens per batch, padding and beams counted", type=whole(1), metavar="N")
    window: int | None = _flag(
        "lines sorted by length together (default: 16 batches; 0: none)", type=whole(0), metavar="N"
    )
    preprocess_workers: int = _flag("threads that tokenise ahead (default: 1)", 1, type=whole(1), metavar="N")
    postprocess_workers: int = _flag("threads that detokenise (default: 1)", 1, type=whole(1), metavar="N")
    n_obs: int | None = _flag("only the first N lines (-1: all)", type=whole(1, UNSET), metavar="N")

    ray: str | None = _flag("the cluster that --workers are on", nargs="?", const="auto", metavar="ADDRESS")
    verbose: bool = _switch("the speed of each worker")
    num_shards: Any = _flag("divide INPUT into N runs, or auto", type=whole(1, AUTO), metavar="N")
    shard_id: Any = _flag("which of them this is, from 0 on, or auto", type=whole(0, AUTO), metavar="I")
    merge: bool = _switch("put all --num_shards together")

    reference_path: str | None = _flag("references, a line each: prints ROUGE, BLEU, chrF, …", metavar="FILE")
    reference_field: str | None = _flag("JSON field of the references", metavar="NAME")
    score_path: str | None = _flag("where to write the scores as JSON", metavar="FILE")

    @property
    def reads_records(self) -> bool:
        """Whether INPUT holds JSON."""
        return self.input_format != "text"

    @property
    def writes_records(self) -> bool:
        """Whether OUTPUT does."""
        return self.output_format != "text"

    def given(self, name: str) -> str:
        """A flag as it is written; empty where it is not given."""
        value = vars(self)[name] if name in vars(self) else dict(self.gen).get(name)
        flag = f"--{ALIASES.get(name, name)}"
        return "" if value is None or value is False else flag if value is True else f"{flag} {value}"

    def settings(self) -> list[tuple[str, Any, str]]:
        """Name and value of every setting of generate that a flag gives, and that flag as it is written."""
        known = generation_fields()
        return [
            (name, value, f"--{ALIASES.get(name, name)} {value}" if name in known else f"--gen {name}={value}")
            for name, value in self.gen
        ]


class _Parser(argparse.ArgumentParser):
    """Raises InputError instead of printing the usage and leaving, so that every mistake is reported the same way."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def build_parser(everything: bool = False) -> argparse.ArgumentParser:
    """The parser of all flags; `everything`: its help lists them all. What is not given is not in its result."""
    width = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34 if everything else 26, width=80)
    parser = _Parser(
        PROG, usage="%(prog)s MODEL INPUT OUTPUT [flags]", description=HELP, epilog=EPILOG, formatter_class=width,
        allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    group: argparse._ActionsContainer = parser
    for name in ("--help", "--help_all"):
        parser.add_argument(name, action="help", help=f"show {'the common' if name == '--help' else 'all'} flags")
    version = f"fastgen {fastgen.__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version")
    hidden: dict[str, Any] = {}
    options: dict[str, Any]
    for each in fields(RunConfig):
        if each.name in GROUPS:
            group = parser.add_argument_group(GROUPS[each.name])
            hidden = {} if everything or each.name == "bs" else {"help": argparse.SUPPRESS}
        if each.name == "bs":
            for name, help in COMMON_SETTINGS.items():
                options = {"type": partial(parsed, name), "help": help, "metavar": "N"}
                group.add_argument(f"--{ALIASES.get(name, name)}", dest="gen", action="append", **options)
            const = ("do_sample", True)
            group.add_argument("--do_sample", dest="gen", action="append_const", const=const, help=SAMPLE)
        if each.name in ("model", "input", "output"):
            group.add_argument(each.name, metavar=each.name.upper(), **each.metadata)
        else:
            group.add_argument(f"--{each.name}", **each.metadata | hidden)
    for name in generation_fields():
        if name not in (*COMMON_SETTINGS, "do_sample"):
            options = {"nargs": "?", "const": "true", "help": argparse.SUPPRESS}
            parser.add_argument(f"--{name}", dest="gen", action="append", type=partial(parsed, name), **options)
    for name, options in IGNORED.items():
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **options)
    return parser


def parse_arguments(argv: Sequence[str]) -> RunConfig:
    """Flags from a command line, with - and _ as one; raises InputError for bad or contradictory ones."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = build_parser(everything="--help-all" in argv[:end] or "--help_all" in argv[:end])
    known = [name.removeprefix("--") for name in parser._option_string_actions]
    words = []
    for word in argv[:end]:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name[2:].replace("-", "_")
            name = ALIASES.get(name, name)
            if name not in known:
                raise InputError(f"--{name} is not known{did_you_mean(name, [*known, *ALIASES], 'see --help', '--')}")
            word = f"--{name}{equals}{value}"
        words.append(word)
    found = vars(parser.parse_args([*words, *argv[end:]]))
    for name in [name for name in IGNORED if name in found]:
        del found[name]
        print(f"note: --{name} changes nothing", file=sys.stderr)
    # FastSeq's number for "not set".
    found["gen"] = [each for each in found.get("gen", []) if each != ("min_length", None)]
    return completed(RunConfig(**found))


def completed(args: RunConfig) -> RunConfig:
    """With the formats that names of files imply; raises InputError for flags that contradict each other."""
    inferred = args.input_format is None and is_jsonl(args.input)
    input_format = args.input_format or ("jsonl" if inferred else "text")
    by_input = "text" if input_format == "text" else "jsonl"
    output_format = args.output_format or ("jsonl" if is_jsonl(args.output) or args.task in AUDIO_OUT else by_input)
    args = replace(args, input_format=input_format, output_format=output_format)
    if input_format == "openai":
        args = replace(args, chat=True, causal_lm=True, text_field="body.messages", id_field="custom_id")
    _check(args)
    if inferred and not args.quiet:
        note = f"note: INPUT {args.input} is read as JSON records (--input_format text reads it as text)"
        print(note, file=sys.stderr)
    dtype = "float16" if args.fp16 else "bfloat16" if args.bf16 else args.dtype
    return replace(args, text_field=args.text_field or "text", dtype=dtype, fp16=False, bf16=False)


def is_jsonl(path: str) -> bool:
    """Whether a file's name says that it holds JSON records, one on each line."""
    return re.search(r"\.jsonl(\.(gz|bz2|xz|zst))?$", path.lower()) is not None


@cache
def generation_fields() -> tuple[str, ...]:
    """The fields of the installed GenerationConfig, read from its source: importing it takes seconds."""
    spec = find_spec("transformers")
    folders = spec.submodule_search_locations if spec is not None else None
    source = Path((folders or [""])[0]) / "generation" / "configuration_utils.py"
    if not source.is_file():
        return ()
    return tuple(dict.fromkeys(re.findall(r"self\.([a-z]\w*) = kwargs\.pop\(", source.read_text(encoding="utf-8"))))


def check_several_outputs(args: RunConfig, num_return_sequences: int) -> None:
    """A line of text holds several outputs only where that was asked for."""
    if num_return_sequences > 1 and not args.join_outputs and not args.writes_records:
        raise InputError(
            f"--num_return_sequences {num_return_sequences} does not go with one line of text per input "
            "(accepted: --output_format jsonl, or --join_outputs to join them with ####)"
        )


# Settings that no flag and no --generation_config can change. What is no setting at all is found by settings.py.
REFUSED_SETTINGS = (
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("return_segments", "return_token_timestamps", "streamer", "logits_processor", "stopping_criteria"),
    *("prefix_allowed_tokens_fn", "assistant_model", "is_assistant", "compile_config", "continuous_batching_config"),
)


def _check(args: RunConfig) -> None:
    """Raises InputError for flags that contradict each other; what a task does not take is the task's to say."""
    for names in EXCLUSIVE:
        if len(rivals := [args.given(name) for name in names if args.given(name)]) > 1:
            raise InputError(f"{' and '.join(rivals)} contradict each other (accepted: one of them)")
    if args.ray is not None and args.workers is None:
        raise InputError(f"{args.given('ray')} needs --workers N")
    given = args.settings()
    first = [args.given(name) for name in ("forced_bos_token", "tgt_lang")]
    given += [("forced_bos_token_id", 0, flag) for flag in first if flag]
    if args.src_lang is not None:
        given.append(("language", args.src_lang, args.given("src_lang")))
    from_file = args.generation_config or {}
    for key, value, flag in [*given, *((key, each, f"--generation_config: {key}") for key, each in from_file.items())]:
        if key in REFUSED_SETTINGS and value:
            hint = "accepted, for scores: --output_sequence_scores, --output_format jsonl"
            raise InputError(f"{flag} cannot be set: the command asks generate for what it writes ({hint})")
    seen: dict[str, tuple[Any, str]] = {}
    for key, value, flag in given:
        if key in seen:
            raise InputError(f"{seen[key][1]} and {flag} contradict each other (accepted: one of them)")
        seen[key] = value, flag
    sampling = from_file.get("do_sample") if "do_sample" not in seen else seen["do_sample"][0]
    for name in ("temperature", "top_k", "top_p"):
        fallbacks = isinstance(seen.get(name, (None,))[0], list)  # of long recordings, which draw where they have to
        if args.given(name) and not sampling and not fallbacks:
            raise InputError(f"{args.given(name)} has no effect without --do_sample")
    check_several_outputs(args, seen.get("num_return_sequences", (1,))[0] or 1)
    settings = dict(args.gen)
    shortest = settings.get("min_length") or 0
    for name in ("max_length", "max_new_tokens"):
        # A causal LM's shortest length counts the prompt, so nothing can be said before the prompts are known.
        counts_alike = name == "max_length" or not args.causal_lm
        if settings.get(name) is not None and shortest > settings[name] and counts_alike:
            raise InputError(f"{args.given('min_length')} is more than {args.given(name)}")
    _check_files(args)


def _check_files(args: RunConfig) -> None:
    scored, score_path = args.given("reference_path") or args.given("reference_field"), args.given("score_path")
    of_records = [
        *map(args.given, ("text_field", "id_field")),
        "" if args.reference_path else args.given("reference_field"),
    ]
    is_text, has_field = not args.reads_records, args.reference_field is not None
    mistakes = {
        f"{score_path} needs --reference_path or --reference_field": score_path and not scored,
        f"{scored} does not go with OUTPUT - (accepted: a file)": scored and args.output == STREAM,
        f"{scored} holds JSON records (needs --reference_field NAME)": is_jsonl(args.reference_path or "")
        and not has_field,
        **{f"{flag} needs --input_format jsonl": flag and is_text for flag in of_records},
        "--join_outputs does not go with JSONL, which keeps outputs apart": args.join_outputs and args.writes_records,
        "--output_format openai needs --input_format jsonl or openai": args.output_format == "openai" and is_text,
    }
    for message in (message for message, holds in mistakes.items() if holds):
        raise InputError(message)
