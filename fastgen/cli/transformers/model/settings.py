"""What the flags of a run mean for transformers' generate, given the model's own generation_config."""

import sys
from typing import Any

import transformers
from packaging.version import Version

from fastgen.cli.transformers.files.records import reason
from fastgen.cli.transformers.flags.generation_config import check_values, gen_settings
from fastgen.cli.transformers.flags.languages import language_settings
from fastgen.cli.transformers.flags.run_config import TRANSLATION, RunConfig
from fastgen.cli.transformers.model.loading import LoadedModel, positions
from fastgen.cli.transformers.model.padding import outputs_depend_on_padding_sync
from fastgen.cli.transformers.model.speaking import speaker_settings

# A model's own value of the second would silently win over the flag that sets the first.
OVERRULED_BY = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}
# What brings the scores of beams.
SCORES = {"output_scores": True, "return_dict_in_generate": True}
# Until then it took padding for tokens that were seen.
REPETITION_PENALTY_COUNTS_PADDING = Version(transformers.__version__) < Version("5.23")


def task_settings(args: RunConfig, config: transformers.PretrainedConfig) -> dict[str, Any]:
    """What the model's config keeps for --task (its task_specific_params), the prefix of T5 among it.

    Without --task nothing, where FastSeq takes summarization: the library's generate does not use them, either.
    """
    if args.hears or args.speaks:
        return {}
    known = getattr(config, "task_specific_params", None) or {}
    has = ", ".join(known) or "none"
    if args.task is None and known and not args.quiet:
        print(f"note: MODEL has settings for some tasks, which only --task NAME uses (it has: {has})", file=sys.stderr)
    if args.task not in (None, TRANSLATION, *known):
        print(f"note: MODEL has no settings for --task {args.task} (it has: {has})", file=sys.stderr)
    return known.get(args.task, {})


