"""What differs between text, chat, speech in and speech out: a Task with six methods, and no branch elsewhere.

    validate   flags that do not go with the task, before torch is imported
    load       model, tokenizer and settings of generate
    prepare    lines of INPUT to what the model takes, in workers ahead of the model
    collate    several of these to one batch
    generate   one batch through the model
    finish     what was generated to outputs, in workers behind the model

Modules that import torch are imported by `load`.

Tests: tests/cli/transformers/test_cli_speech.py, tests/cli/transformers/test_cli_long_recordings.py
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.args import AUDIO_OUT, TASKS, RunConfig
from fastgen.cli.transformers.batching import Batch, GeneratedBatch, Item, Planner, make_planner, with_batch_size
from fastgen.cli.transformers.files import LINES_AT_ONCE, Line, is_stream, is_url

if TYPE_CHECKING:
    import torch

    from fastgen.cli.transformers.audio import AudioInput, SoundFolder
    from fastgen.cli.transformers.model import Loaded
    from fastgen.cli.transformers.text import TextInput, TextOutput
    from fastgen.optimizer.transformers.kept_prefix import PrefixReuse

PLAIN = "without --causal_lm and --task"
CAUSAL = "with --causal_lm"
# What brings the scores of beams.
SCORES = {"output_scores": True, "return_dict_in_generate": True}
SPEECH_TO_SPEECH = {  # the library has no class that finds them
    "seamless_m4t": "SeamlessM4TForSpeechToSpeech",
    "seamless_m4t_v2": "SeamlessM4Tv2ForSpeechToSpeech",
}


def task_for(args: RunConfig) -> Task:
    """The task that the flags ask for; raises InputError for flags that do not go with it."""
    kind: type[Task] = ChatTask if args.chat else TextTask
    if args.audio_out:
        kind = SpeakTask
    elif args.audio_in:
        kind = TranscribeTask
    task = kind(args)
    task.validate()
    return task


class Task:
    """A kind of run; see the module's docstring."""

    refused: ClassVar[tuple[str, ...]] = ()  # flags that do not go with it
    why: ClassVar[str] = ""
    unit: ClassVar[str] = "tokens"  # of the amount that is generated
    lines_at_once: ClassVar[int] = LINES_AT_ONCE  # that a worker prepares

    loaded: Loaded
    input: TextInput | AudioInput
    output: TextOutput | SoundFolder
    sounds: SoundFolder | None = None  # what OUTPUT names

    def __init__(self, args: RunConfig) -> None:
        self.args = args
        self._reuse: PrefixReuse | None = None

    @property
    def plans_by_head(self) -> bool:
        """Whether batches depend on what inputs begin with, whose keys and values are kept from batch to batch."""
        return self.args.causal_lm

    def validate(self) -> None:
        """Raises InputError for flags that do not go with the task, or with each other in it."""
        args = self.args
        if args.task not in TASKS and (near := get_close_matches(args.task or "", TASKS, n=1, cutoff=0.85)):
            raise InputError(f"--task {args.task} is not known (did you mean {near[0]}?)")
        if args.chat and not args.causal_lm:
            raise InputError("--chat needs --causal_lm")
        if args.system is not None and not args.chat:
            raise InputError(f"--system {args.system} needs --chat")
        self._refuse(self.refused, self.why)
        if args.causal_lm:
            of_encoders = ("decoder_start_token_id", "src_lang", "tgt_lang", "forced_bos_token")
            self._refuse(of_encoders, "--causal_lm, which has no encoder (accepted: one of them)")
        if args.speaker_id is not None and not args.audio_out:
            raise InputError(f"--speaker_id {args.speaker_id} needs --task {' or '.join(AUDIO_OUT)}")

    def _refuse(self, flags: tuple[str, ...], what: str) -> None:
        for flag in filter(None, map(self.args.given, flags)):
            raise InputError(f"{flag} does not go with {what.format(self.args)}")

    def load(self, loaded: Loaded | None = None) -> None:
        """Fills `loaded`, `input` and `output`; raises InputError where MODEL cannot do what is asked for.

        loaded: a model that is there already.
        """
        from fastgen.cli.transformers import model, settings
        from fastgen.optimizer.transformers.kept_prefix import PrefixReuse

        classes, asked = _classes(), f"with --task {self.args.task}"
        if asked not in classes:
            asked = CAUSAL if self.args.causal_lm else PLAIN
        self.loaded = loaded or model.load(self.args, asked, classes)
        if self.plans_by_head:  # a model that is there already may be trained between two calls
            self._reuse = PrefixReuse(self.loaded.model, check_weights=loaded is not None)
        settings.set_generation(self.loaded)
        self.args = self.loaded.args = with_batch_size(self.args, self.loaded)
        model.check_limits(self.loaded)
        self.specialize()

    def specialize(self) -> None:
        """The task's own part of `load`."""
        raise NotImplementedError

    def notes(self) -> tuple[list[str], Planner]:
        """What a user should know about how lines are batched, and what batches them."""
        from fastgen.cli.transformers.model import lengths_of_inputs
        from fastgen.cli.transformers.settings import reasons_to_keep_file_order

        notes = []
        reasons = reasons_to_keep_file_order(self.loaded)
        if reasons:
            notes.append(f"batches keep the order of INPUT, so that outputs stay the same: {', '.join(reasons)}")
        if self.args.truncation and lengths_of_inputs(self.loaded)[0] is None:
            hint = "(--max_tokenizer_length N sets one)"
            notes.append(f"--truncation changes nothing: MODEL takes inputs of any length {hint}")
        in_order = bool(reasons) or self.args.window == 0
        return notes, make_planner(self.args, self.loaded, in_order, self.plans_by_head)

    def writes_text(self, starts_with_token: bool, eos_token_ids: list[int], has_scores: bool = True) -> TextOutput:
        """What makes text of sequences; asks generate for the scores of beams where OUTPUT has them.

        starts_with_token: whether each begins with one that was given to the decoder.
        """
        from fastgen.cli.transformers.text import TextOutput

        loaded, args = self.loaded, self.args
        scored = has_scores and (args.output_sequence_scores or args.writes_records)
        if scored and (loaded.value("num_beams") or 1) > 1:
            loaded.settings |= SCORES
        pad = loaded.value("pad_token_id")
        return TextOutput(loaded.tokenizer, args, eos_token_ids, pad, start_tokens=int(starts_with_token))

    def prepare(self, lines: list[Line]) -> list[Item]:
        """An item for each line, with arrays for the model, an error, or neither for a line with nothing in it."""
        return self.input.prepare(lines)

    def collate(self, items: list[Item]) -> dict[str, torch.Tensor]:
        """The arrays of several items, padded to tensors [B, N, …]."""
        return self.input.collate(items)

    def generate(self, batch: Batch) -> GeneratedBatch:
        """What the model makes of a batch of at least one item."""
        from fastgen.optimizer.transformers.generate import SEQUENCES_SCORES, only_outputs

        settings = self.loaded.settings | self.settings_of(batch.items[0])
        # Without scores for the command it may be the model's own generate that reads them.
        with only_outputs(SEQUENCES_SCORES) if settings.get("output_scores") else nullcontext():
            found = self.call_model(batch, settings)
        generated = found if isinstance(found, dict) else {"sequences": found}
        scores, segments = generated.get("sequences_scores"), generated.get("segments")  # [B * R]
        sequences = generated["sequences"].long()  # without any segment they are floats
        if self.args.causal_lm:
            sequences = sequences[:, batch.inputs["input_ids"].shape[1] :]  # [B * R, N + T] -> [B * R, T]
        if len(sequences) % len(batch.items):
            raise RuntimeError(f"generate returned {len(sequences)} sequences for {len(batch.items)} inputs")
        return GeneratedBatch(
            batch.items,
            sequences.cpu().numpy(),
            None if scores is None else scores.tolist(),
            segments=None if segments is None else [list(map(_segment, output)) for output in segments],
        )

    def call_model(self, batch: Batch, settings: dict[str, Any]) -> Any:
        """What the model's generate returns for a batch."""
        from fastgen.optimizer.transformers.kept_prefix import reusing

        reuse, inputs = self._reuse, {name: tensor.to(self.loaded.device) for name, tensor in batch.inputs.items()}
        if reuse is not None:
            reuse.head = batch.head
        with nullcontext() if reuse is None else reusing(reuse):
            return self.loaded.model.generate(**inputs, **settings)

    def settings_of(self, item: Item) -> dict[str, Any]:
        """What the group of an item asks generate for besides the settings of the run."""
        return {}

    def finish(self, generated: GeneratedBatch) -> float:
        """Fills the items' outputs, or their errors; returns how much was generated, in `unit`."""
        return self.output.finish(generated)


