"""Tasks: all that differs between text, chat, speech in and speech out, behind four methods.

    prepare    turns lines of INPUT into inputs of the model, in threads ahead of it
    collate    joins several inputs to a batch
    generate   runs the model on a batch
    finish     turns what was generated into outputs, in threads after the model

`load` makes them for the kind of run: `prepare` and `collate` are those of its input (`TextInput` or `AudioInput`),
`finish` is that of its output (`TextOutput` or `SoundFolder`). It imports the modules that import torch.

Tests: tests/batch/test_recordings.py, tests/batch/test_sounds.py
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastgen.batch.config import CHAT, TRANSCRIBE, BatchConfig
from fastgen.batch.errors import InputError, check_packages
from fastgen.batch.files import Line, is_output_stream, is_url
from fastgen.batch.planner import Batch, GeneratedBatch, Item, Planner, make_planner, with_batch_size
from fastgen.models import LOWEST
from fastgen.patching.target import upgrade_reason

if TYPE_CHECKING:
    import torch

    from fastgen.batch.audio import AudioInput, SoundFolder
    from fastgen.batch.model import Loaded
    from fastgen.batch.text import TextInput, TextOutput
    from fastgen.optimizer.transformers.kept_prefix import PrefixReuse

SOUNDS_AT_ONCE = 8  # in a batch: a model first joins most frames, so their number does not predict the memory


def task_for(args: BatchConfig) -> Task:
    """Returns the task of the settings. Raises InputError if it lacks something, or cannot write OUTPUT."""
    if why := upgrade_reason(LOWEST["transformers"], "transformers"):
        raise InputError(why)
    args.check_needs()
    check_packages(*([] if args.reads else ["soundfile", "soxr"]), needed_by=args.setting("task"))
    if args.speaks:
        _check_sound_files(args)
    return Task(args)


class Task:
    """The four methods of a run, see the module's docstring. loaded, input, output: filled by `load`."""

    loaded: Loaded
    input: TextInput | AudioInput
    output: TextOutput | SoundFolder

    def __init__(self, args: BatchConfig) -> None:
        self.args = args
        self._reuse: PrefixReuse | None = None

    @property
    def sounds(self) -> SoundFolder | None:
        """The files that OUTPUT names, if the model speaks."""
        return self.output if self.args.speaks else None  # type: ignore[return-value]

    def load(self, loaded: Loaded | None = None, has_weights: bool = True) -> None:
        """Raises InputError if MODEL does not support the settings.

        loaded: a model that is loaded already. has_weights: see `model.load`.
        """
        from fastgen.batch import model, settings
        from fastgen.optimizer.transformers.kept_prefix import PrefixReuse

        args = self.args
        self.loaded = loaded or model.load(args, "AutoTokenizer" if args.reads else "AutoProcessor", has_weights)
        model.prepare_tokenizer(args, self.loaded.tokenizer, "left" if args.reads == "decoder" else None)
        if args.reads == "decoder":  # a caller's model may be trained between two calls
            self._reuse = PrefixReuse(self.loaded.model, check_weights=loaded is not None)
        settings.set_generation(self.loaded, ("text_", "speech_") if args.speaks else ())
        at_once = None if args.reads and not args.speaks else SOUNDS_AT_ONCE
        self.loaded.args = with_batch_size(args, self.loaded, at_once)
        model.check_limits(self.loaded)
        self.output = _output_of(self.loaded)
        self.input = _input_of(self.loaded)
        self.args = self.loaded.args

    def notes(self) -> tuple[list[str], Planner]:
        """Returns messages for the user about how lines are batched, and the planner."""
        from fastgen.batch import settings

        reasons = settings.reasons_to_keep_file_order(self.loaded)
        note = f"batches keep the order of INPUT, so that outputs stay the same: {', '.join(reasons)}"
        in_order = bool(reasons) or self.args.window == 0
        # Batches of a decoder depend on the first tokens of inputs, whose keys and values are kept between batches.
        by_head = self.args.reads == "decoder"
        return [note] * bool(reasons), make_planner(self.args, self.loaded, in_order, by_head)

    def prepare(self, lines: list[Line]) -> list[Item]:
        """Returns an item for each line: with arrays for the model, an error, or neither if the line is empty."""
        return self.input.prepare(lines)

    def collate(self, items: list[Item]) -> dict[str, torch.Tensor]:
        """Returns the arrays of several items, padded to tensors [B, N, …]."""
        return self.input.collate(items)

    def generate(self, batch: Batch) -> GeneratedBatch:
        """Returns the model's outputs for a batch of at least one item."""
        from fastgen.optimizer.transformers.outputs import SEQUENCES_SCORES, only_outputs

        settings = self.loaded.settings | settings_of(self.loaded, batch.items[0])
        # Without scores in the run, the model's own generate may still read them.
        with only_outputs(SEQUENCES_SCORES) if settings.get("output_scores") else nullcontext():
            outputs = self._call_model(batch, settings)
        return _sounds(batch, outputs) if self.args.speaks else _sequences(batch, outputs, self.args)

    def finish(self, generated: GeneratedBatch) -> float:
        """Fills outputs or errors of items, and returns the amount of output: tokens, or seconds of sound."""
        return self.output.finish(generated)

    def _call_model(self, batch: Batch, settings: dict[str, Any]) -> Any:
        """Returns the result of the model's generate for a batch."""
        import torch

        from fastgen.optimizer.decoding.call import setting

        settings = dict(settings)
        if (seed := settings.pop("seed", None)) is not None:  # a request's own seed, in place of the batch's
            torch.manual_seed(seed[0])
        loaded, reuse = self.loaded, self._reuse
        inputs = {name: tensor.to(loaded.device) for name, tensor in batch.inputs.items()}
        if reuse is not None:
            reuse.head = batch.head
        with nullcontext() if reuse is None else setting(reuse), self._draws(batch.items, settings):
            return loaded.model.generate(**inputs, **settings)

    def _draws(self, items: list[Item], settings: dict[str, Any]) -> AbstractContextManager[None]:
        """Returns a context in which each line's samples depend on its seed alone; without seeds, torch draws."""
        from fastgen.batch.settings import draws_by_row
        from fastgen.optimizer.transformers.row_draws import RowDraws, drawing_by_row

        seeds = [item.seed for item in items if item.seed is not None]
        if (run_seed := self.args.seed) is not None:
            seeds = [item.seed or (run_seed, item.line.number) for item in items]
        if len(seeds) < len(items) or not draws_by_row(self.loaded, settings):
            return nullcontext()
        outputs, beams = (
            settings.get(name) or self.loaded.value(name) or 1 for name in ("num_return_sequences", "num_beams")
        )
        keys = [(*seed, sample) for seed in seeds for sample in range(1 if beams > 1 else outputs)]
        return drawing_by_row(self.loaded.model, RowDraws(keys, self.loaded.device), beams > 1)