def generate_arguments(args: RunConfig, loaded: LoadedModel, task: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of generate: the task's settings, and over them the flags that were given.

    Raises InputError for settings that the library or this model does not know or refuses.
    """
    own = loaded.generation_config
    if own is None:
        return speaker_settings(args, loaded.model)
    settings = {name: value for name, value in task.items() if hasattr(own, name)}
    given = gen_settings(args, loaded.model) | language_settings(args, loaded.tokenizer, loaded.model)
    given |= {name: value for name, value, _ in args.settings()}
    if loaded.speaks:
        given |= speaker_settings(args, loaded.model)
    settings |= given
    if given.get("max_new_tokens") is not None:
        settings["max_length"] = None  # it has no effect then, and the library would say so for every batch
    for name, stronger in OVERRULED_BY.items():
        if name in settings and stronger not in settings and getattr(own, stronger) is not None:
            settings[stronger] = None
    if own.pad_token_id is None and settings.get("pad_token_id") is None and not loaded.speaks:
        settings["pad_token_id"] = loaded.tokenizer.pad_token_id
    check_values(args, loaded.model, settings)
    # These need words, and generate has only tokens.
    if any(effective(name, settings, loaded) for name in ("stop_strings", "token_healing")):
        settings["tokenizer"] = loaded.tokenizer
    if loaded.is_whisper and effective("return_timestamps", settings, loaded):
        settings["return_segments"] = True
    # Whisper's generate decodes a sound in several passes, and returns but the last one where it returns scores.
    has_scores = (effective("num_beams", settings, loaded) or 1) > 1 and not loaded.is_whisper
    if has_scores and not loaded.speaks and (args.output_sequence_scores or args.writes_jsonl):
        settings |= SCORES
    return settings


def effective(name: str, settings: dict[str, Any], loaded: LoadedModel) -> Any:
    """The value generate will use, or None where neither flags, nor --generation_config, nor the model say."""
    return settings[name] if name in settings else getattr(loaded.generation_config, name, None)


def reasons_to_keep_file_order(args: RunConfig, settings: dict[str, Any], loaded: LoadedModel) -> list[str]:
    """Why an output depends on what else is in its batch, in the unpatched library: phrases for a note, or nothing.

    Where there is a reason, batches of lines sorted by length would give other outputs than batches in file order.
    """

    def value(name: str) -> Any:
        return effective(name, settings, loaded)

    if loaded.speaks:
        return ["the end of a sound depends on how much it is padded"]
    reasons = []
    if value("do_sample"):
        reasons.append("sampling draws all its random numbers in a row")
    if isinstance(value("temperature"), (list, tuple)):
        reasons.append("the fallback to other temperatures samples")
    if value("max_time") is not None:
        reasons.append("max_time ends whole batches")
    if value("condition_on_prev_tokens"):
        reasons.append("condition_on_prev_tokens pads earlier text to the longest of a batch")
    if loaded.feature_extractor is None:
        if (value("encoder_repetition_penalty") or 1.0) != 1.0:
            reasons.append("encoder_repetition_penalty counts padding")
        if value("encoder_no_repeat_ngram_size"):
            reasons.append("encoder_no_repeat_ngram_size counts padding")
        if loaded.causal_lm:
            reasons += _reasons_of_prompts(settings, loaded)
    return reasons + _reasons_of_architecture(loaded) or _measured_reasons(settings, loaded)


def _reasons_of_prompts(settings: dict[str, Any], loaded: LoadedModel) -> list[str]:
    """Causal LMs go on from prompts that are padded on the left, and some settings take padding for prompt."""

    def value(name: str) -> Any:
        return effective(name, settings, loaded)

    reasons = []
    if value("max_new_tokens") is None:
        if value("max_length") is not None:
            reasons.append("max_length counts padding")
        elif positions(loaded.model.config, "decoder") is not None:
            reasons.append("without a length, outputs end at MODEL's last position, padding counted")
    if value("min_length") and value("min_new_tokens") is None:
        reasons.append("min_length counts padding")
    if (value("repetition_penalty") or 1.0) != 1.0 and REPETITION_PENALTY_COUNTS_PADDING:
        reasons.append("repetition_penalty counts padding")
    # An n-gram with padding in it blocks something only after a token that pads and that ends no output.
    size = value("no_repeat_ngram_size") or 0
    if size == 1 or (size > 1 and value("pad_token_id") not in token_ids(value("eos_token_id"))):
        reasons.append("no_repeat_ngram_size counts padding")
    if any(_several_tokens(value(name)) for name in ("bad_words_ids", "sequence_bias")):
        reasons.append("sequences of several tokens are looked for in padding")
    if value("forced_bos_token_id") is not None:
        reasons.append("forced_bos_token_id looks at the longest prompt of a batch")
    if value("watermarking_config") is not None:
        reasons.append("the watermark reads padding")
    if value("token_healing"):
        reasons.append("token_healing pads the prompts again")
    return reasons


def _reasons_of_architecture(loaded: LoadedModel) -> list[str]:
    """What depends on more than a few inputs of a few tokens, with which it is measured."""
    config = loaded.model.config
    if config.model_type == "bigbird_pegasus" and config.attention_type == "block_sparse":
        return ["MODEL's attention depends on the longest input of a batch"]
    if config.model_type == "nllb-moe" and not config.moe_eval_capacity_token_fraction >= 1:
        return ["MODEL's experts take a part of each batch only"]
    return []


def _measured_reasons(settings: dict[str, Any], loaded: LoadedModel) -> list[str]:
    language = {name: settings[name] for name in ("tgt_lang",) if name in settings}  # without it, Seamless M4T warns
    try:
        depend = outputs_depend_on_padding_sync(loaded, **language)
    except Exception as error:  # of a model that takes no such inputs, or a library that it needs
        return [f"whether outputs of MODEL depend on padding cannot be measured ({reason(error)})"]
    return ["outputs of MODEL depend on padding"] if depend else []


def token_ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _several_tokens(sequences: Any) -> bool:
    """Of bad_words_ids [[id, …], …] or sequence_bias {(id, …): bias} or [[[id, …], bias], …]."""
    if not sequences:
        return False
    keys = [each[0] if isinstance(each[0], (list, tuple)) else each for each in sequences]
    return any(len(key) > 1 for key in keys)
