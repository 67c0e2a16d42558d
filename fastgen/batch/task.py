"""Tasks: all differences between text, chat, speech in and speech out.

    validate   rejects what the task cannot write, before torch is imported
    load       loads model, tokenizer and settings of generate
    prepare    turns lines of INPUT into inputs of the model, in threads ahead of it
    collate    joins several inputs to a batch
    generate   runs the model on a batch
    finish     turns what was generated into outputs, in threads after the model

`load` imports the modules that import torch.

Tests: tests/batch/test_recordings.py, tests/batch/test_sounds.py
"""

from __future__ import annotations

import inspect
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fastgen.batch.config import CAUSAL, CHAT, INTERPRET, SPEAK, TEXT, TRANSCRIBE, BatchConfig
from fastgen.batch.errors import InputError, check_packages
from fastgen.batch.files import LINES_AT_ONCE, Line, is_output_stream, is_url
from fastgen.batch.planner import Batch, GeneratedBatch, Item, Planner, make_planner, with_batch_size
from fastgen.models import LOWEST
from fastgen.patching.target import upgrade_reason

if TYPE_CHECKING:
    import torch

    from fastgen.batch.audio import AudioInput, SoundFolder
    from fastgen.batch.model import Loaded
    from fastgen.batch.text import TextInput, TextOutput
    from fastgen.optimizer.transformers.kept_prefix import PrefixReuse

SOUNDS_AT_ONCE = 8  # in a batch: the number of frames, most of which a model joins first, does not predict the memory


def task_for(args: BatchConfig) -> Task:
    """Returns the task of the settings. Raises InputError if it lacks something, or cannot write OUTPUT."""
    if why := upgrade_reason(LOWEST["transformers"], "transformers"):
        raise InputError(why)
    task = KINDS[args.kind](args)
    task.validate()
    return task