def _check_sound_files(args: BatchConfig) -> None:
    """Raises InputError if OUTPUT cannot name sound files, or exists without its folder of sounds."""
    if args.output_format != "jsonl" or is_output_stream(args.output) or is_url(args.output):
        what = f"OUTPUT {args.output}" if args.output_format == "jsonl" else args.setting("output_format")
        raise InputError(f"{what} does not go with {args.setting('task')} (accepted: a file of JSON records)")
    output = os.path.realpath(args.output)
    is_there, is_begun, has_sounds = (os.path.lexists(output + end) for end in ("", ".part", ".audio"))
    if not args.overwrite and not is_begun and is_there != has_sounds:
        why = f"only one of it and {output}.audio exists"
        ways = f"another name, or {args.named('overwrite', True)}"
        raise InputError(f"OUTPUT {args.output}: {why} (accepted: {ways})")


def _input_of(loaded: Loaded) -> TextInput | AudioInput:
    """Returns the object that turns lines into arrays. Raises InputError if MODEL reads no sounds."""
    from fastgen.batch.audio import AudioInput
    from fastgen.batch.text import TextInput

    args, config = loaded.args, loaded.model.config
    if args.reads:
        return TextInput.of(loaded)
    if loaded.feature_extractor is None:
        raise InputError(f"MODEL {args.model}: has no feature extractor")
    # Whisper's generate uses the generated timestamps to find where the next window begins.
    has_timestamps = getattr(loaded.model.generation_config, "no_timestamps_token_id", None) is not None
    finds_windows = has_timestamps and loaded.settings.get("return_timestamps") is not False
    return AudioInput(loaded.feature_extractor, args, config.model_type == "whisper" and finds_windows)


def _output_of(loaded: Loaded) -> TextOutput | SoundFolder:
    """Returns the object that finishes outputs, and completes the settings. Raises InputError if MODEL lacks one."""
    from fastgen.batch.audio import SoundFolder
    from fastgen.batch.text import TextOutput

    if loaded.args.speaks:
        _set_voice(loaded)
        return SoundFolder(loaded.args, loaded.model.config.sampling_rate)
    if loaded.args.kind == TRANSCRIBE:
        _set_segments(loaded)
    if loaded.args.kind == CHAT:
        _set_template(loaded)
    if loaded.args.prefix is None and loaded.args.reads:
        loaded.args = replace(loaded.args, prefix=loaded.task_params.get("prefix") or "")
    return TextOutput.of(loaded)


