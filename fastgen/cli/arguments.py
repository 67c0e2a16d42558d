"""Flags of fastgen-generate-for-transformers: names and meaning are FastSeq's, so that its command lines keep working.

A flag that is not given is None and leaves the model's own generation_config alone.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fastgen.cli.errors import InputError

PROG = "fastgen-generate-for-transformers"

# Counts, lengths, token ids and seeds all fit; what is beyond would overflow inside torch.
LARGEST_NUMBER = 2**31 - 1

DESCRIPTION = """\
Generate text for every line of INPUT with a Hugging Face model and write one line of output per line of input, in the
same order. A line that is empty stays empty."""

EPILOG = f"""\
Flags may be written with - for _ (--max-gen-length). A flag that is not given leaves the model's generation_config
alone. Several outputs of one input are joined with ####; line breaks inside an output become spaces.

examples:
  {PROG} facebook/bart-large-cnn test.source out.txt --bs 16 --beam 4 --device cuda --fp16
  {PROG} gpt2 prompts.txt out.txt --causal_lm --max_new_tokens 64 --do_sample --seed 1
  {PROG} demo test.source out.txt --compare

exit status: 0 done, 1 failed while generating, 2 a flag, file or model cannot be used, 130 interrupted. OUTPUT is
written only when everything succeeded."""


class OneLineParser(argparse.ArgumentParser):
    """Raises InputError instead of printing the usage and leaving, so that every mistake is reported the same way."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def whole_number(minimum: int, unset: int | None = None) -> Callable[[str], int | None]:
    """A parser of whole numbers from `minimum` on; `unset` is FastSeq's number for "not given" and becomes None."""
    accepted = f"{minimum} to {LARGEST_NUMBER}" + ("" if unset is None else f", or {unset} for not set")

    def parse(text: str) -> int | None:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (accepted: {accepted})") from None
        if value == unset:
            return None
        if not minimum <= value <= LARGEST_NUMBER:
            raise argparse.ArgumentTypeError(f"{text} is out of range (accepted: {accepted})")
        return value

    return parse


