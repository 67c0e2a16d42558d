"""Flags of fastgen-generate-for-transformers: FastSeq's names and meanings, so that its command lines keep working.

A flag that is not given is None and leaves the model's own generation_config alone.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import fastgen
from fastgen.cli.errors import InputError
from fastgen.cli.transformers.flags.argument_types import (
    SETTINGS,
    device_name,
    file_or_stream,
    json_file,
    named_jsonl,
    setting,
    whole_number,
)
from fastgen.cli.transformers.flags.flag_checks import SPEECH, check_flags

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
  {PROG} openai/whisper-small files.txt out.txt --task {SPEECH} --src_lang en
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
    """The parser of fastgen-generate-for-transformers."""
    parser = OneLineParser(
        PROG,
        usage="%(prog)s MODEL INPUT OUTPUT [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="local folder, hub name, or demo for the model inside fastgen")
    add(
        "input",
        metavar="INPUT",
        type=file_or_stream,
        help="UTF-8 text, one input per line; .gz is unpacked; - for standard input",
    )
    add("output", metavar="OUTPUT", type=file_or_stream, help="file to write; .gz is packed; - for standard output")
    _add_run_flags(parser.add_argument_group("run"))
    _add_model_flags(parser.add_argument_group("model"))
    _add_format_flags(parser.add_argument_group("formats of INPUT and OUTPUT"))
    _add_text_flags(parser.add_argument_group("text and tokens"))
    _add_generation_flags(parser.add_argument_group("generation"))
    _add_sampling_flags(parser.add_argument_group("sampling"))
    _add_score_flags(parser.add_argument_group("scores"))
    return parser


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    add, number = group.add_argument, whole_number(1)
    add("--bs", type=number, metavar="N", help="most inputs per batch (default: see --batch_tokens)")
    add(
        "--batch_tokens",
        type=number,
        metavar="N",
        help="most source tokens per batch, padding and beams counted; without --bs nothing else limits a batch. "
        "Default, where neither is given: both, from the model's size and the machine's memory; the summary has them",
    )
    add(
        "--window",
        type=whole_number(0),
        metavar="N",
        help="lines that are read ahead and sorted by length, so that a batch has little padding (default: 16 batches; "
        "0: batches of lines as they stand in INPUT)",
    )
    add("--preprocess_workers", type=number, default=1, metavar="N", help="workers that tokenise ahead (default: 1)")
    add("--postprocess_workers", type=number, default=1, metavar="N", help="workers that detokenise (default: 1)")
    add("--n_obs", type=whole_number(1, unset=-1), metavar="N", help="only the first N lines (default: -1, all)")
    add("--version", action="version", version=f"fastgen {fastgen.__version__}", help="show the version and leave")
    add("--resume", action="store_true", help="go on after the records that an earlier run left in OUTPUT.part")
    add(
        "--overwrite",
        action="store_true",
        help="replace an OUTPUT, and a --score_path, that is there already (an OUTPUT.part never is: remove it)",
    )
    said = group.add_mutually_exclusive_group()
    said.add_argument("--quiet", action="store_true", help="no progress on stderr, only what went wrong")
    said.add_argument("--verbose", action="store_true", help="also say how long each stage had nothing to do")
    add(
        "--without_fastgen_opt",
        "--without_fastseq_opt",
        action="store_true",
        help="run the unchanged library, without fastgen's speed-ups",
    )
    add(
        "--compare",
        action="store_true",
        help="also run the unchanged library on every batch; print both speeds and how many outputs are equal",
    )


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--causal_lm", action="store_true", help="MODEL is a decoder-only model (GPT-2, Llama, …)")
    add(
        "--task",
        metavar="NAME",
        help=f"{SPEECH}: INPUT names audio files, one per line (pip install soundfile soxr). Any other name: use the "
        "settings the model's config keeps for this task (task_specific_params), such as summarization or "
        "translation_en_to_de; flags given here win over them (default: none, unlike FastSeq, as in the library)",
    )
    add("--device", type=device_name, help="cpu, cuda, cuda:1, … (default: cuda where there is one, else cpu)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of the weights (default: auto, as they are saved); float16 not on the CPU",
    )
    add("--fp16", action="store_true", help="the same as --dtype float16")
    add("--bf16", action="store_true", help="the same as --dtype bfloat16")
    add(
        "--attn_implementation",
        metavar="NAME",
        help="how attention is computed: eager, sdpa, … (default: the library's choice)",
    )


def _add_format_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--input_format",
        choices=("text", "jsonl"),
        help="one text or one JSON object per line (default: jsonl where INPUT is a .jsonl or .jsonl.gz, else text)",
    )
    add(
        "--text_field",
        metavar="NAME",
        help='field of a JSON object that holds the input (default: "text"); a.b is the field b of the object a, '
        "outputs.0.text the first output of an earlier run, outputs_1.0.text that of the run before",
    )
    add("--id_field", metavar="NAME", help="field of a JSON object that names it, for messages")
    add(
        "--output_format",
        choices=("text", "jsonl"),
        help="one text per line, or one JSON object with the input's further fields, every output, its number of "
        "tokens and its score (default: jsonl where OUTPUT is a .jsonl or .jsonl.gz, else as --input_format)",
    )
    add("--join_outputs", action="store_true", help="several outputs per input on one line of text, joined with ####")
    add(
        "--output_sequence_scores",
        action="store_true",
        help="in text, write SCORE<tab>TEXT: the beam's score (log-probability with length penalty) with six decimals, "
        "NA without beam search and for empty lines; several are joined with ####, like the texts",
    )


def _add_text_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--prefix", metavar="TEXT", help="text put before every line that is not empty, such as 'summarize: '")
    add("--chat", action="store_true", help="put every line as a user's message into the tokenizer's chat template")
    add("--system", metavar="TEXT", help="system message before each chat; needs --chat")
    add("--src_lang", metavar="LANG", help="language of INPUT, as the model calls it: eng_Latn, en_XX, en, …")
    add("--tgt_lang", metavar="LANG", help="language of OUTPUT, as the model calls it")
    add(
        "--max_tokenizer_length",
        type=whole_number(1),
        metavar="N",
        help="truncate inputs to N tokens; without it a line longer than the model's limit is a failed input. Of text "
        "of more than 262,144 characters (16 N, where that is more) only so many are read; without N it fails",
    )
    add("--truncation", action="store_true", help="truncate inputs to the model's limit, as FastSeq does")
    add(
        "--no_truncation",
        action="store_true",
        help="truncate nothing: lines longer than --max_tokenizer_length are failed inputs, too",
    )
    add(
        "--padding",
        choices=("max_length", "longest"),
        help="accepted for FastSeq's command lines: a batch is as wide as its longest input either way",
    )
    add("--return_tensors", choices=("pt",), help="accepted for FastSeq's command lines")
    add("--padding_side", choices=("left", "right"), help="default: left with --causal_lm, else the tokenizer's own")
    add("--include_special_tokens", action="store_true", help="keep special tokens such as </s> in the output")
    add(
        "--clean_up_tokenization_spaces",
        action="store_true",
        help="remove the spaces before punctuation that some tokenizers leave (default: the tokenizer's own setting)",
    )
    add(
        "--output_summaries_only",
        action="store_true",
        help="leave the prompt out of the output of a causal LM; always so, accepted for FastSeq's command lines",
    )


def _add_generation_flags(group: argparse._ArgumentGroup) -> None:
    def add(flag: str, metavar: str, help: str, name: str | None = None) -> None:
        group.add_argument(flag, type=SETTINGS[name or flag.removeprefix("--")], metavar=metavar, help=help)

    add("--beam", "N", "number of beams", name="num_beams")
    add("--max_gen_length", "N", "longest output in tokens; with --causal_lm the prompt counts too", name="max_length")
    add("--max_new_tokens", "N", "most tokens to generate, without the prompt")
    group.add_argument(
        "--min_gen_length",
        type=whole_number(0, unset=-1),
        metavar="N",
        help="shortest output in tokens; with --causal_lm the prompt counts too",
    )
    add("--no_repeat_ngram_size", "N", "no N tokens in a row occur twice (0: off)")
    add("--repetition_penalty", "X", "penalty of repeated tokens (1.0: none)")
    add("--length_penalty", "X", "beam scores are divided by length to this power")
    add(
        "--early_stopping",
        "WHEN",
        "when beam search stops: true (as soon as there are N finished beams), false (a better one is unlikely) "
        "or never (a better one is impossible)",
    )
    add("--decoder_start_token_id", "ID", "first token given to the decoder")
    add("--eos_token_id", "ID", "token that ends an output")
    group.add_argument("--forced_bos_token", metavar="TOKEN", help="token that every output starts with, as text")
    add("--num_return_sequences", "N", "outputs per input")
    group.add_argument(
        "--generation_config",
        type=json_file,
        metavar="FILE",
        help="JSON file of generation settings (generation_config.json); what it leaves out stays the model's own, "
        "and flags win over it",
    )
    group.add_argument(
        "--gen",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any further setting of transformers' GenerationConfig; VALUE is JSON or else text; may be given again",
    )


def _add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--do_sample", action="store_true", help="sample instead of taking the most likely token")
    add("--temperature", type=SETTINGS["temperature"], metavar="X", help="divides the logits; needs --do_sample")
    add("--top_k", type=SETTINGS["top_k"], metavar="N", help="sample from the N likeliest tokens; needs --do_sample")
    add(
        "--top_p",
        type=SETTINGS["top_p"],
        metavar="P",
        help="sample from the likeliest tokens that together have probability P; needs --do_sample",
    )
    add("--seed", type=whole_number(0), metavar="N", help="seed of the random numbers, set before the first batch")


def _add_score_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--reference_path",
        type=Path,
        metavar="FILE",
        help="one reference per line of INPUT; prints ROUGE, BLEU, chrF and exact match (pip install "
        "rouge-score sacrebleu). Of several outputs per input the first is scored",
    )
    add(
        "--reference_field",
        metavar="NAME",
        help="take the references from this field of the JSON records of --reference_path or, without it, of INPUT",
    )
    add("--score_path", type=Path, metavar="FILE", help="where to write these scores as JSON; needs references")


def underscored(argv: Sequence[str]) -> list[str]:
    """--max-gen-length=5 -> --max_gen_length=5, up to a bare "--"; other arguments stay as they are."""
    flags_end = argv.index("--") if "--" in argv else len(argv)
    names_and_values = [argument.partition("=") for argument in argv[:flags_end]]
    flags = [
        "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else name + equals + value
        for name, equals, value in names_and_values
    ]
    return flags + list(argv[flags_end:])


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Flags from a command line; raises InputError for bad or contradictory ones."""
    args = build_parser().parse_args(underscored(argv))
    inferred = args.input_format is None and named_jsonl(args.input)
    args.input_format = args.input_format or ("jsonl" if inferred else "text")
    args.output_format = args.output_format or ("jsonl" if named_jsonl(args.output) else args.input_format)
    check_flags(args)
    args.text_field = args.text_field or "text"
    if inferred and not args.quiet:
        print(
            f"note: INPUT {args.input} is read as JSON records (--input_format text reads it as text)", file=sys.stderr
        )
    return args