def _set_template(loaded: Loaded) -> None:
    """Puts the run's date into the chat template. Raises InputError if there is none, or it refuses messages."""
    from fastgen.batch.model import set_date

    args, tokenizer = loaded.args, loaded.tokenizer
    chat = args.named("chat", True)
    if tokenizer.chat_template is None:
        raise InputError(f"{chat}: the tokenizer of MODEL {args.model} has no chat template")
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages.append({"role": "user", "content": "a"})
    try:
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program that may raise anything
        why = f"the chat template of MODEL {args.model} refuses it ({error})"
        raise InputError(f"{args.setting('system') or chat}: {why}") from error
    loaded.args = set_date(loaded)


def _set_segments(loaded: Loaded) -> None:
    """Asks Whisper for segments. Raises InputError for a model that needs a text in addition to the sound."""
    config = loaded.model.config
    if not config.is_encoder_decoder:
        needs = f"{config.model_type} needs a text in addition to the sound (accepted: Whisper, Moonshine, …)"
        raise InputError(f"MODEL {loaded.args.model}: {needs}")
    if config.model_type == "whisper" and loaded.value("return_timestamps"):
        loaded.settings["return_segments"] = True


def _set_voice(loaded: Loaded) -> None:
    """Sets the speaker of Seamless M4T. Raises InputError for a language or a speaker that it does not have."""
    from fastgen.batch.settings import nearest

    args, config = loaded.args, loaded.model.config
    spoken = getattr(loaded.model.generation_config, "vocoder_lang_code_to_id", None) or {}
    if args.tgt_lang is None or loaded.settings["tgt_lang"] not in spoken:
        needs = f"{args.setting('task')} needs {args.named('tgt_lang')}"
        what = f"{args.setting('tgt_lang')} is not spoken by MODEL" if args.tgt_lang else needs
        raise InputError(f"{what} (accepted: {nearest(args.tgt_lang or 'eng', spoken)})")
    if (number := args.speaker_id) is not None:
        if number >= config.vocoder_num_spkrs:
            accepted = f"accepted: 0 to {config.vocoder_num_spkrs - 1}"
            raise InputError(f"{args.setting('speaker_id')} is not known to MODEL ({accepted})")
        loaded.settings["spkr_id" if config.model_type == "seamless_m4t" else "speaker_id"] = number


def settings_of(loaded: Loaded, item: Item) -> dict[str, Any]:
    """Returns the settings of generate for an item's group, in addition to the run's."""
    if not item.group:
        return {}
    if not loaded.args.reads:  # items in a group are longer than Whisper's window
        return {"return_timestamps": True, "return_segments": True}
    from transformers import StopStringCriteria

    settings = dict(item.group)
    if "max_new_tokens" in settings:
        settings["max_length"] = None
    if "stop_strings" in settings:
        settings["tokenizer"] = loaded.tokenizer
        try:  # the library caches what it computes
            StopStringCriteria(settings["tokenizer"], settings["stop_strings"])
        except Exception:  # an unsupported vocabulary: texts are cut afterwards
            del settings["stop_strings"]
    return settings


def _sequences(batch: Batch, outputs: Any, args: BatchConfig) -> GeneratedBatch:
    """Returns generated tokens with scores and segments, if there are any."""
    generated = outputs if isinstance(outputs, dict) else {"sequences": outputs}
    scores, segments = generated.get("sequences_scores"), generated.get("segments")  # [B * R]
    sequences = generated["sequences"].long()  # floats if there are no segments
    if args.reads == "decoder":
        sequences = sequences[:, batch.inputs["input_ids"].shape[1] :]  # [B * R, N + T] -> [B * R, T]
    if len(sequences) % len(batch.items):
        raise RuntimeError(f"generate returned {len(sequences)} sequences for {len(batch.items)} inputs")
    if scores is not None:
        scores = scores.tolist()
    if segments is not None:
        segments = [list(map(_segment, output)) for output in segments]
    return GeneratedBatch(batch.items, sequences.cpu().numpy(), scores, segments=segments)


def _segment(segment: dict[str, Any]) -> tuple[float, float, list[int]]:
    """Returns start, end and tokens of a segment of Whisper's: times are multiples of 10 ms, but for rounding."""
    start, end = (round(float(segment[name]), 2) for name in ("start", "end"))
    return start, end, segment["tokens"].tolist()


def _sounds(batch: Batch, outputs: Any) -> GeneratedBatch:
    """Returns the waveforms of Seamless M4T, cut to their lengths."""
    waveforms, lengths = outputs[:2]
    rows = waveforms.reshape(len(batch.items), -1).float().cpu().numpy()
    sounds = [row[:length] for row, length in zip(rows, lengths.reshape(-1).tolist(), strict=True)]
    return GeneratedBatch(batch.items, sounds=sounds)