class Task:
    """A kind of run; see the module's docstring.

    reads: the part of the model that reads tokens of inputs; None if inputs are sounds. speaks: whether outputs are
    sounds, in separate files.
    """

    reads: ClassVar[str | None] = "encoder"
    speaks: ClassVar[bool] = False

    loaded: Loaded
    input: TextInput | AudioInput
    output: TextOutput | SoundFolder
    sounds: SoundFolder | None = None  # the files that OUTPUT names

    def __init__(self, args: BatchConfig) -> None:
        self.args = args
        self.unit = "seconds of sound" if self.speaks else "tokens"
        # Recordings may be hours long, and inputs that wait for the model are in memory.
        self.lines_at_once = LINES_AT_ONCE if self.reads else 1
        # Batches of a decoder depend on the first tokens of inputs, whose keys and values are kept between batches.
        self.plans_by_head = self.reads == "decoder"
        self.counts_words = not self.reads and not self.speaks
        self._reuse: PrefixReuse | None = None

    def validate(self) -> None:
        """Raises InputError if the task lacks a package, or cannot write OUTPUT."""
        check_packages(*([] if self.reads else ["soundfile", "soxr"]), needed_by=self.args.setting("task"))

    def load(self, loaded: Loaded | None = None, has_weights: bool = True) -> None:
        """Fills `loaded`, `input` and `output`. Raises InputError if MODEL does not support the settings.

        loaded: a model that is loaded already. has_weights: see `model.load`.
        """
        from fastgen.batch import model, settings
        from fastgen.optimizer.transformers.kept_prefix import PrefixReuse

        processor = "AutoTokenizer" if self.reads else "AutoProcessor"
        self.loaded = loaded or model.load(self.args, processor, has_weights)
        self.loaded.reads = self.reads
        model.prepare_tokenizer(self.args, self.loaded.tokenizer, "left" if self.reads == "decoder" else None)
        if self.plans_by_head:  # a caller's model may be trained between two calls
            self._reuse = PrefixReuse(self.loaded.model, check_weights=loaded is not None)
        settings.set_generation(self.loaded, ("text_", "speech_") if self.speaks else ())
        at_once = None if self.reads and not self.speaks else SOUNDS_AT_ONCE
        self.args = self.loaded.args = with_batch_size(self.args, self.loaded, at_once)
        model.check_limits(self.loaded)
        self.specialize()
        self.input = self.reader()

    def specialize(self) -> None:
        """Does the task's own part of `load`, and fills `output`."""
        raise NotImplementedError

    def reader(self) -> TextInput | AudioInput:
        """Returns the object that turns lines into arrays."""
        from fastgen.batch.text import ChatInput, TextInput

        return (ChatInput if self.args.chat else TextInput).of(self.loaded)

    def notes(self) -> tuple[list[str], Planner]:
        """Returns messages for the user about how lines are batched, and the planner."""
        reasons = self.reasons_to_keep_file_order()
        note = f"batches keep the order of INPUT, so that outputs stay the same: {', '.join(reasons)}"
        in_order = bool(reasons) or self.args.window == 0
        return [note] * bool(reasons), make_planner(self.args, self.loaded, in_order, self.plans_by_head)

    def reasons_to_keep_file_order(self) -> list[str]:
        """Returns why an output depends on the rest of its batch in the unpatched library, as phrases for a note."""
        from fastgen.batch.settings import reasons_to_keep_file_order

        what = "the end of a sound depends on how much it is padded"
        why = what if self.speaks else "outputs of MODEL depend on padding"
        return reasons_to_keep_file_order(self.loaded) + [why] * self.depends_on_padding()

    def depends_on_padding(self) -> bool:
        """Whether outputs depend on padding, by a rule for the architecture, without a measurement.

        Masks keep padding out of attention, but not out of positions that are counted from the first column (a causal
        LM without position_ids, an encoder padded on the left), recurrent states, and convolutions over sounds of
        several lengths.
        """
        return self.loaded.tokenizer.padding_side == "left"

    def prepare(self, lines: list[Line]) -> list[Item]:
        """Returns an item for each line: with arrays for the model, an error, or neither if the line is empty."""
        return self.input.prepare(lines)

    def collate(self, items: list[Item]) -> dict[str, torch.Tensor]:
        """Returns the arrays of several items, padded to tensors [B, N, …]."""
        return self.input.collate(items)

    def generate(self, batch: Batch) -> GeneratedBatch:
        """Returns the model's outputs for a batch of at least one item."""
        from fastgen.optimizer.transformers.outputs import SEQUENCES_SCORES, only_outputs

        settings = self.loaded.settings | self.settings_of(batch.items[0])
        # Without scores in the run, the model's own generate may still read them.
        with only_outputs(SEQUENCES_SCORES) if settings.get("output_scores") else nullcontext():
            outputs = self.call_model(batch, settings)
        generated = outputs if isinstance(outputs, dict) else {"sequences": outputs}
        scores, segments = generated.get("sequences_scores"), generated.get("segments")  # [B * R]
        sequences = generated["sequences"].long()  # floats if there are no segments
        if self.reads == "decoder":
            sequences = sequences[:, batch.inputs["input_ids"].shape[1] :]  # [B * R, N + T] -> [B * R, T]
        if len(sequences) % len(batch.items):
            raise RuntimeError(f"generate returned {len(sequences)} sequences for {len(batch.items)} inputs")
        if scores is not None:
            scores = scores.tolist()
        if segments is not None:
            segments = [list(map(_segment, output)) for output in segments]
        return GeneratedBatch(batch.items, sequences.cpu().numpy(), scores, segments=segments)

    def call_model(self, batch: Batch, settings: dict[str, Any]) -> Any:
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

    def settings_of(self, item: Item) -> dict[str, Any]:
        """Returns the settings of generate for an item's group, in addition to the run's."""
        return {}

    def finish(self, generated: GeneratedBatch) -> float:
        """Fills outputs or errors of items, and returns the amount of output, in `unit`."""
        return self.output.finish(generated)


class TextTask(Task):
    """Text to text with an encoder-decoder."""

    def specialize(self) -> None:
        from fastgen.batch.text import TextOutput

        loaded, args = self.loaded, self.args
        if args.prefix is None:
            self.args = loaded.args = replace(args, prefix=loaded.task_params.get("prefix") or "")
        self.output = TextOutput.of(loaded)


class CausalTask(TextTask):
    """Text that a decoder continues from the last column, so padding is on the left."""

    reads = "decoder"

    def depends_on_padding(self) -> bool:
        model = self.loaded.model
        left = self.loaded.tokenizer.padding_side == "left"
        has_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        return not (left and has_positions) or getattr(model, "_is_stateful", False)


class ChatTask(CausalTask):
    """Conversations through the tokenizer's chat template; INPUT may be requests of OpenAI's batch format."""

    def specialize(self) -> None:
        from fastgen.batch.model import set_date

        args, tokenizer = self.args, self.loaded.tokenizer
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
        self.args = self.loaded.args = set_date(self.loaded)
        super().specialize()

    def settings_of(self, item: Item) -> dict[str, Any]:
        from transformers import StopStringCriteria

        settings = dict(item.group or ())
        if "max_new_tokens" in settings:
            settings["max_length"] = None
        if "stop_strings" in settings:
            settings["tokenizer"] = self.loaded.tokenizer
            try:  # the library caches what it computes
                StopStringCriteria(settings["tokenizer"], settings["stop_strings"])
            except Exception:  # an unsupported vocabulary: texts are cut afterwards
                del settings["stop_strings"]
        return settings


