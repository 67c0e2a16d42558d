"""fastgen-generate-for-transformers: generate text for every line of a file with a Hugging Face model.

The counterpart of fastseq-generate-for-transformers, with its flags. Whatever can be wrong with the flags and the
files is found before torch and transformers are imported, so these modules are imported where they are first needed.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import fastgen
from fastgen.cli.arguments import PROG, parse_arguments
from fastgen.cli.errors import InputError
from fastgen.cli.text_io import check_writable, read_lines, written_whole

if TYPE_CHECKING:
    from fastgen.cli.compare import SideBySide
    from fastgen.cli.generation import Output, TextGenerator
    from fastgen.cli.inputs import Batch
    from fastgen.cli.loading import LoadedModel


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status; mistakes of the user are one line on stderr and status 2."""
    try:
        run(parse_arguments(sys.argv[1:] if argv is None else argv))
    except InputError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace) -> None:
    """Read, generate, write and score."""
    if missing := [name for name in ("transformers", "tqdm") if find_spec(name) is None]:
        raise InputError(f"needs the package {' and '.join(missing)}: pip install 'fastgen[transformers]'")
    lines, references = read_files(args)
    with fastgen.disabled() if args.without_fastgen_opt else nullcontext():
        outputs = generate_file(args, lines)
    if references is not None:
        save_scores(args, outputs, references)


def read_files(args: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """Input lines and their references, the first --n_obs of both; raises InputError where a file is unusable."""
    lines = read_lines("INPUT", args.input)
    references = None
    if args.reference_path is not None:
        references = read_lines("--reference_path", args.reference_path)
        if len(references) != len(lines):
            raise InputError(
                f"--reference_path {args.reference_path}: has {len(references)} lines, but INPUT {args.input} "
                f"has {len(lines)}"
            )
    sources = {"INPUT": args.input, "--reference_path": args.reference_path}
    check_writable("OUTPUT", args.output, sources)
    if args.score_path is not None:
        check_writable("--score_path", args.score_path, {**sources, "OUTPUT": args.output})
    if references is not None:
        from fastgen.cli import metrics

        metrics.check_installed()
        references = references[: args.n_obs]
    return lines[: args.n_obs], references


def generate_file(args: argparse.Namespace, lines: list[str]) -> list["Output"]:
    """Write one line to OUTPUT per line of the input; the outputs are returned in the same order."""
    import torch
    from tqdm import tqdm

    from fastgen.cli.inputs import make_batches, tokenize_lines
    from fastgen.cli.limits import check_lengths, check_settings
    from fastgen.cli.loading import choose_device, load_model
    from fastgen.cli.settings import generate_arguments, task_settings

    device = choose_device(args)
    loaded = load_model(args, device)
    task = task_settings(args, loaded.model.config)
    settings = generate_arguments(args, loaded.model, task, loaded.tokenizer.pad_token_id)
    check_settings(args, loaded, settings)
    prefix = args.prefix if args.prefix is not None else task.get("prefix") or ""
    token_ids = tokenize_lines(lines, loaded.tokenizer, prefix, args.max_tokenizer_length)
    check_lengths(args.input, token_ids, args, loaded, settings)

    generate = build_generator(args, loaded, settings)
    batches = make_batches(token_ids, args.bs, loaded.tokenizer, device)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    outputs = []
    start = time.perf_counter()
    with written_whole(args.output) as file, tqdm(total=len(lines), unit="line", file=sys.stderr) as bar:
        for output in in_file_order(((batch, generate(batch)) for batch in batches), len(lines)):
            file.write(output.line(args.output_sequence_scores) + "\n")
            outputs.append(output)
            bar.update()
    seconds = time.perf_counter() - start
    if args.compare:
        print(generate.report())
    inputs = sum(map(bool, token_ids))
    print(f"{len(lines)} lines in {seconds:.2f} s, {inputs / seconds:.2f} inputs/s", file=sys.stderr)
    return outputs


def build_generator(args: argparse.Namespace, loaded: "LoadedModel", settings: dict) -> "TextGenerator | SideBySide":
    """What turns a batch into outputs: one generate call, or with --compare two."""
    from fastgen.cli.compare import SideBySide
    from fastgen.cli.generation import TextGenerator

    def text_generator() -> TextGenerator:
        clean_up = True if args.clean_up_tokenization_spaces else None
        return TextGenerator(loaded, settings, not args.include_special_tokens, clean_up)

    return SideBySide(text_generator(), text_generator()) if args.compare else text_generator()


def in_file_order(generated: Iterable[tuple["Batch", list["Output"]]], number_of_lines: int) -> Iterator["Output"]:
    """One output per line of the input: those of the batches in their places, empty ones for lines between them."""
    from fastgen.cli.generation import Output

    next_line = 0
    for batch, outputs in generated:
        for index, output in zip(batch.line_indices, outputs, strict=True):
            yield from (Output() for _ in range(next_line, index))
            yield output
            next_line = index + 1
    yield from (Output() for _ in range(next_line, number_of_lines))


def save_scores(args: argparse.Namespace, outputs: list["Output"], references: list[str]) -> None:
    """Print the scores of each line's first output, and write them where --score_path says."""
    from fastgen.cli import metrics

    scores = metrics.score([output.texts[0] if output.texts else "" for output in outputs], references)
    print(metrics.report(scores))
    if args.score_path is not None:
        with written_whole(Path(args.score_path)) as file:
            json.dump(scores, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
