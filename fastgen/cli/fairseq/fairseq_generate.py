"""fastgen-generate-for-fairseq: fairseq-generate under fastgen, with an asynchronous pipeline.

It takes every flag of fairseq-generate and prints the same lines in the same order.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from fastgen.cli.fairseq.command import add_no_fastgen, run_command, say, without_fastgen
from fastgen.cli.fairseq.imports import import_fairseq, without_collections
from fastgen.cli.pipeline.ordered_pool import WorkerError

if TYPE_CHECKING:
    from omegaconf import DictConfig

PROG = "fastgen-generate-for-fairseq"
LARGEST_POOL = 256
# Flags of FastSeq for what happens here in any case.
WITHOUT_EFFECT = {
    "decode_hypothesis": "sources, targets and hypotheses (D-) are always detokenised",
    "use_el_attn": "keys and values that beams share are always kept once per input",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(PROG, run, argv)


def run() -> None:
    """Parse sys.argv, look for mistakes in it, and generate."""
    with without_collections():
        import_fairseq()
        args = parse_arguments()
        own = {name: vars(args).pop(name) for name in ("no_fastgen", "postprocess_workers")}
        for name, why in WITHOUT_EFFECT.items():
            if vars(args).pop(name):
                say(f"--{name.replace('_', '-')} changes nothing: {why}")
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf

        from fastgen.cli.fairseq import checks, mistakes

        checks.check(args)
        cfg = convert_namespace_to_omegaconf(args)
    with mistakes.named(cfg):
        generate(cfg, **own)


def generate(cfg: DictConfig, no_fastgen: bool, postprocess_workers: int | None) -> None:
    """With the pipeline where it can do what is asked for."""
    from fastgen.cli.fairseq import checks, pipeline

    if no_fastgen:
        with without_fastgen():
            upstream_main(cfg)
        return
    workers = checks.default_workers() if postprocess_workers is None else postprocess_workers
    if reasons := checks.unsupported_run_reasons(cfg, workers):
        say(f"without the pipeline: {'; '.join(reasons)}")
        upstream_main(cfg)
        return
    try:
        pipeline.generate(cfg, workers)
    except WorkerError as error:
        raise OSError(f"post-processing: {error}") from error


def parse_arguments() -> argparse.Namespace:
    """sys.argv as fairseq-generate reads it, with fastgen's own flags beside fairseq's."""
    from fairseq import options

    parser = options.get_generation_parser()
    # fairseq-generate has this flag besides those of its parser, for tasks that ask for the arguments of a model.
    parser.add_argument("--arch", "-a", metavar="ARCH", default="wav2vec2", help="model architecture, for some tasks")
    group = add_no_fastgen(parser)
    group.add_argument(
        "--postprocess-workers",
        "--postprocess_workers",
        "--post-process-workers",
        type=number_of_workers,
        metavar="N",
        help="processes that turn the model's output into text and score it while the model runs "
        "(default: enough; 0: in between, as fairseq-generate does)",
    )
    for name, why in WITHOUT_EFFECT.items():
        flags = {f"--{name.replace('_', '-')}", f"--{name}"}
        group.add_argument(*sorted(flags), action="store_true", help=f"accepted for FastSeq's command lines: {why}")
    return options.parse_args_and_arch(parser)


def number_of_workers(text: str) -> int:
    """A whole number that a machine can take."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (accepted: 0 to {LARGEST_POOL})") from None
    if not 0 <= value <= LARGEST_POOL:
        raise argparse.ArgumentTypeError(f"{text} is out of range (accepted: 0 to {LARGEST_POOL})")
    return value


def upstream_main(cfg: DictConfig) -> None:
    """fairseq-generate's own loop."""
    from fairseq_cli import generate

    generate.main(cfg)


if __name__ == "__main__":
    sys.exit(main())