class TextTask(Task):
    """Text to text: an encoder-decoder, or with --causal_lm a decoder."""

    def specialize(self) -> None:
        from fastgen.cli.transformers.settings import token_ids
        from fastgen.cli.transformers.text import TextInput

        loaded, args = self.loaded, self.args
        if args.prefix is None:
            self.args = args = loaded.args = replace(args, prefix=loaded.task_params.get("prefix") or "")
        self.input = TextInput.of(loaded)
        self.output = self.writes_text(not args.causal_lm, token_ids(loaded.value("eos_token_id")))


class ChatTask(TextTask):
    """Conversations through the tokenizer's chat template; INPUT may be requests of OpenAI's batch format."""

    refused = ("truncation",)
    why = "--chat: the end of a conversation is where the answer begins (accepted: one of them)"

    def specialize(self) -> None:
        args, tokenizer = self.args, self.loaded.tokenizer
        if tokenizer.chat_template is None:
            raise InputError(f"--chat: the tokenizer of MODEL {args.model} has no chat template")
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        try:
            messages = [*system, {"role": "user", "content": "a"}]
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program that raises what it likes
            flag = args.given("system") or "--chat"
            why = " ".join(str(error).split())
            raise InputError(f"{flag}: the chat template of MODEL {args.model} refuses it ({why})") from error
        super().specialize()

    def settings_of(self, item: Item) -> dict[str, Any]:
        settings = dict(item.group or ())
        return settings | ({"max_length": None} if "max_new_tokens" in settings else {})


