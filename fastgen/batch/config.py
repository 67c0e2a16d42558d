"""The settings of a run, the values that they accept, and contradictions between them.

Names and meanings are FastSeq's, so that its command lines still work; every field of transformers' GenerationConfig is
also a setting. Nothing here imports torch: mistakes are reported before anything slow happens.

Tests: tests/batch/test_settings.py, tests/cli/transformers/test_flags.py
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastgen.batch.errors import InputError

STREAM = "-"  # INPUT: standard input, OUTPUT: standard output
AUDIO_OUT = ("text-to-speech", "speech-to-speech")  # OUTPUT names audio files
# The tasks of fastgen, in addition to those that MODEL has settings for.
TASKS = ("automatic-speech-recognition", "speech-to-text", *AUDIO_OUT, "translation")
FORMATS = ("text", "jsonl", "openai")
# Ends of names of tables, and what their formats are called.
TABLES = {"csv": "CSV", "tsv": "TSV", "parquet": "Parquet", "arrow": "Arrow", "feather": "Arrow"}
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Settings of which only one is accepted.
EXCLUSIVE = (
    *(("dtype", "fp16", "bf16"), ("truncation", "no_truncation"), ("max_length", "max_new_tokens")),
    *(("retry_failed", "overwrite"), ("retry_failed", "merge")),
)
# FastSeq's names for settings of generate, as flags and in messages of the command.
FASTSEQ_NAMES = {"num_beams": "beam", "max_length": "max_gen_length", "min_length": "min_gen_length"}
OTHER_NAMES = {
    **{name: setting for setting, name in FASTSEQ_NAMES.items()},
    "batch_size": "bs",
    "without_fastseq_opt": "without_fastgen_opt",
}
# Settings of the run that set these settings of generate.
ASKS_FOR = {"forced_bos_token": "forced_bos_token_id", "tgt_lang": "forced_bos_token_id", "src_lang": "language"}
# Settings of generate that cannot be set. settings.py detects names that are no settings.
REFUSED_SETTINGS = (
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("return_segments", "return_token_timestamps", "streamer", "logits_processor", "stopping_criteria"),
    *("prefix_allowed_tokens_fn", "assistant_model", "is_assistant", "compile_config", "continuous_batching_config"),
)

# Counts, lengths, token ids and seeds fit; larger numbers would overflow inside torch.
LARGEST_NUMBER = 2**31 - 1
UNSET = {"-1": None}  # FastSeq's number for "not set"
AUTO = {"auto": "auto"}
TODAY = "today"  # --date: the day on which the run starts

Check = Callable[[Any], Any]  # returns the parsed value of a setting, or raises BadValue


class BadValue(ValueError):
    """A value that a setting does not accept. The message says why; the caller adds the name of the setting."""


def _number(convert: Callable[[Any], Any], accepted: str, fits: Callable[[Any], bool]) -> Check:
    def check(value: Any) -> Any:
        try:
            number = convert(value)
        except (TypeError, ValueError, OverflowError):
            raise BadValue(f"{value!r} is no number (accepted: {accepted})") from None
        if not fits(number) or isinstance(value, bool):
            raise BadValue(f"{value} is out of range (accepted: {accepted})")
        return number

    return check


def whole(minimum: int, words: dict[str, Any] | None = None) -> Check:
    """Returns the check of whole numbers from `minimum` on, and of words for special values."""
    values = words or {}
    accepted = ", or ".join([f"a whole number, {minimum} to {LARGEST_NUMBER}", *values])
    number = _number(
        lambda value: int(value) if isinstance(value, str) else operator.index(value),
        accepted,
        lambda n: minimum <= n <= LARGEST_NUMBER,
    )
    return lambda value: values[value] if isinstance(value, str) and value in values else number(value)


def real(above: float = -math.inf, up_to: float = math.inf) -> Check:
    """Returns the check of finite numbers greater than `above` and not greater than `up_to`."""
    bounds = [f"greater than {above:g}"] * (above > -math.inf) + [f"at most {up_to:g}"] * (up_to < math.inf)
    accepted = " and ".join(["a finite number", *bounds])
    return _number(float, accepted, lambda x: math.isfinite(x) and above < x <= up_to)


def one_of(*values: Any) -> Check:
    """Returns the check of these values, or of their names in any case."""
    named = {str(value).lower(): value for value in values}

    def check(value: Any) -> Any:
        if str(value).lower() not in named or not isinstance(value, (str, bool)):
            raise BadValue(f"{value!r} is not known (accepted: {', '.join(named)})")
        return named[str(value).lower()]

    return check


def text(value: Any) -> str:
    """Checks and returns a string."""
    if not isinstance(value, str):
        raise BadValue(f"{value!r} is no text (accepted: a string)")
    return value


def iso_date(value: Any) -> str:
    """Checks and returns a date in ISO 8601, with or without the time of day, or TODAY."""
    if value == TODAY:
        return TODAY
    try:
        return datetime.fromisoformat(str(value)).isoformat()
    except ValueError:
        accepted = f"accepted: {TODAY}, or a date such as 2026-10-05 or 2026-10-05T14:30"
        raise BadValue(f"{value!r} is no date ({accepted})") from None


def json_object(value: Any) -> dict[str, Any]:
    """Checks and returns an object, or the object in a JSON file with this path."""
    values = value
    if isinstance(value, str):
        try:
            values = json.loads(Path(value).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or f"is not JSON ({error})"
            raise BadValue(f"{value}: {why}") from None
    if not isinstance(values, dict):
        raise BadValue(f'{value}: holds no JSON object (accepted: {{"num_beams": 4, …}})')
    return values


flag = one_of(True, False)
# Checks of some settings of generate, for flags and Python alike; GenerationConfig checks all settings later.
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "max_length", "max_new_tokens"), whole(1)),
    "min_length": whole(0, UNSET),
    **dict.fromkeys(("min_new_tokens", "no_repeat_ngram_size", "top_k"), whole(0)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id"), whole(0)),
    **dict.fromkeys(("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id"), whole(0)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "temperature", "max_time"), real(above=0)),
    **dict.fromkeys(("top_p", "typical_p"), real(above=0, up_to=1)),
    **dict.fromkeys(("length_penalty", "guidance_scale"), real()),
    **dict.fromkeys(("logprob_threshold", "no_speech_threshold", "compression_ratio_threshold"), real()),
    **dict.fromkeys(("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values"), flag),
    **dict.fromkeys(("return_timestamps", "condition_on_prev_tokens"), flag),
    "early_stopping": one_of(True, False, "never"),  # the values that transformers accepts
}


def as_argument(name: str, value: Any = None) -> str:
    """Returns a setting in the form of a Python argument."""
    return name if value is None else f"{name}={value!r}"


def _setting(help: str, default: Any = None, **metadata: Any) -> Any:
    """Returns a field that is also a flag. accepts: the check of its values; nargs, const, metavar: argparse's."""
    metadata = {"help": help, "accepts": text, **metadata}
    if default == []:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def _switch(help: str) -> Any:
    return _setting(help, False, accepts=flag)