def real_number(above: float = -math.inf, up_to: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers greater than `above` and not greater than `up_to`."""
    bounds = [f"greater than {above:g}"] * (above > -math.inf) + [f"at most {up_to:g}"] * (up_to < math.inf)
    accepted = " and ".join(["a finite number", *bounds])

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number (accepted: {accepted})") from None
        if not (math.isfinite(value) and above < value <= up_to):
            raise argparse.ArgumentTypeError(f"{text} is out of range (accepted: {accepted})")
        return value

    return parse


def early_stopping(text: str) -> bool | str:
    """transformers takes True, False or "never"."""
    values = {"true": True, "false": False, "never": "never"}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not known (accepted: {', '.join(values)})")
    return values[text.lower()]


def device_name(text: str) -> str:
    """Only the form is checked here; whether the device is there needs torch."""
    if not re.fullmatch(r"[a-z]+(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device (accepted: cpu, cuda, cuda:1, …)")
    return text


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
    parser.add_argument("model", metavar="MODEL", help="local folder, hub name, or demo for the model inside fastgen")
    parser.add_argument("input", metavar="INPUT", type=Path, help="UTF-8 text, one input per line")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="file to write, one output per line")
    _add_run_flags(parser.add_argument_group("run"))
    _add_text_flags(parser.add_argument_group("text and tokens"))
    _add_generation_flags(parser.add_argument_group("generation"))
    _add_sampling_flags(parser.add_argument_group("sampling"))
    _add_score_flags(parser.add_argument_group("scores"))
    return parser


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--bs", type=whole_number(1), default=8, metavar="N", help="inputs per batch (default: 8)")
    add("--device", type=device_name, help="cpu, cuda, cuda:1, … (default: cuda where there is one, else cpu)")
    add("--fp16", action="store_true", help="load the weights as float16; not on the CPU")
    add("--bf16", action="store_true", help="load the weights as bfloat16; on any device")
    add("--n_obs", type=whole_number(1, unset=-1), metavar="N", help="only the first N lines (default: -1, all)")
    add("--causal_lm", action="store_true", help="MODEL is a decoder-only model (GPT-2, Llama, …)")
    add(
        "--task",
        metavar="NAME",
        help="use the settings the model's config keeps for this task (task_specific_params), "
        "such as summarization or translation_en_to_de; flags given here win over them",
    )
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


def _add_text_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--prefix", metavar="TEXT", help="text put before every line that is not empty, such as 'summarize: '")
    add(
        "--max_tokenizer_length",
        type=whole_number(1),
        metavar="N",
        help="truncate inputs to N tokens; without it a line longer than the model's limit is an error",
    )
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
    add = group.add_argument
    add("--beam", type=whole_number(1), metavar="N", help="number of beams")
    add(
        "--max_gen_length",
        type=whole_number(1),
        metavar="N",
        help="longest output in tokens; with --causal_lm the prompt counts too",
    )
    add("--max_new_tokens", type=whole_number(1), metavar="N", help="most tokens to generate, without the prompt")
    add(
        "--min_gen_length",
        type=whole_number(0, unset=-1),
        metavar="N",
        help="shortest output in tokens; with --causal_lm the prompt counts too",
    )
    add("--no_repeat_ngram_size", type=whole_number(0), metavar="N", help="no N tokens in a row occur twice (0: off)")
    add("--repetition_penalty", type=real_number(above=0), metavar="X", help="penalty of repeated tokens (1.0: none)")
    add("--length_penalty", type=real_number(), metavar="X", help="beam scores are divided by length to this power")
    add(
        "--early_stopping",
        type=early_stopping,
        metavar="WHEN",
        help="when beam search stops: true (as soon as there are N finished beams), false (a better one is unlikely) "
        "or never (a better one is impossible)",
    )
    add("--decoder_start_token_id", type=whole_number(0), metavar="ID", help="first token given to the decoder")
    add("--eos_token_id", type=whole_number(0), metavar="ID", help="token that ends an output")
    add("--num_return_sequences", type=whole_number(1), metavar="N", help="outputs per input, joined with ####")


def _add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--do_sample", action="store_true", help="sample instead of taking the most likely token")
    add("--temperature", type=real_number(above=0), metavar="X", help="divides the logits; needs --do_sample")
    add("--top_k", type=whole_number(0), metavar="N", help="sample from the N likeliest tokens; needs --do_sample")
    add(
        "--top_p",
        type=real_number(above=0, up_to=1),
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
        help="one reference per line of INPUT; prints ROUGE, BLEU and exact match (pip install 'fastgen[metrics]'). "
        "Of several outputs per input the first is scored",
    )
    add("--score_path", type=Path, metavar="FILE", help="where to write these scores as JSON; needs --reference_path")
    add(
        "--output_sequence_scores",
        action="store_true",
        help="write SCORE<tab>TEXT: the beam's score (log-probability with length penalty) with six decimals, NA "
        "without beam search and for empty lines; several are joined with ####, like the texts",
    )


def underscored(argv: Sequence[str]) -> list[str]:
    """--max-gen-length=5 -> --max_gen_length=5, up to a bare "--"; other arguments stay as they are."""
    flags_end = argv.index("--") if "--" in argv else len(argv)
    names_and_values = [argument.partition("=") for argument in argv[:flags_end]]
    flags = [
        "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else name + equals + value
        for name, equals, value in names_and_values
    ]
    return flags + list(argv[flags_end:])


def check_number_of_outputs(num_return_sequences: int, num_beams: int, do_sample: bool) -> None:
    """Beam search cannot return more outputs than it has beams, and greedy search finds one; samples are free."""
    if num_return_sequences > num_beams and not (do_sample and num_beams == 1):
        raise InputError(
            f"--num_return_sequences {num_return_sequences} is more than --beam {num_beams} "
            f"(accepted: up to {num_beams}, or more with --do_sample and one beam)"
        )


def check_flags(args: argparse.Namespace) -> None:
    """Raise InputError for flags that contradict each other, before any file or model is touched."""
    for flag in ("temperature", "top_k", "top_p"):
        value = getattr(args, flag)
        if value is not None and not args.do_sample:
            raise InputError(f"--{flag} {value} has no effect without --do_sample")
    if args.num_return_sequences is not None and args.beam is not None:
        check_number_of_outputs(args.num_return_sequences, args.beam, args.do_sample)
    if args.max_gen_length is not None and args.max_new_tokens is not None:
        raise InputError(
            f"--max_gen_length {args.max_gen_length} and --max_new_tokens {args.max_new_tokens} contradict each other "
            "(accepted: one of them)"
        )
    shortest = args.min_gen_length or 0
    if args.max_gen_length is not None and shortest > args.max_gen_length:
        raise InputError(f"--min_gen_length {shortest} is more than --max_gen_length {args.max_gen_length}")
    # A causal LM's shortest length counts the prompt, so nothing can be said before the prompts are known.
    if args.max_new_tokens is not None and shortest > args.max_new_tokens and not args.causal_lm:
        raise InputError(f"--min_gen_length {shortest} is more than --max_new_tokens {args.max_new_tokens}")
    if args.fp16 and args.bf16:
        raise InputError("--fp16 and --bf16 contradict each other (accepted: one of them)")
    if args.fp16 and args.device == "cpu":
        raise InputError("--fp16 does not go with --device cpu (accepted on the CPU: --bf16, or neither)")
    if args.score_path is not None and args.reference_path is None:
        raise InputError(f"--score_path {args.score_path} needs --reference_path")
    if args.compare and args.without_fastgen_opt:
        raise InputError("--compare and --without_fastgen_opt contradict each other (accepted: one of them)")
    if args.causal_lm and args.decoder_start_token_id is not None:
        raise InputError(
            f"--decoder_start_token_id {args.decoder_start_token_id} does not go with --causal_lm, "
            "which has no encoder (accepted: one of them)"
        )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Flags from a command line; raises InputError for bad or contradictory ones."""
    args = build_parser().parse_args(underscored(argv))
    check_flags(args)
    return args