class TranscribeTask(Task):
    """Audio files to text. Whisper accepts recordings of any length, other models those that fit into their window."""

    reads = None

    def depends_on_padding(self) -> bool:
        return getattr(self.loaded.feature_extractor, "nb_max_frames", None) is None  # Whisper's inputs have one length

    def reader(self) -> TextInput | AudioInput:
        from fastgen.batch.audio import AudioInput

        loaded, config = self.loaded, self.loaded.model.config
        if loaded.feature_extractor is None:
            raise InputError(f"MODEL {self.args.model}: has no feature extractor")
        # Whisper's generate uses the generated timestamps to find where the next window begins.
        has_timestamps = getattr(loaded.model.generation_config, "no_timestamps_token_id", None) is not None
        finds_windows = has_timestamps and loaded.settings.get("return_timestamps") is not False
        return AudioInput(loaded.feature_extractor, self.args, config.model_type == "whisper" and finds_windows)

    def specialize(self) -> None:
        from fastgen.batch.text import TextOutput

        loaded, config = self.loaded, self.loaded.model.config
        if not config.is_encoder_decoder:
            needs = f"{config.model_type} needs a text in addition to the sound (accepted: Whisper, Moonshine, …)"
            raise InputError(f"MODEL {self.args.model}: {needs}")
        if config.model_type == "whisper" and loaded.value("return_timestamps"):
            loaded.settings["return_segments"] = True
        self.output = TextOutput.of(loaded)

    def settings_of(self, item: Item) -> dict[str, Any]:  # items in a group are longer than Whisper's window
        return {"return_timestamps": True, "return_segments": True} if item.group else {}


class SpeakTask(Task):
    """Text to sounds, with Seamless M4T."""

    speaks = True

    def validate(self) -> None:
        super().validate()
        args = self.args
        if args.output_format != "jsonl" or is_output_stream(args.output) or is_url(args.output):
            what = f"OUTPUT {args.output}" if args.output_format == "jsonl" else args.setting("output_format")
            raise InputError(f"{what} does not go with {args.setting('task')} (accepted: a file of JSON records)")
        output = os.path.realpath(args.output)
        is_there, is_begun, has_sounds = (os.path.lexists(output + end) for end in ("", ".part", ".audio"))
        if not args.overwrite and not is_begun and is_there != has_sounds:
            why = f"only one of it and {output}.audio exists"
            ways = f"another name, or {args.named('overwrite', True)}"
            raise InputError(f"OUTPUT {args.output}: {why} (accepted: {ways})")

    def depends_on_padding(self) -> bool:
        return True

    def specialize(self) -> None:
        from fastgen.batch.audio import SoundFolder
        from fastgen.batch.settings import nearest

        args = self.args
        own = self.loaded.model.generation_config
        config = self.loaded.model.config
        spoken = getattr(own, "vocoder_lang_code_to_id", None) or {}
        if args.tgt_lang is None or self.loaded.settings["tgt_lang"] not in spoken:
            needs = f"{args.setting('task')} needs {args.named('tgt_lang')}"
            what = f"{args.setting('tgt_lang')} is not spoken by MODEL" if args.tgt_lang else needs
            raise InputError(f"{what} (accepted: {nearest(args.tgt_lang or 'eng', spoken)})")
        if (number := args.speaker_id) is not None:
            if number >= config.vocoder_num_spkrs:
                accepted = f"accepted: 0 to {config.vocoder_num_spkrs - 1}"
                raise InputError(f"{args.setting('speaker_id')} is not known to MODEL ({accepted})")
            self.loaded.settings["spkr_id" if config.model_type == "seamless_m4t" else "speaker_id"] = number
        self.output = self.sounds = SoundFolder(args, config.sampling_rate)

    def generate(self, batch: Batch) -> GeneratedBatch:
        waveforms, lengths = self.call_model(batch, self.loaded.settings)[:2]
        rows = waveforms.reshape(len(batch.items), -1).float().cpu().numpy()
        sounds = [row[:length] for row, length in zip(rows, lengths.reshape(-1).tolist(), strict=True)]
        return GeneratedBatch(batch.items, sounds=sounds)


class SpeechToSpeechTask(SpeakTask):
    """Audio files to sounds."""

    reads = None
    reader = TranscribeTask.reader


KINDS: dict[str, type[Task]] = {
    TEXT: TextTask,
    CAUSAL: CausalTask,
    CHAT: ChatTask,
    TRANSCRIBE: TranscribeTask,
    SPEAK: SpeakTask,
    INTERPRET: SpeechToSpeechTask,
}


def _segment(segment: dict[str, Any]) -> tuple[float, float, list[int]]:
    """Returns start, end and tokens of a segment of Whisper's: times are multiples of 10 ms, but for rounding."""
    start, end = (round(float(segment[name]), 2) for name in ("start", "end"))
    return start, end, segment["tokens"].tolist()
