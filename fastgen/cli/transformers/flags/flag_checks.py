"""Flags that contradict each other, found before any file or model is touched."""

from difflib import get_close_matches
from typing import Any

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.flags.argument_types import STREAM, named_jsonl
from fastgen.cli.transformers.flags.run_config import HEARING, SPEAKING, TRANSLATION, RunConfig

_OUTPUTS = "the command asks for what it writes (accepted: --output_sequence_scores, --output_format jsonl)"
_OBJECT = "it is an object of a program, which no command line can give"
_DECIDED = "the command gives it"
# Settings that --gen and --generation_config cannot change, and why.
REFUSED_SETTINGS = {
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits", "output_attentions"), _OUTPUTS),
    **dict.fromkeys(("output_hidden_states", "return_segments", "return_token_timestamps"), _OUTPUTS),
    **dict.fromkeys(("streamer", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"), _OBJECT),
    **dict.fromkeys(("assistant_model", "compile_config", "continuous_batching_config", "synced_gpus"), _OBJECT),
    **dict.fromkeys(("negative_prompt_ids", "negative_prompt_attention_mask", "monitor_progress"), _OBJECT),
    **dict.fromkeys(("inputs", "input_ids", "attention_mask", "tokenizer", "generation_config"), _DECIDED),
    **dict.fromkeys(("custom_generate", "trust_remote_code"), "code from the hub is not run"),
    "is_assistant": "MODEL is no assistant of another model",
}


def check_flags(args: RunConfig) -> None:
    """Raise InputError for flags that contradict each other."""
    _check_settings(args)
    _check_lengths(args)
    _check_files(args)
    _check_kind_of_model(args)
    if args.truncation and args.chat:
        _contradict("--truncation", "--chat")


def check_several_outputs(args: RunConfig, num_return_sequences: int) -> None:
    """A line of text holds several outputs only where that was asked for."""
    if num_return_sequences > 1 and not args.join_outputs and not args.writes_jsonl:
        raise InputError(
            f"--num_return_sequences {num_return_sequences} does not go with one line of text per input "
            "(accepted: --output_format jsonl, or --join_outputs to join them with ####)"
        )


def _check_settings(args: RunConfig) -> None:
    """Settings of generate: each given once, none that the command decides, and none without effect."""
    given = _given(args)
    from_file = args.generation_config or {}
    for key, value in [*((key, value) for key, value, _ in given), *from_file.items()]:
        if key in REFUSED_SETTINGS and value:
            raise InputError(f"{_source(args, key)} {key} cannot be set: {REFUSED_SETTINGS[key]}")
    flags: dict[str, str] = {}
    for key, _, flag in given:
        if key in flags:
            _contradict(flags[key], flag)
        flags[key] = flag
    values = {key: value for key, value, _ in given}
    for flag in ("temperature", "top_k", "top_p"):
        if getattr(args, flag) is not None and not (from_file | values).get("do_sample"):
            raise InputError(f"--{flag} {getattr(args, flag)} has no effect without --do_sample")
    check_several_outputs(args, values.get("num_return_sequences") or 1)


def _given(args: RunConfig) -> list[tuple[str, Any, str]]:
    """Name and value of every setting of generate that a flag gives, --gen and languages included, and that flag."""
    given = args.settings()
    if args.forced_bos_token is not None:
        given.append(("forced_bos_token_id", args.forced_bos_token, f"--forced_bos_token {args.forced_bos_token}"))
    if args.tgt_lang is not None:
        given.append(("forced_bos_token_id", args.tgt_lang, f"--tgt_lang {args.tgt_lang}"))
    if args.src_lang is not None and args.hears:
        given.append(("language", args.src_lang, f"--src_lang {args.src_lang}"))
    return [*given, *((key, value, f"--gen {key}={value}") for key, value in args.gen)]


def _source(args: RunConfig, key: str) -> str:
    return "--gen" if key in dict(args.gen) else "--generation_config:"


def _check_lengths(args: RunConfig) -> None:
    given = {key: (value, flag) for key, value, flag in _given(args) if value is not None}
    limits = {key: given[key] for key in ("max_length", "max_new_tokens") if key in given}
    if len(limits) == 2:
        _contradict(*(flag for _, flag in limits.values()))
    shortest, short_flag = given.get("min_length", (0, ""))
    for key, (longest, long_flag) in limits.items():
        # A causal LM's shortest length counts the prompt, so nothing can be said before the prompts are known.
        if shortest > longest and (key == "max_length" or not args.causal_lm):
            raise InputError(f"{short_flag} is more than {long_flag}")


def _check_files(args: RunConfig) -> None:
    references = {flag: getattr(args, flag) for flag in ("reference_path", "reference_field")}
    scored = [f"--{flag} {value}" for flag, value in references.items() if value is not None]
    if args.score_path is not None and not scored:
        raise InputError(f"--score_path {args.score_path} needs --reference_path or --reference_field")
    for name, path in (("INPUT", args.input), ("OUTPUT", args.output)):
        if args.resume and path == STREAM:
            raise InputError(f"--resume does not go with {name} -, which cannot be gone on with (accepted: a file)")
    if scored and args.output == STREAM:
        raise InputError(f"{scored[0]} does not go with OUTPUT - (accepted: a file)")
    if args.reference_path is not None and named_jsonl(args.reference_path) and args.reference_field is None:
        raise InputError(
            f"{scored[0]} holds JSON records (needs --reference_field NAME, which of their fields to take)"
        )
    of_input = ("text_field", "id_field", *(("reference_field",) if args.reference_path is None else ()))
    for flag in of_input:
        if getattr(args, flag) is not None and not args.reads_jsonl:
            raise InputError(f"--{flag} {getattr(args, flag)} needs --input_format jsonl")
    if args.join_outputs and args.writes_jsonl:
        raise InputError("--join_outputs does not go with JSONL, which keeps outputs apart (accepted: one of them)")


def _check_kind_of_model(args: RunConfig) -> None:
    tasks = {*HEARING, *SPEAKING, TRANSLATION}
    if args.task not in tasks and (near := get_close_matches(args.task or "", tasks, n=1, cutoff=0.85)):
        raise InputError(f"--task {args.task} is not known (did you mean {near[0]}?)")
    if args.chat and not args.causal_lm:
        raise InputError("--chat needs --causal_lm")
    if args.system is not None and not args.chat:
        raise InputError(f"--system {args.system} needs --chat")
    if args.causal_lm:
        _refuse(args, _OF_ENCODERS, "--causal_lm, which has no encoder (accepted: one of them)")
    if args.hears:
        _refuse(args, _OF_TEXTS_READ, f"--task {args.task}, whose inputs are audio files")
    if args.speaks:
        _refuse(args, _OF_TEXTS_WRITTEN, f"--task {args.task}, whose outputs are audio files")
        if args.output == STREAM or not args.writes_jsonl:
            asked = "OUTPUT -" if args.output == STREAM else "--output_format text"
            raise InputError(f"{asked} does not go with --task {args.task} (accepted: a file of JSON records)")
    elif args.speaker_id is not None:
        raise InputError(f"--speaker_id {args.speaker_id} needs --task {' or '.join(SPEAKING)}")


_OF_ENCODERS = ("decoder_start_token_id", "src_lang", "tgt_lang", "forced_bos_token")
_OF_TEXTS_READ = ("causal_lm", "prefix", "max_tokenizer_length", "truncation", "padding_side")
_OF_TEXTS_WRITTEN = (
    *("causal_lm", "num_return_sequences", "decoder_start_token_id", "forced_bos_token"),
    *("include_special_tokens", "clean_up_tokenization_spaces", "join_outputs", "output_sequence_scores"),
    *("reference_path", "reference_field"),
)


def _refuse(args: RunConfig, flags: tuple[str, ...], what: str) -> None:
    for flag in flags:
        value = getattr(args, flag)
        if value is not None and value is not False:
            raise InputError(f"--{flag}{'' if value is True else f' {value}'} does not go with {what}")


def _contradict(one: str, other: str) -> None:
    raise InputError(f"{one} and {other} contradict each other (accepted: one of them)")