def _whole(help: str, least: int = 1, default: Any = None, words: dict[str, Any] | None = None) -> Any:
    return _setting(help, default, accepts=whole(least, words), metavar="N")


def _choice(help: str, metavar: str, *values: str) -> Any:
    return _setting(help, accepts=one_of(*values), metavar=metavar)


@dataclass(frozen=True)
class BatchConfig:
    """The settings of a run: the command's flags by name, which docs/flags.md lists.

    Raises InputError for values that are not accepted, and for contradictory settings; tasks check whether they support
    a setting. Settings implied by formats and file names are filled in. gen: settings of generate by name. named: turns
    the name and the value, if any, of a setting into its form in messages.
    """

    model: str = _setting("local folder, hub name, or demo for the model in fastgen")
    input: str = _setting("text, an input per line, or records (.jsonl, .csv, .parquet, …); - stdin", STREAM)
    output: str = _setting("file to write, JSON records for a .jsonl; - stdout", STREAM)

    bs: int | None = _whole("most inputs per batch (or --batch_size)")
    causal_lm: bool = _switch("MODEL is a decoder-only model (GPT-2, Llama, …)")
    chat: bool = _switch("lines are messages of a user, or lists of messages")
    task: str | None = _setting("speech-to-text, text-to-speech, translation, …", metavar="NAME")
    device: str | None = _setting("cpu, cuda, cuda:1, … (default: cuda if there is one)", metavar="NAME")
    workers: Any = _whole("processes with a model each, or auto (needs ray)", words=AUTO)
    resume: bool = _switch("resume the run that left OUTPUT.part")
    overwrite: bool = _switch("replace an existing OUTPUT or --score_path")
    retry_failed: bool = _switch("only the lines of OUTPUT that failed, in place")
    quiet: bool = _switch("no progress on stderr, only what went wrong")

    seed: int | None = _whole("seed of the samples (default: drawn, and kept for --resume)", 0)
    forced_bos_token: str | None = _setting("token that every output starts with, as text", metavar="TOKEN")
    generation_config: dict[str, Any] | None = _setting(
        "generation settings as JSON; flags win over them", accepts=json_object, metavar="FILE"
    )
    gen: list[tuple[str, Any]] = _setting("any setting of generate; may be repeated", [], metavar="KEY=VALUE")

    dtype: str | None = _choice("auto (as saved), float32, bfloat16 or float16", "TYPE", *DTYPES)
    fp16: bool = _switch("the same as --dtype float16")
    bf16: bool = _switch("the same as --dtype bfloat16")
    attn_implementation: str | None = _setting("eager, sdpa, … (default: the library's choice)", metavar="NAME")
    device_map: str | None = _choice("auto: over all devices, by accelerate", "MAP", "auto")
    without_fastgen_opt: bool = _switch("run the unchanged library")

    input_format: str | None = _choice("text, jsonl or openai (default: by INPUT)", "FORMAT", *FORMATS)
    output_format: str | None = _choice("text, jsonl or openai (default: by OUTPUT, else as INPUT)", "FORMAT", *FORMATS)
    text_field: str = _setting("JSON field of the input; a.b is b of a (default: text)", "text", metavar="NAME")
    id_field: str | None = _setting("JSON field that names a record in messages", metavar="NAME")
    join_outputs: bool = _switch("several outputs on one line of text, joined with ####")
    output_sequence_scores: bool = _switch("in text, write SCORE<tab>TEXT (NA without beams)")

    prefix: str | None = _setting("text before every line that is not empty", metavar="TEXT")
    system: str | None = _setting("system message before each chat", metavar="TEXT")
    date: str | None = _setting(
        "date in the chat template (default: today, kept for --resume)", accepts=iso_date, metavar="DATE"
    )
    src_lang: str | None = _setting("language of INPUT, as the model calls it", metavar="LANG")
    tgt_lang: str | None = _setting("language of OUTPUT, as the model calls it", metavar="LANG")
    speaker_id: int | None = _whole("voice that speaks, from 0 on", 0)
    max_tokenizer_length: int | None = _whole("truncate inputs to N tokens")
    truncation: bool = _switch("truncate inputs to the model's limit")
    no_truncation: bool = _switch("truncate nothing: what is too long fails")
    padding_side: str | None = _choice("left or right (default: MODEL's)", "SIDE", "left", "right")
    include_special_tokens: bool = _switch("keep special tokens such as </s> in the output")
    clean_up_tokenization_spaces: bool = _switch("remove spaces before punctuation")

    batch_tokens: int | None = _whole("most tokens per batch, padding and beams counted")
    window: int | None = _whole("lines sorted by length together (default: 16 batches; 0: none)", 0)
    preprocess_workers: int = _whole("threads that tokenise ahead (default: 1)", default=1)
    postprocess_workers: int = _whole("threads that detokenise (default: 1)", default=1)
    n_obs: int | None = _whole("only the first N lines (-1: all)", words=UNSET)

    ray: str | None = _setting("the cluster that --workers are on", nargs="?", const="auto", metavar="ADDRESS")
    verbose: bool = _switch("the speed of each worker")
    num_shards: Any = _whole("divide INPUT into N runs, or auto", words=AUTO)
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
        gen = [(name, self._checked(name, partial(_checked_setting, name), value)) for name, value in self.gen]
        input_format = self.input_format or ("jsonl" if names_records(self.input) else "text")
        is_json = is_jsonl(self.output) or self.task in AUDIO_OUT or input_format != "text"
        output_format = self.output_format or ("jsonl" if is_json else "text")
        vars(self).update(gen=gen, input_format=input_format, output_format=output_format)
        if input_format == "openai":
            vars(self).update(chat=True, causal_lm=True, text_field="body.messages", id_field="custom_id")
        self._check_contradictions()
        self._check_settings()
        self._check_files()
        dtype = self.dtype
        if self.fp16:
            dtype = "float16"
        elif self.bf16:
            dtype = "bfloat16"
        vars(self).update(dtype=dtype, fp16=False, bf16=False)

    def _checked(self, name: str, accepts: Check, value: Any) -> Any:
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
        """Whether OUTPUT holds JSON."""
        return self.output_format != "text"

    def setting(self, name: str) -> str:
        """Returns a setting and its value in the form for messages; empty if it is not set."""
        value = vars(self)[name] if name in vars(self) else dict(self.gen).get(name)
        is_unset = value is None or value is False or value == getattr(BatchConfig, name, None)
        return "" if is_unset else self.named(name, value)

    def check_outputs(self, number: int) -> None:
        """Raises InputError for several outputs per line of text, unless `join_outputs` is set."""
        if number > 1 and not self.join_outputs and not self.writes_records:
            asked = self.named("num_return_sequences", number)
            joined = self.named("join_outputs", True)
            ways = f"{self.named('output_format', 'jsonl')}, or {joined} to join them with ####"
            raise InputError(f"{asked} does not go with one line of text per input (accepted: {ways})")

    def _check_contradictions(self) -> None:
        """Raises InputError for settings of which only one is accepted."""
        asked = [[self.setting(name) for name in names] for names in EXCLUSIVE]
        settings = [(name, self.named(name, value)) for name, value in self.gen]
        settings += [(setting, self.setting(name)) for name, setting in ASKS_FOR.items()]
        asked += [[what for name, what in settings if name == each] for each in dict(settings)]
        for rivals in asked:
            if len(rivals := list(filter(None, rivals))) > 1:
                raise InputError(f"{' and '.join(rivals)} contradict each other (accepted: one of them)")

    def _check_settings(self) -> None:
        """Raises InputError for settings of generate that cannot be set, or that have no effect."""
        settings = dict(self.gen)
        from_file = self.generation_config or {}
        asked = [(name, value, self.named(name, value)) for name, value in self.gen]
        asked += [(name, value, f"{self.named('generation_config')}: {name}") for name, value in from_file.items()]
        for name, value, what in asked:
            if name in REFUSED_SETTINGS and value:
                scores = f"{self.named('output_sequence_scores', True)}, {self.named('output_format', 'jsonl')}"
                raise InputError(f"{what} cannot be set: a run asks generate for what it writes (for scores: {scores})")
        for name in ("temperature", "top_k", "top_p"):
            # Long recordings are sampled if one of several temperatures must be chosen.
            samples = settings.get("do_sample", from_file.get("do_sample"))
            if self.setting(name) and not samples and not isinstance(settings[name], (list, tuple)):
                raise InputError(f"{self.setting(name)} has no effect without {self.named('do_sample')}")
        self.check_outputs(settings.get("num_return_sequences") or 1)
        for name in ("max_length", "max_new_tokens"):
            # A causal LM's shortest length counts the prompt, so it cannot be checked before the prompts are known.
            counts_alike = name == "max_length" or not self.causal_lm
            if counts_alike and (settings.get("min_length") or 0) > (settings.get(name) or math.inf):
                raise InputError(f"{self.setting('min_length')} is more than {self.setting(name)}")

    def _check_files(self) -> None:
        scored = self.setting("reference_path") or self.setting("reference_field")
        score_path = self.setting("score_path")
        references, field_of, in_format = map(self.named, ("reference_path", "reference_field", "input_format"))
        is_text = not self.reads_records
        has_records = names_records(self.reference_path or "")
        of_records = ["text_field", "id_field", *([] if self.reference_path else ["reference_field"])]
        joined, written = self.setting("join_outputs"), self.setting("output_format")
        mistakes = [
            (self.ray and not self.workers, f"{self.setting('ray')} needs {self.named('workers', 'N')}"),
            (score_path and not scored, f"{score_path} needs {references} or {field_of}"),
            (scored and self.output == STREAM, f"{scored} does not go with OUTPUT - (accepted: a file)"),
            (has_records and not self.reference_field, f"{scored} holds records (needs {field_of} NAME)"),
            *((is_text and what, f"{what} needs {in_format} jsonl") for what in map(self.setting, of_records)),
            (joined and self.writes_records, f"{joined} does not go with JSONL, which keeps outputs apart"),
            (
                self.writes_records and table_kind(self.output),
                f"OUTPUT {self.output}: records are written as JSON (accepted: a .jsonl)",
            ),
            (is_text and self.output_format == "openai", f"{written} needs {in_format} jsonl or openai"),
        ]
        for is_mistake, message in mistakes:
            if is_mistake:
                raise InputError(message)


