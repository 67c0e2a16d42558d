"""What a run is to do: every setting, the values that it accepts, and what contradicts.

Names and meanings are FastSeq's, so that its command lines keep working; every field of transformers' GenerationConfig
is a setting as well. Nothing here imports torch: a mistake is reported before anything slow happens.

Tests: tests/batch/test_settings.py, tests/cli/transformers/test_flags.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastgen.batch import values
from fastgen.batch.errors import InputError
from fastgen.batch.values import AUTO, UNSET, BadValue, json_object, one_of, whole

STREAM = "-"  # INPUT: standard input, OUTPUT: standard output
AUDIO_OUT = ("text-to-speech", "speech-to-speech")  # OUTPUT names audio files
# That fastgen knows, whatever MODEL has settings for.
TASKS = ("automatic-speech-recognition", "speech-to-text", *AUDIO_OUT, "translation")
FORMATS = ("text", "jsonl", "openai")
# Of these only one is accepted at a time.
EXCLUSIVE = (
    *(("dtype", "fp16", "bf16"), ("truncation", "no_truncation"), ("max_length", "max_new_tokens")),
    *(("retry_failed", "overwrite"), ("retry_failed", "merge")),
)
# Names of Hugging Face, or of FastSeq, for settings.
OTHER_NAMES = {
    "beam": "num_beams",
    "max_gen_length": "max_length",
    "min_gen_length": "min_length",
    "batch_size": "bs",
    "without_fastseq_opt": "without_fastgen_opt",
}
# Settings of generate that nobody can change. What is no setting at all is found by settings.py.
REFUSED_SETTINGS = (
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("return_segments", "return_token_timestamps", "streamer", "logits_processor", "stopping_criteria"),
    *("prefix_allowed_tokens_fn", "assistant_model", "is_assistant", "compile_config", "continuous_batching_config"),
)


def as_argument(name: str, value: Any = None) -> str:
    """Returns a setting as it is written in Python."""
    return name if value is None else f"{name}={value!r}"


def _setting(help: str, default: Any = None, **metadata: Any) -> Any:
    """A field that the command has as a flag. accepts: the check of its values; nargs, const, metavar: argparse's."""
    metadata = {"help": help, "accepts": values.text, **metadata}
    if default == []:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def _switch(help: str) -> Any:
    return _setting(help, False, accepts=values.flag)