class TranscribeTask(Task):
    """Audio files to text. Whisper takes recordings of any length, other models what they hear at once."""

    refused = ("causal_lm", "prefix", "max_tokenizer_length", "truncation", "padding_side", "chat")
    why = "--task {0.task}, whose inputs are audio files"
    lines_at_once = 1  # a recording may be hours long, and what waits for the model is in memory

    def specialize(self) -> None:
        from fastgen.cli.transformers.audio import AudioInput
        from fastgen.cli.transformers.settings import token_ids

        loaded = self.loaded
        is_whisper = loaded.model.config.model_type == "whisper"
        if is_whisper and loaded.value("return_timestamps"):
            loaded.settings["return_segments"] = True
        # Whisper's generate finds where the next window begins by the timestamps that it generates.
        has_timestamps = getattr(loaded.model.generation_config, "no_timestamps_token_id", None) is not None
        windows = is_whisper and has_timestamps and loaded.settings.get("return_timestamps") is not False
        self.input = AudioInput(loaded.feature_extractor, self.args, windows)
        # Whisper's generate leaves out the tokens that it was given, and the end.
        eos_token_ids = [] if is_whisper else token_ids(loaded.value("eos_token_id"))
        # Where it returns scores, it returns but the last of its passes over a sound.
        self.output = self.writes_text(not is_whisper, eos_token_ids, has_scores=not is_whisper)

    def settings_of(self, item: Item) -> dict[str, Any]:
        # Of recordings that are longer than Whisper hears at once.
        return {"return_timestamps": True, "return_segments": True} if item.group else {}