@cache
def settings_of_run() -> tuple[Any, ...]:
    """Returns the fields of BatchConfig that are settings."""
    return tuple(each for each in fields(BatchConfig) if each.metadata)


def is_jsonl(path: str) -> bool:
    """Whether a file's name implies JSON records, one per line."""
    return _end_of(path) in ("jsonl", "ndjson", "json")


def table_kind(path: str) -> str | None:
    """Returns the name of a table's format, None for other files."""
    return TABLES.get(_end_of(path))


def names_records(path: str) -> bool:
    """Whether a file's name implies records with fields."""
    return is_jsonl(path) or table_kind(path) is not None


def _end_of(path: str) -> str:
    """Returns the end of a file's name, before that of a compression; empty if it has none."""
    end = re.search(r"\.(\w+?)(\.(gz|bz2|xz|zst))?$", path.lower())
    return "" if end is None else end[1]


@cache
def generation_fields() -> tuple[str, ...]:
    """Returns the fields of the installed GenerationConfig, read from its source: importing it takes seconds."""
    spec = find_spec("transformers")
    folders = spec.submodule_search_locations if spec is not None else None
    source = Path((folders or [""])[0]) / "generation" / "configuration_utils.py"
    if not source.is_file():
        return ()
    return tuple(dict.fromkeys(re.findall(r"self\.([a-z]\w*) = kwargs\.pop\(", source.read_text(encoding="utf-8"))))


def _checked_setting(name: str, value: Any) -> Any:
    """Returns the value of a setting of generate, after the check in CHECKS if it is a single value."""
    takes_list = isinstance(value, (list, tuple)) and (name.endswith("_token_id") or name == "temperature")
    return CHECKS[name](value) if name in CHECKS and value is not None and not takes_list else value