@dataclass(frozen=True)
class BatchConfig:
    """The settings of a run: the command's flags by name, which docs/commands.md describes.

    Raises InputError for values that are not accepted, and for settings that contradict each other; what a task does
    not take is the task's to say. What formats and names of files imply is filled in. gen: settings of generate by
    name. named: how messages call a setting, by its name and its value, if there is one.
    """

    model: str = _setting("local folder, hub name, or demo for the model in fastgen")
    input: str = _setting("text, an input per line, or JSON records (.jsonl); - stdin", STREAM)
    output: str = _setting("file to write, JSON records for a .jsonl; - stdout", STREAM)

    bs: int | None = _setting("most inputs per batch (or --batch_size)", accepts=whole(1), metavar="N")
    causal_lm: bool = _switch("MODEL is a decoder-only model (GPT-2, Llama, …)")
    chat: bool = _switch("lines are messages of a user, or lists of messages")
    task: str | None = _setting("speech-to-text, text-to-speech, translation, …", metavar="NAME")
    device: str | None = _setting("cpu, cuda, cuda:1, … (default: cuda if there is one)", metavar="NAME")
    workers: Any = _setting("processes with a model each, or auto (needs ray)", accepts=whole(1, AUTO), metavar="N")
    resume: bool = _switch("go on with the run that left OUTPUT.part")
    overwrite: bool = _switch("replace OUTPUT or --score_path that is there")
    retry_failed: bool = _switch("only the lines of OUTPUT that failed, in place")
    quiet: bool = _switch("no progress on stderr, only what went wrong")

    seed: int | None = _setting(
        "seed of the samples (default: drawn, and kept for --resume)", accepts=whole(0), metavar="N"
    )
    forced_bos_token: str | None = _setting("token that every output starts with, as text", metavar="TOKEN")
    generation_config: dict[str, Any] | None = _setting(
        "generation settings as JSON; flags win over them", accepts=json_object, metavar="FILE"
    )
    gen: list[tuple[str, Any]] = _setting("any setting of generate; may be repeated", [], metavar="KEY=VALUE")

    dtype: str | None = _setting(
        "auto (as saved), float32, bfloat16 or float16",
        accepts=one_of("auto", "float32", "bfloat16", "float16"),
        metavar="TYPE",
    )
    fp16: bool = _switch("the same as --dtype float16")
    bf16: bool = _switch("the same as --dtype bfloat16")
    attn_implementation: str | None = _setting("eager, sdpa, … (default: the library's choice)", metavar="NAME")
    device_map: str | None = _setting("auto: over all devices, by accelerate", accepts=one_of("auto"), metavar="MAP")
    without_fastgen_opt: bool = _switch("run the unchanged library")

    input_format: str | None = _setting(
        "text, jsonl or openai (default: by INPUT)", accepts=one_of(*FORMATS), metavar="FORMAT"
    )
    output_format: str | None = _setting(
        "text, jsonl or openai (default: by OUTPUT, else as INPUT)", accepts=one_of(*FORMATS), metavar="FORMAT"
    )
    text_field: str = _setting('JSON field of the input (default: "text"); a.b is b of a', "text", metavar="NAME")
    id_field: str | None = _setting("JSON field that names a record in messages", metavar="NAME")
    join_outputs: bool = _switch("several outputs on one line of text, joined with ####")
    output_sequence_scores: bool = _switch("in text, write SCORE<tab>TEXT (NA without beams)")

    prefix: str | None = _setting("text before every line that is not empty", metavar="TEXT")
    system: str | None = _setting("system message before each chat", metavar="TEXT")
    src_lang: str | None = _setting("language of INPUT, as the model calls it", metavar="LANG")
    tgt_lang: str | None = _setting("language of OUTPUT, as the model calls it", metavar="LANG")
    speaker_id: int | None = _setting("voice that speaks, from 0 on", accepts=whole(0), metavar="N")
    max_tokenizer_length: int | None = _setting("truncate inputs to N tokens", accepts=whole(1), metavar="N")
    truncation: bool = _switch("truncate inputs to the model's limit")
    no_truncation: bool = _switch("truncate nothing: what is too long fails")
    padding_side: str | None = _setting(
        "left or right (default: MODEL's)", accepts=one_of("left", "right"), metavar="SIDE"
    )
    include_special_tokens: bool = _switch("keep special tokens such as </s> in the output")
    clean_up_tokenization_spaces: bool = _switch("remove spaces before punctuation")

    batch_tokens: int | None = _setting(
        "most tokens per batch, padding and beams counted", accepts=whole(1), metavar="N"
    )
    window: int | None = _setting(
        "lines sorted by length together (default: 16 batches; 0: none)", accepts=whole(0), metavar="N"
    )
    preprocess_workers: int = _setting("threads that tokenise ahead (default: 1)", 1, accepts=whole(1), metavar="N")
    postprocess_workers: int = _setting("threads that detokenise (default: 1)", 1, accepts=whole(1), metavar="N")
    n_obs: int | None = _setting("only the first N lines (-1: all)", accepts=whole(1, UNSET), metavar="N")

    ray: str | None = _setting("the cluster that --workers are on", nargs="?", const="auto", metavar="ADDRESS")
    verbose: bool = _switch("the speed of each worker")
    num_shards: Any = _setting("divide INPUT into N runs, or auto", accepts=whole(1, AUTO), metavar="N")
    shard_id: Any = _setting("which of them this is, from 0 on, or auto", accepts=whole(0, AUTO), metavar="I")
    merge: bool = _switch("put all --num_shards together")

    reference_path: str | None = _setting("references, a line each: prints ROUGE, BLEU, chrF, …", metavar="FILE")
    reference_field: str | None = _setting("JSON field of the references", metavar="NAME")
    score_path: str | None = _setting("where to write the scores as JSON", metavar="FILE")

    named: Callable[..., str] = field(default=as_argument, repr=False, compare=False)

    def __post_init__(self) -> None:
        for each in settings_of_run():
            value = getattr(self, each.name)
            if value is not None and each.name != "gen":
                vars(self)[each.name] = self._checked(each.name, each.metadata["accepts"], value)
        gen = [(name, self._checked(name, partial(values.setting, name), value)) for name, value in self.gen]
        input_format = self.input_format or ("jsonl" if is_jsonl(self.input) else "text")
        is_json = is_jsonl(self.output) or self.task in AUDIO_OUT or input_format != "text"
        vars(self).update(gen=gen, input_format=input_format)
        vars(self).update(output_format=self.output_format or ("jsonl" if is_json else "text"))
        if input_format == "openai":
            vars(self).update(chat=True, causal_lm=True, text_field="body.messages", id_field="custom_id")
        self._check()
        dtype = "float16" if self.fp16 else "bfloat16" if self.bf16 else self.dtype
        vars(self).update(dtype=dtype, fp16=False, bf16=False)

    def _checked(self, name: str, accepts: values.Check, value: Any) -> Any:
        try:
            return accepts(value)
        except BadValue as error:
            raise InputError(f"{self.named(name)}: {error}") from None

    @property
    def reads_records(self) -> bool:
        """Whether INPUT holds JSON."""
        return self.input_format != "text"

    @property
    def writes_records(self) -> bool:
        """Whether OUTPUT does."""
        return self.output_format != "text"

    def given(self, name: str) -> str:
        """Returns a setting as a message calls it, with its value; empty if it is not set."""
        value = vars(self)[name] if name in vars(self) else dict(self.gen).get(name)
        is_unset = value is None or value is False or value == _defaults().get(name)
        return "" if is_unset else self.named(name, value)

    def settings(self) -> list[tuple[str, Any, str]]:
        """Returns name and value of every setting of generate, and how a message calls it."""
        return [(name, value, self.named(name, value)) for name, value in self.gen]

    def _check(self) -> None:
        """Raises InputError for settings that contradict each other."""
        named = self.named
        for names in EXCLUSIVE:
            if len(rivals := [self.given(name) for name in names if self.given(name)]) > 1:
                raise InputError(f"{' and '.join(rivals)} contradict each other (accepted: one of them)")
        if self.ray is not None and self.workers is None:
            raise InputError(f"{self.given('ray')} needs {named('workers', 'N')}")
        settings = self._check_settings()
        check_several_outputs(self, settings.get("num_return_sequences") or 1)
        shortest = settings.get("min_length") or 0
        for name in ("max_length", "max_new_tokens"):
            # A causal LM's shortest length counts the prompt, so nothing can be said before the prompts are known.
            counts_alike = name == "max_length" or not self.causal_lm
            if settings.get(name) is not None and shortest > settings[name] and counts_alike:
                raise InputError(f"{self.given('min_length')} is more than {self.given(name)}")
        self._check_files()

    def _check_settings(self) -> dict[str, Any]:
        """Returns the settings of generate; raises InputError for those that contradict each other."""
        set_here = self.settings()
        first = [self.given(name) for name in ("forced_bos_token", "tgt_lang")]
        set_here += [("forced_bos_token_id", 0, what) for what in first if what]
        if self.src_lang is not None:
            set_here.append(("language", self.src_lang, self.given("src_lang")))
        from_file, where = self.generation_config or {}, self.named("generation_config")
        for key, value, what in [*set_here, *((key, each, f"{where}: {key}") for key, each in from_file.items())]:
            if key in REFUSED_SETTINGS and value:
                scores = f"{self.named('output_sequence_scores', True)}, {self.named('output_format', 'jsonl')}"
                raise InputError(f"{what} cannot be set: a run asks generate for what it writes (for scores: {scores})")
        seen: dict[str, str] = {}
        for key, _, what in set_here:
            if key in seen:
                raise InputError(f"{seen[key]} and {what} contradict each other (accepted: one of them)")
            seen[key] = what
        settings = dict(self.gen)
        for name in ("temperature", "top_k", "top_p"):
            fallbacks = isinstance(
                settings.get(name), (list, tuple)
            )  # of long recordings, which draw where they have to
            if self.given(name) and not settings.get("do_sample", from_file.get("do_sample")) and not fallbacks:
                raise InputError(f"{self.given(name)} has no effect without {self.named('do_sample')}")
        return settings

    def _check_files(self) -> None:
        scored, score_path = self.given("reference_path") or self.given("reference_field"), self.given("score_path")
        references, field_of, in_format = map(self.named, ("reference_path", "reference_field", "input_format"))
        of_records = [*map(self.given, ("text_field", "id_field"))]
        of_records += [] if self.reference_path else [self.given("reference_field")]
        is_text, has_field = not self.reads_records, self.reference_field is not None
        mistakes = {
            f"{score_path} needs {references} or {field_of}": score_path and not scored,
            f"{scored} does not go with OUTPUT - (accepted: a file)": scored and self.output == STREAM,
            f"{scored} holds JSON records (needs {field_of} NAME)": is_jsonl(self.reference_path or "")
            and not has_field,
            **{f"{what} needs {in_format} jsonl": what and is_text for what in of_records},
            f"{self.given('join_outputs')} does not go with JSONL, which keeps outputs apart": self.join_outputs
            and self.writes_records,
            f"{self.given('output_format')} needs {in_format} jsonl or openai": self.output_format == "openai"
            and is_text,
        }
        for message in (message for message, holds in mistakes.items() if holds):
            raise InputError(message)


@cache
def settings_of_run() -> tuple[Any, ...]:
    """Returns the fields of BatchConfig that are settings."""
    return tuple(each for each in fields(BatchConfig) if each.metadata)


@cache
def _defaults() -> dict[str, Any]:
    return {each.name: [] if each.default is MISSING else each.default for each in settings_of_run()}


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


def check_several_outputs(args: BatchConfig, num_return_sequences: int) -> None:
    """Raises InputError for several outputs on a line of text, unless that is asked for."""
    if num_return_sequences > 1 and not args.join_outputs and not args.writes_records:
        asked = args.named("num_return_sequences", num_return_sequences)
        ways = f"{args.named('output_format', 'jsonl')}, or {args.named('join_outputs', True)} to join them with ####"
        raise InputError(f"{asked} does not go with one line of text per input (accepted: {ways})")
