"""The settings of a run: each is a field that has its flag, its help and every decision about it.

Names and meanings are FastSeq's, so that its command lines still work; every field of transformers' GenerationConfig is
also a setting. The parser, docs/flags.md, the signature of a run, the refusals of tasks and the arguments of
TextGenerator are queries over these fields. Nothing here imports torch: mistakes are reported before anything slow
happens.

Tests: tests/batch/test_settings.py, tests/cli/transformers/test_flags.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Set
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastgen.batch.errors import InputError
from fastgen.batch.values import AUTO, UNSET, BadValue, Check, flag, iso_date, json_object, one_of, real, text, whole

LINES_AT_ONCE = 64
STREAM = "-"  # INPUT: standard input, OUTPUT: standard output
# The kinds of runs, which a setting's `tasks` lists: see task.py. Those with sounds are named by --task.
TEXT, CAUSAL, CHAT = "text", "causal", "chat"
TRANSCRIBE, SPEAK, INTERPRET = "automatic-speech-recognition", "text-to-speech", "speech-to-speech"
TO_TEXT = frozenset({TEXT, CAUSAL, CHAT, TRANSCRIBE})
FROM_TEXT = frozenset({TEXT, CAUSAL, CHAT, SPEAK})
DECODERS = frozenset({CAUSAL, CHAT})
AUDIO_OUT = (SPEAK, INTERPRET)  # OUTPUT names audio files
ALL = TO_TEXT | set(AUDIO_OUT)
OF_SOUND = {"speech-to-text": TRANSCRIBE, **{name: name for name in (TRANSCRIBE, *AUDIO_OUT)}}
# The tasks of fastgen, in addition to those that MODEL has settings for.
TASKS = (*OF_SOUND, "translation")
# Why a kind of run does not have all settings.
WHY_REFUSED = {
    CAUSAL: "which has no encoder",
    CHAT: "which has no encoder, and where the end of a conversation is where the answer begins",
    TRANSCRIBE: "whose inputs are audio files",
    SPEAK: "whose outputs are audio files",
    INTERPRET: "whose inputs and outputs are audio files",
}
FORMATS = ("text", "jsonl", "openai")
# Ends of names of files with records, and what the records are: JSON, or rows of a table.
KIND_OF_RECORDS = {
    **dict.fromkeys(("jsonl", "ndjson", "json"), "JSON"),
    **dict.fromkeys(("arrow", "feather"), "Arrow"),
    "csv": "CSV",
    "tsv": "TSV",
    "parquet": "Parquet",
}
DTYPES = ("auto", "float32", "bfloat16", "float16")
# FastSeq's names for settings of generate, as flags and in messages of the command.
FASTSEQ_NAMES = {"num_beams": "beam", "max_length": "max_gen_length", "min_length": "min_gen_length"}
OTHER_NAMES = {
    **{name: setting for setting, name in FASTSEQ_NAMES.items()},
    "batch_size": "bs",
    "without_fastseq_opt": "without_fastgen_opt",
}
# Settings of the run that set these settings of generate.
ASKS_FOR = {"forced_bos_token": "forced_bos_token_id", "tgt_lang": "forced_bos_token_id", "src_lang": "language"}
# Settings of generate that cannot be set. settings.py detects names that are not settings.
REFUSED_SETTINGS = (
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("return_segments", "return_token_timestamps", "streamer", "logits_processor", "stopping_criteria"),
    *("prefix_allowed_tokens_fn", "assistant_model", "is_assistant", "compile_config", "continuous_batching_config"),
)
# Settings of generate that only some tasks have.
TASKS_OF_GENERATE = {
    "decoder_start_token_id": frozenset({TEXT, TRANSCRIBE}),
    **dict.fromkeys(("num_return_sequences", "text_num_return_sequences"), TO_TEXT),
}
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
# What a setting affects. OUTPUTS: what is generated. RECORDS: also which lines there are, or the form of their records.
# A run is resumed only with the same values of both; a retry may change those that affect OUTPUTS only.
NOTHING, OUTPUTS, RECORDS = "nothing", "outputs", "records"


def as_argument(name: str, value: Any = None) -> str:
    """Returns a setting in the form of a Python argument."""
    return name if value is None else f"{name}={value!r}"


def setting(
    help: str,
    default: Any = None,
    *,
    group: str,
    affects: str,
    tasks: Set[str],
    python: bool,
    per_shard: bool,
    accepts: Check | None = None,
    needs: tuple[str, Any] | None = None,
    not_with: tuple[str, ...] = (),
    **argparse: Any,
) -> Any:
    """Returns a field that is also a flag; one without its decisions is a TypeError at import.

    group: the title of the flag's group in --help-all. affects: see NOTHING, OUTPUTS, RECORDS. tasks: the kinds of runs
    that have it. python: whether TextGenerator has it. per_shard: whether shards of one run may have several values.
    accepts: the check of its values; unless set, a switch if the default is False, and otherwise a text. needs: the
    setting, and its value, without which this one is refused. not_with: settings that contradict it. argparse: its
    options nargs, const and metavar.
    """
    decisions = {"group": group, "affects": affects, "tasks": tasks, "python": python, "per_shard": per_shard}
    accepts = accepts or (flag if default is False else text)
    metadata = decisions | {
        "accepts": accepts,
        "needs": needs,
        "not_with": not_with,
        "argparse": {"help": help, **argparse},
    }
    if default == []:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


# Groups of flags in --help-all. --help shows the first one.
COMMON, SEARCH, MODEL = "common flags", "more generation settings", "model"
FORMS, TOKENS, BATCHES = "formats of INPUT and OUTPUT", "text, tokens and languages", "batches, threads and shards"
ADDRESS_OR_AUTO = {"nargs": "?", "const": "auto", "metavar": "ADDRESS"}
# The decisions that several settings share.
_file = partial(setting, group="", affects=NOTHING, tasks=ALL, python=False, per_shard=False)
_kind = partial(setting, group=COMMON, affects=RECORDS, python=True, per_shard=False)
_run = partial(setting, group=COMMON, affects=NOTHING, tasks=ALL, python=False, per_shard=False)
_process = partial(_run, group=BATCHES)
_search = partial(setting, group=SEARCH, affects=OUTPUTS, tasks=ALL, python=True, per_shard=False)
_model = partial(setting, group=MODEL, affects=OUTPUTS, tasks=ALL, python=True, per_shard=False)
_format = partial(setting, group=FORMS, affects=RECORDS, tasks=ALL, python=False, per_shard=False)
_text = partial(setting, group=TOKENS, affects=OUTPUTS, tasks=ALL, python=True, per_shard=False)
_size = partial(
    setting, group=BATCHES, affects=OUTPUTS, tasks=ALL, python=True, per_shard=False, accepts=whole(1), metavar="N"
)
_part = partial(setting, group=BATCHES, affects=RECORDS, tasks=ALL, python=False, per_shard=True)
_score = partial(setting, group="scores", affects=NOTHING, tasks=TO_TEXT, python=False, per_shard=False)


@dataclass(frozen=True)
class BatchConfig:
    """The settings of a run: the command's flags by name, which docs/flags.md lists.

    Raises InputError for values that are not accepted, for contradictory settings, and for those that the kind of run
    does not have. Settings implied by formats and file names are filled in. gen: settings of generate by name. named:
    turns the name and the value, if any, of a setting into its form in messages.
    """

    model: str = _file("local folder, hub name, or demo for the model in fastgen")
    input: str = _file("text, an input per line, or records (.jsonl, .csv, .parquet, …); - stdin", STREAM)
    output: str = _file("file to write, JSON records for a .jsonl; - stdout", STREAM)

    bs: int | None = _size("most inputs per batch (or --batch_size)", group=COMMON)
    causal_lm: bool = _kind("MODEL is a decoder-only model (GPT-2, Llama, …)", False, tasks=DECODERS)
    chat: bool = _kind(
        "lines are messages of a user, or lists of messages", False, tasks={CHAT}, needs=("causal_lm", True)
    )
    task: str | None = _kind("speech-to-text, text-to-speech, translation, …", tasks=ALL, metavar="NAME")
    device: str | None = _model(
        "cpu, cuda, cuda:1, … (default: cuda if there is one)", group=COMMON, per_shard=True, metavar="NAME"
    )
    workers: Any = _run("processes with a model each, or auto (needs ray)", accepts=whole(1, AUTO), metavar="N")
    resume: bool = _run("resume the run that left OUTPUT.part", False)
    overwrite: bool = _run("replace an existing OUTPUT or --score_path", False)
    retry_failed: bool = _run(
        "only the lines of OUTPUT that failed, in place", False, tasks=TO_TEXT, not_with=("overwrite", "merge")
    )
    quiet: bool = _run("no progress on stderr, only what went wrong", False)

    seed: int | None = _search(
        "seed of the samples (default: drawn, and kept for --resume)", accepts=whole(0), metavar="N"
    )
    forced_bos_token: str | None = _search(
        "token that every output starts with, as text", tasks={TEXT, TRANSCRIBE}, metavar="TOKEN"
    )
    generation_config: dict[str, Any] | None = _search(
        "generation settings as JSON; flags win over them", accepts=json_object, python=False, metavar="FILE"
    )
    gen: list[tuple[str, Any]] = _search("any setting of generate; may be repeated", [], metavar="KEY=VALUE")

    dtype: str | None = _model(
        "auto (as saved), float32, bfloat16 or float16",
        accepts=one_of(*DTYPES),
        not_with=("fp16", "bf16"),
        metavar="TYPE",
    )
    fp16: bool = _model("the same as --dtype float16", False, not_with=("bf16",))
    bf16: bool = _model("the same as --dtype bfloat16", False)
    attn_implementation: str | None = _model("eager, sdpa, … (default: the library's choice)", metavar="NAME")
    device_map: str | None = _model("auto: over all devices, by accelerate", accepts=one_of("auto"), metavar="MAP")
    without_fastgen_opt: bool = _model("run the unchanged library", False)

    input_format: str | None = _format(
        "text, jsonl or openai (default: by INPUT)", accepts=one_of(*FORMATS), metavar="FORMAT"
    )
    output_format: str | None = _format(
        "text, jsonl or openai (default: by OUTPUT, else as INPUT)", accepts=one_of(*FORMATS), metavar="FORMAT"
    )
    text_field: str = _format(
        "JSON field of the input; a.b is b of a (default: text)", "text", python=True, metavar="NAME"
    )
    id_field: str | None = _format("JSON field that names a record in messages", metavar="NAME")
    join_outputs: bool = _format("several outputs on one line of text, joined with ####", False, tasks=TO_TEXT)
    output_sequence_scores: bool = _format("in text, write SCORE<tab>TEXT (NA without beams)", False, tasks=TO_TEXT)

    prefix: str | None = _text("text before every line that is not empty", tasks=FROM_TEXT, metavar="TEXT")
    system: str | None = _text("system message before each chat", tasks={CHAT}, needs=("chat", True), metavar="TEXT")
    date: str | None = _text(
        "date in the chat template (default: today, kept for --resume)", accepts=iso_date, tasks={CHAT},
        needs=("chat", True), metavar="DATE",
    )  # fmt: skip
    src_lang: str | None = _text("language of INPUT, as the model calls it", tasks=ALL - DECODERS, metavar="LANG")
    tgt_lang: str | None = _text("language of OUTPUT, as the model calls it", tasks=ALL - DECODERS, metavar="LANG")
    speaker_id: int | None = _text("voice that speaks, from 0 on", accepts=whole(0), tasks=set(AUDIO_OUT), metavar="N")
    max_tokenizer_length: int | None = _size("truncate inputs to N tokens", group=TOKENS, tasks=FROM_TEXT)
    truncation: bool = _text(
        "truncate inputs to the model's limit", False, tasks={TEXT, CAUSAL, SPEAK}, not_with=("no_truncation",)
    )
    no_truncation: bool = _text("truncate nothing: what is too long fails", False)
    padding_side: str | None = _text(
        "left or right (default: MODEL's)", accepts=one_of("left", "right"), tasks=FROM_TEXT, metavar="SIDE"
    )
    include_special_tokens: bool = _text("keep special tokens such as </s> in the output", False, tasks=TO_TEXT)
    clean_up_tokenization_spaces: bool = _text("remove spaces before punctuation", False, tasks=TO_TEXT)

    batch_tokens: int | None = _size("most tokens per batch, padding and beams counted")
    window: int | None = _size("lines sorted by length together (default: 16 batches; 0: none)", accepts=whole(0))
    preprocess_workers: int = _size("threads that tokenize ahead (default: 1)", 1, affects=NOTHING)
    postprocess_workers: int = _size("threads that detokenize (default: 1)", 1, affects=NOTHING)
    n_obs: int | None = _part("only the first N lines (-1: all)", accepts=whole(1, UNSET), per_shard=False, metavar="N")

    ray: str | None = _process(
        "the cluster that --workers are on", tasks=TO_TEXT, needs=("workers", "N"), **ADDRESS_OR_AUTO
    )
    verbose: bool = _process("the speed of each worker", False)
    num_shards: Any = _part("divide INPUT into N runs, or auto", accepts=whole(1, AUTO), metavar="N")
    shard_id: Any = _part("which of them this is, from 0 on, or auto", accepts=whole(0, AUTO), metavar="I")
    merge: bool = _process("put all --num_shards together", False)

    reference_path: str | None = _score("references, a line each: prints ROUGE, BLEU, chrF, …", metavar="FILE")
    reference_field: str | None = _score("JSON field of the references", metavar="NAME")
    score_path: str | None = _score("where to write the scores as JSON", metavar="FILE")

    named: Callable[..., str] = field(default=as_argument, repr=False, compare=False)

    def __post_init__(self) -> None:
        for setting in settings_of_run():
            value = getattr(self, setting.name)
            if value is not None and setting.name != "gen":
                vars(self)[setting.name] = self._checked(setting.name, setting.metadata["accepts"], value)
        gen = [(name, self._checked(name, partial(_checked_setting, name), value)) for name, value in self.gen]
        input_format = self.input_format or ("jsonl" if kind_of_records(self.input) else "text")
        is_json = kind_of_records(self.output) == "JSON" or self.task in AUDIO_OUT or input_format != "text"
        output_format = self.output_format or ("jsonl" if is_json else "text")
        vars(self).update(gen=gen, input_format=input_format, output_format=output_format)
        if input_format == "openai":
            vars(self).update(chat=True, causal_lm=True, text_field="body.messages", id_field="custom_id")
        self._check_contradictions()
        self._check_settings()
        self._check_files()
        self._check_task()
        dtype = "float16" if self.fp16 else "bfloat16" if self.bf16 else self.dtype
        vars(self).update(dtype=dtype, fp16=False, bf16=False)

    def _checked(self, name: str, accepts: Callable[[Any], Any], value: Any) -> Any:
        try:
            return accepts(value)
        except BadValue as error:
            raise InputError(f"{self.named(name)}: {error}") from None

    @property
    def kind(self) -> str:
        """The kind of run: see `tasks` of a setting."""
        decoder = CHAT if self.chat else CAUSAL if self.causal_lm else TEXT
        return OF_SOUND.get(self.task or "", decoder)

    @property
    def reads(self) -> str | None:
        """The part of the model that reads tokens of inputs, encoder or decoder; None if inputs are sounds."""
        if self.kind in (TRANSCRIBE, INTERPRET):
            return None
        return "decoder" if self.kind in DECODERS else "encoder"

    @property
    def speaks(self) -> bool:
        """Whether outputs are sounds, in separate files."""
        return self.kind in AUDIO_OUT

    @property
    def lines_at_once(self) -> int:
        """The most lines that are prepared together: recordings may be hours long, and wait for the model in memory."""
        return LINES_AT_ONCE if self.reads else 1

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
            requested = self.named("num_return_sequences", number)
            joined = self.named("join_outputs", True)
            ways = f"{self.named('output_format', 'jsonl')}, or {joined} to join them with ####"
            raise InputError(f"{requested} does not go with one line of text per input (accepted: {ways})")

    def _check_contradictions(self) -> None:
        """Raises InputError for settings that exclude each other, and for those that need another one."""
        rivals = [
            (setting.name, *setting.metadata["not_with"]) for setting in settings_of_run() if self.setting(setting.name)
        ]
        exclusive = [[self.setting(name) for name in names] for names in (*rivals, ("max_length", "max_new_tokens"))]
        settings = [(name, self.named(name, value)) for name, value in self.gen]
        settings += [(setting, self.setting(name)) for name, setting in ASKS_FOR.items()]
        exclusive += [[what for name, what in settings if name == key] for key in dict(settings)]
        for contradicting in exclusive:
            if len(contradicting := list(filter(None, contradicting))) > 1:
                raise InputError(f"{' and '.join(contradicting)} contradict each other (accepted: one of them)")
        self.check_needs(knows_input=not self.reads_records)

    def check_needs(self, knows_input: bool = True) -> None:
        """Raises InputError for settings that need another one.

        knows_input: whether INPUT was looked at; before, records of any kind may turn out to be chats.
        """
        for setting in settings_of_run():
            needed = setting.metadata["needs"]
            if (
                needed
                and self.setting(setting.name)
                and not self.setting(needed[0])
                and (knows_input or needed[0] != "chat")
            ):
                raise InputError(f"{self.setting(setting.name)} needs {self.named(*needed)}")

    def _check_task(self) -> None:
        """Raises InputError for settings that do not go with the kind of run."""
        task = self.setting("task")
        if self.task not in TASKS and (near := get_close_matches(self.task or "", TASKS, cutoff=0.85)):
            raise InputError(f"{task} is not known (did you mean {near[0]}?)")
        tasks = {setting.name: setting.metadata["tasks"] for setting in settings_of_run()} | TASKS_OF_GENERATE
        requested = task if self.task in OF_SOUND else self.setting("chat") or self.setting("causal_lm")
        for name in sorted(tasks):
            if not (what := self.setting(name)) or self.kind in tasks[name]:
                continue
            if tasks[name] == set(AUDIO_OUT):
                raise InputError(f"{what} needs {self.named('task', ' or '.join(AUDIO_OUT))}")
            raise InputError(f"{what} does not go with {requested}, {WHY_REFUSED[self.kind]} (accepted: one of them)")

    def _check_settings(self) -> None:
        """Raises InputError for settings of generate that cannot be set, or that have no effect."""
        settings = dict(self.gen)
        from_file = self.generation_config or {}
        requested = [(name, value, self.named(name, value)) for name, value in self.gen]
        requested += [(name, value, f"{self.named('generation_config')}: {name}") for name, value in from_file.items()]
        for name, value, what in requested:
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
        has_records = kind_of_records(self.reference_path or "")
        of_records = ["text_field", "id_field", *([] if self.reference_path else ["reference_field"])]
        joined, written = self.setting("join_outputs"), self.setting("output_format")
        mistakes = [
            (score_path and not scored, f"{score_path} needs {references} or {field_of}"),
            (scored and self.output == STREAM, f"{scored} does not go with OUTPUT - (accepted: a file)"),
            (has_records and not self.reference_field, f"{scored} holds records (needs {field_of} NAME)"),
            *((is_text and what, f"{what} needs {in_format} jsonl") for what in map(self.setting, of_records)),
            (joined and self.writes_records, f"{joined} does not go with JSONL, which keeps outputs apart"),
            (
                self.writes_records and kind_of_records(self.output) not in (None, "JSON"),
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
    return tuple(setting for setting in fields(BatchConfig) if setting.metadata)


def names_of(**decisions: Any) -> tuple[str, ...]:
    """Returns the names of the settings with these decisions, such as affects=NOTHING."""
    chosen = decisions.items()
    return tuple(setting.name for setting in settings_of_run() if chosen <= setting.metadata.items())


def kind_of_records(path: str) -> str | None:
    """Returns what the records in a file of this name are, JSON or a table's format; None for lines of text."""
    end = re.search(r"\.(\w+?)(\.(gz|bz2|xz|zst))?$", path.lower())
    return None if end is None else KIND_OF_RECORDS.get(end[1])


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