class SpeakTask(Task):
    """Text or audio files to sounds, which Seamless M4T speaks."""

    refused = (
        *("causal_lm", "chat", "num_return_sequences", "decoder_start_token_id", "forced_bos_token"),
        *("include_special_tokens", "clean_up_tokenization_spaces", "join_outputs", "output_sequence_scores"),
        *("reference_path", "reference_field"),
    )
    why = "--task {0.task}, whose outputs are audio files"
    unit = "seconds of sound"

    def validate(self) -> None:
        super().validate()
        args = self.args
        if args.audio_in:
            self._refuse(TranscribeTask.refused, TranscribeTask.why)
        if is_stream(args.output) or is_url(args.output) or args.output_format != "jsonl":
            is_text = args.output_format != "jsonl"
            asked = f"--output_format {args.output_format}" if is_text else f"OUTPUT {args.output}"
            raise InputError(f"{asked} does not go with --task {args.task} (accepted: a file of JSON records)")
        for key, value in args.gen:
            if key.endswith("num_return_sequences") and value != 1:
                raise InputError(f"--gen {key}={value} does not go with --task {args.task}: an input is one sound")
        output = os.path.realpath(args.output)
        is_there, goes_on, has_sounds = (os.path.lexists(output + end) for end in ("", ".part", ".audio"))
        if not args.overwrite and not goes_on and is_there != has_sounds:
            if has_sounds:
                hint = "accepted: another name, or --overwrite"
                raise InputError(f"OUTPUT {args.output}: {output}.audio already exists ({hint})")
            if args.resume:
                why = f"is there, but its sounds in {output}.audio are gone"
                raise InputError(f"OUTPUT {args.output}: {why} (accepted: --overwrite)")

    def specialize(self) -> None:
        from fastgen.cli.transformers.audio import AudioInput, SoundFolder
        from fastgen.cli.transformers.text import TextInput

        args, config = self.args, self.loaded.model.config
        if (number := args.speaker_id) is not None:
            if number >= config.vocoder_num_spkrs:
                accepted = f"accepted: 0 to {config.vocoder_num_spkrs - 1}"
                raise InputError(f"--speaker_id {number} is not known to MODEL ({accepted})")
            name = "spkr_id" if config.model_type == "seamless_m4t" else "speaker_id"
            self.loaded.settings[name] = number
        if args.audio_in:
            self.lines_at_once = TranscribeTask.lines_at_once  # type: ignore[misc]
            self.input = AudioInput(self.loaded.feature_extractor, args)
        else:
            self.input = TextInput.of(self.loaded)
        self.output = self.sounds = SoundFolder(args.output, config.sampling_rate)

    def generate(self, batch: Batch) -> GeneratedBatch:
        waveforms, lengths = self.call_model(batch, self.loaded.settings)[:2]
        rows = waveforms.reshape(len(batch.items), -1).float().cpu().numpy()
        return GeneratedBatch(
            batch.items, sounds=[row[:n] for row, n in zip(rows, lengths.reshape(-1).tolist(), strict=True)]
        )


def _classes() -> dict[str, tuple[Any, str]]:
    """For each way to ask for a model: the model types that go with it, and the class that loads them."""
    from transformers.models.auto import modeling_auto as auto

    transcribing = auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "AutoModelForSpeechSeq2Seq"
    return {
        PLAIN: (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "AutoModelForSeq2SeqLM"),
        CAUSAL: (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM"),
        "with --task automatic-speech-recognition": transcribing,
        "with --task speech-to-text": transcribing,
        "with --task text-to-speech": (tuple(SPEECH_TO_SPEECH), "AutoModelForTextToWaveform"),
        "with --task speech-to-speech": (SPEECH_TO_SPEECH, ""),
    }


def _segment(segment: dict[str, Any]) -> tuple[float, float, list[int]]:
    """As Whisper's generate returns it: times are multiples of 10 ms, but for rounding."""
    start, end = (round(float(segment[name]), 2) for name in ("start", "end"))
    return start, end, segment["tokens"].tolist()
