"""What the flags of a run mean for its stages: formats, batch sizes, and what workers do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fastgen.cli.transformers.compare import SideBySide
from fastgen.cli.transformers.files.lines import LINES_AT_ONCE, SOUNDS_AT_ONCE
from fastgen.cli.transformers.files.sound_folder import SoundFolder
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.model.default_batch import rows_per_input
from fastgen.cli.transformers.model.limits import embedded_tokens, hears_windows, lengths_of_inputs
from fastgen.cli.transformers.model.loading import LoadedModel
from fastgen.cli.transformers.model.settings import effective, reasons_to_keep_file_order, token_ids
from fastgen.cli.transformers.model.speaking import speaking
from fastgen.cli.transformers.resume.run_state import random_state
from fastgen.cli.transformers.stages.audio import collate_audio, prepare_audio
from fastgen.cli.transformers.stages.batches import Limits, Planner, pad_text
from fastgen.cli.transformers.stages.generation import Model, WithinMemory
from fastgen.cli.transformers.stages.pipeline import Stages
from fastgen.cli.transformers.stages.postprocess import finish, finish_sounds
from fastgen.cli.transformers.stages.preprocess import TextLimits, prepare_text

BATCHES_PER_WINDOW = 16
LINES_PER_WINDOW = 1 << 12  # at most, where batches are cut by tokens only


def make_stages(
    args: RunConfig,
    loaded: LoadedModel,
    settings: dict[str, Any],
    task: dict[str, Any],
    model: Model | SideBySide,
    generate: WithinMemory,
    sounds: SoundFolder | None,
    say: Callable[[str], None],
) -> Stages:
    """The stages of a run; sounds: where they go if MODEL speaks. `say` gets notes for the user."""
    prefix = args.prefix if args.prefix is not None else task.get("prefix") or ""
    tokenizer = loaded.tokenizer
    truncate_to, limit = lengths_of_inputs(args, loaded, settings)
    if args.truncation and truncate_to is None and not args.quiet:
        say("--truncation changes nothing: MODEL takes inputs of any length (--max_tokenizer_length N sets one)")
    args = replace(args, prefix=prefix)
    text_limits = TextLimits(truncate_to, limit, embedded_tokens(loaded.model))
    if loaded.feature_extractor is None:
        options = speaking(loaded.model).tokenizer if loaded.speaks else {}
        prepare = prepare_text(tokenizer, args, text_limits, **options)
        collate = pad_text(tokenizer.pad_token_id, tokenizer.padding_side == "left")
    else:
        prepare = prepare_audio(loaded.feature_extractor, args, hears_windows(loaded, settings))
        collate = partial(collate_audio, loaded.feature_extractor)
    reasons = reasons_to_keep_file_order(args, settings, loaded)
    if reasons and not args.quiet:
        say(f"batches keep the order of INPUT, so that outputs stay the same: {', '.join(reasons)}")
    in_order = bool(reasons) or args.window == 0
    limits = _limits(args, loaded, settings)
    window, window_cells = _window(args, limits, loaded)
    samples = effective("do_sample", settings, loaded) or isinstance(effective("temperature", settings, loaded), list)
    if sounds is None:
        make_records = finish(
            tokenizer,
            args,
            [] if loaded.is_whisper else token_ids(effective("eos_token_id", settings, loaded)),
            effective("pad_token_id", settings, loaded),
            start_tokens=0 if loaded.causal_lm or loaded.is_whisper else 1,
        )
    else:
        make_records = finish_sounds(sounds, args)
    return Stages(
        prepare=prepare,
        planner=Planner(limits, 0 if in_order else window, collate, window_cells),
        generate=generate,
        finish=make_records,
        workers=(args.preprocess_workers, args.postprocess_workers),
        line_bytes=text_limits.line_bytes(args),
        lines_at_once=SOUNDS_AT_ONCE if args.hears else LINES_AT_ONCE,
        in_order=in_order,
        random=partial(random_state, model.device) if samples or loaded.speaks else None,
    )


def _limits(args: RunConfig, loaded: LoadedModel, settings: dict[str, Any]) -> Limits:
    """--batch_tokens counts every row of the batch that generate makes of an input."""
    cells = None if args.batch_tokens is None else max(1, args.batch_tokens // rows_per_input(settings, loaded))
    return Limits(args.bs, cells)


def _window(args: RunConfig, batch: Limits, loaded: LoadedModel) -> tuple[int, int | None]:
    """How many lines are sorted, and their tokens: what waits to be sorted is not written yet.

    Recordings of any length: as many frames as that many recordings of the length that Whisper hears at once have.
    """
    at_once = getattr(loaded.feature_extractor, "nb_max_frames", None)
    if args.window is not None:
        return args.window, None if at_once is None else max(1, args.window) * at_once
    rows = LINES_PER_WINDOW if batch.rows is None else BATCHES_PER_WINDOW * batch.rows
    if batch.cells is not None:
        return rows, BATCHES_PER_WINDOW * batch.cells
    return rows, None if at_once is None else rows * at_once
