"""The files of a run, checked before anything slow happens."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.cli.errors import InputError
from fastgen.cli.transformers import metrics
from fastgen.cli.transformers.files.lines import Survey, is_stream, raw_lines, read_references, survey
from fastgen.cli.transformers.files.records import LONGEST_RECORD, RecordError, decode, field, parse
from fastgen.cli.transformers.files.sound_folder import check_sound_folder
from fastgen.cli.transformers.files.whole_file import beside
from fastgen.cli.transformers.flags.argument_types import STREAM
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.resume.part_file import check_part, check_writable
from fastgen.cli.transformers.stages.items import Line


@dataclass(frozen=True)
class Files:
    """survey: of INPUT, None where it can be read only once. references: of the lines that are generated for."""

    survey: Survey | None
    references: list[str] | None

    def total(self, n_obs: int | None) -> int | None:
        """How many lines are to be generated for, None where nobody knows."""
        if self.survey is None:
            return n_obs
        return self.survey.lines if n_obs is None else min(n_obs, self.survey.lines)


def check_files(args: RunConfig) -> Files:
    """Raises InputError where a file cannot be used."""
    surveyed = None if is_stream(args.input) else survey(args.input)
    if surveyed is None and args.resume:
        raise InputError(f"--resume needs INPUT to be a file, and {args.input} can be read only once")
    if surveyed is not None and args.reads_jsonl:
        _check_first_record(args)
    references = _references(args, surveyed)
    sources = {"INPUT": args.input, "--reference_path": args.reference_path}
    if args.output != STREAM:
        check_writable("OUTPUT", args.output, sources)
        check_part(args.output, args.resume, args.overwrite)
        if args.speaks:
            check_sound_folder(args.output, args.overwrite)
    if args.score_path is not None:
        own = {"OUTPUT": args.output, "OUTPUT.part": beside(args.output, ".part")}
        check_writable("--score_path", args.score_path, sources | own)
        # A run that --resume finds complete leaves the scores as they are, too.
        if args.score_path.exists() and not args.overwrite and not (args.resume and args.output.exists()):
            raise InputError(f"--score_path {args.score_path}: is there already (accepted: another, or --overwrite)")
    return Files(surveyed, None if references is None else references[: args.n_obs])


def _references(args: RunConfig, surveyed: Survey | None) -> list[str] | None:
    """Those of --reference_path, or else of the records of INPUT; None where nothing is to be scored."""
    if args.reference_path is None and args.reference_field is None:
        return None
    metrics.check_installed(args.hears)
    if args.reference_path is not None:
        references = read_references("--reference_path", args.reference_path, args.reference_field)
        if surveyed is not None:
            check_same_length(args, len(references), surveyed.lines)
        return references
    if surveyed is None:
        raise InputError(
            f"--reference_field {args.reference_field} needs INPUT to be a file, or --reference_path, "
            f"and {args.input} can be read only once"
        )
    return read_references("INPUT", args.input, args.reference_field)


def _check_first_record(args: RunConfig) -> None:
    """One bad record is that line's failure; a file that begins with one is not in this format, or has other fields."""
    raw = next(raw_lines("INPUT", args.input, LONGEST_RECORD), b"")
    if len(raw) > LONGEST_RECORD:
        return  # it is a failed input
    try:
        text = decode(Line(1, raw))
        if text.strip():
            record = parse(text)
            for name in (args.text_field, *([] if args.id_field is None else [args.id_field])):
                field(record, name)
    except RecordError as error:
        raise InputError(
            f"INPUT {args.input}: line 1 {error} (--input_format jsonl, --text_field, --id_field)"
        ) from error


def check_same_length(args: RunConfig, references: int, lines: int) -> None:
    """Raises InputError where INPUT has more lines than there are references, or fewer."""
    if references != lines:
        raise InputError(
            f"--reference_path {args.reference_path}: has {references} lines, but INPUT {args.input} has {lines}"
        )
