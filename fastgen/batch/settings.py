"""The settings of transformers' generate for the flags of a run, the model's generation_config and its languages.

Multilingual models differ in where languages go. Most tokenizers (NLLB, mBART, M2M100) put the source's code around the
input, and the decoder is forced to begin with the target's. The first mBART and PLBart were trained with the target's
code as the decoder's first input. SeamlessM4T and Whisper look languages up inside generate.

Tests: tests/batch/test_settings.py, tests/batch/test_file_order.py
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation.configuration_utils import GenerationMode

from fastgen.batch.config import TASKS, BatchConfig
from fastgen.batch.errors import InputError, did_you_mean
from fastgen.batch.model import Loaded, positions
from fastgen.optimizer.transformers.compat import REPETITION_PENALTY_COUNTS_PADDING

# A model's own value of the second setting would silently override a flag for the first.
OVERRULED_BY = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}
# Arguments of a model's own generate with plain values, which GenerationConfig need not have.
OWN_ARGUMENTS = (
    *("language", "task", "return_timestamps", "is_multilingual", "condition_on_prev_tokens", "tgt_lang"),
    *("prompt_condition_type", "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"),
)
# Tokenizers of models whose decoder begins with the target's code instead of a start token.
DECODER_STARTS_WITH_LANGUAGE = ("MBartTokenizer", "PLBartTokenizer")
ACCEPTED = "accepted: fields of transformers' GenerationConfig"
# Other fields of a generation_config.json.
METADATA = ("transformers_version", "_from_model_config", "_commit_hash")
_MODE = GenerationMode
MODES = (_MODE.GREEDY_SEARCH, _MODE.SAMPLE, _MODE.BEAM_SEARCH, _MODE.BEAM_SAMPLE, _MODE.ASSISTED_GENERATION)


def set_generation(loaded: Loaded, prefixes: tuple[str, ...] = ()) -> None:
    """Fills `loaded.settings` with the task's settings, overridden by the run's.

    A `generation_config` works like `model.generate(generation_config=…)`: settings that it omits stay the model's.
    prefixes: prefixes of settings for one of the models that MODEL consists of. Raises InputError for settings that the
    library or this model does not have or refuses.
    """
    args = loaded.args
    own = loaded.model.generation_config
    setting_names = known_settings(loaded.model)
    _set_generation_config(loaded, setting_names)
    setting_names |= {prefix + name for prefix in prefixes for name in setting_names}
    for key, value in args.gen:
        if key not in setting_names:
            what = args.named(key, value)
            raise InputError(f"{what}: there is no such setting{did_you_mean(key, setting_names, ACCEPTED)}")
    loaded.task_params = _task_params(loaded)
    settings = {name: value for name, value in loaded.task_params.items() if hasattr(own, name)}
    settings |= dict(args.gen) | language_settings(loaded)
    if dict(args.gen).get("max_new_tokens") is not None:
        settings["max_length"] = None  # without effect, and the library would warn for every batch
    for name, stronger in OVERRULED_BY.items():
        if name in settings and stronger not in settings and getattr(own, stronger) is not None:
            settings[stronger] = None
    if own.pad_token_id is None and settings.get("pad_token_id") is None:
        settings["pad_token_id"] = loaded.tokenizer.pad_token_id
    config = copy.deepcopy(own)
    names = [args.named(name, value) for name, value in args.gen]
    names += [args.named("generation_config")] * (args.generation_config is not None)
    requested = ", ".join(names) or "the settings of MODEL"
    try:
        if isinstance(watermark := settings.get("watermarking_config", own.watermarking_config), dict):
            settings["watermarking_config"] = WatermarkingConfig.from_dict(watermark)
        config.update(**settings)
        mode = config.get_generation_mode()
    except (ValueError, TypeError, AttributeError) as error:  # generate would refuse the first batch
        raise InputError(f"{requested} cannot be used: {error}") from error
    if mode not in MODES or config.cache_implementation == "paged":
        why = f"{mode.value.replace('_', ' ')}, whose code is on the hub" if mode not in MODES else "pages of a cache"
        raise InputError(f"{requested} ask for {why} (accepted: greedy search, sampling, beam search)")
    loaded.settings = settings
    # These settings need a tokenizer.
    if any(loaded.value(name) for name in ("stop_strings", "token_healing")):
        settings["tokenizer"] = loaded.tokenizer


def _set_generation_config(loaded: Loaded, setting_names: set[str]) -> None:
    """Sets the run's `generation_config` on the model; notes fields that change nothing."""
    args = loaded.args
    for key, value in (args.generation_config or {}).items():
        if key not in setting_names and key not in METADATA:
            hint = did_you_mean(key, setting_names, ACCEPTED)
            loaded.notes.append(f"note: {args.named('generation_config')}: {key} changes nothing{hint}")
        elif value is not None and key not in METADATA:
            setattr(loaded.model.generation_config, key, value)


def _task_params(loaded: Loaded) -> dict[str, Any]:
    """Returns the settings for the task in the model's config (task_specific_params), such as the prefix of T5.

    Empty without a task: the library's generate ignores these settings, too, although FastSeq uses summarization's.
    """
    args = loaded.args
    tasks = getattr(loaded.model.config, "task_specific_params", None) or {}
    if (tasks or args.task) and args.task not in (*TASKS, *tasks):
        requested = args.setting("task") or f"a run without {args.named('task')}"
        loaded.notes.append(f"note: MODEL has no settings for {requested} (it has: {', '.join(tasks) or 'none'})")
    return tasks.get(args.task, {})


def known_settings(model: Any) -> set[str]:
    """Returns the fields of the library's and the model's GenerationConfig, and arguments of the model's generate."""
    own_arguments = inspect.signature(type(model).generate).parameters
    names = {*vars(GenerationConfig()), *vars(model.generation_config)}
    names |= {name for name in OWN_ARGUMENTS if name in own_arguments}
    return {name for name in names if not name.startswith("_")} - set(METADATA)


def token_ids(value: int | list[int] | None) -> list[int]:
    """Returns the ids of a setting with one, several or none."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def reasons_to_keep_file_order(loaded: Loaded) -> list[str]:
    """Returns why an output depends on the rest of its batch in the unpatched library, as phrases for a note."""
    value, reads = loaded.value, loaded.args.reads
    config = loaded.model.config
    kind = loaded.model.config.model_type
    is_sparse = kind == "bigbird_pegasus" and config.attention_type == "block_sparse"
    shares_experts = kind == "switch_transformers" or (
        kind == "nllb-moe" and config.moe_eval_capacity_token_fraction < 1
    )
    repeats = value("encoder_repetition_penalty") or 1.0
    ngrams = value("encoder_no_repeat_ngram_size")
    reasons = {
        "sampling draws all random numbers of a batch in a row": value("do_sample") and not draws_by_row(loaded),
        "the fallback to other temperatures samples": isinstance(value("temperature"), (list, tuple)),
        "max_time ends whole batches": value("max_time") is not None,
        "condition_on_prev_tokens pads earlier text to the longest of a batch": value("condition_on_prev_tokens"),
        "encoder_repetition_penalty counts padding": reads and repeats != 1.0,
        "encoder_no_repeat_ngram_size counts padding": reads and ngrams,
        **(_reasons_of_prompts(loaded) if reads == "decoder" else {}),
        "MODEL's attention depends on the longest input of a batch": is_sparse,
        "MODEL's experts take a part of each batch only": shares_experts,
        "the end of a sound depends on how much it is padded": loaded.args.speaks,
        "outputs of MODEL depend on padding": not loaded.args.speaks and depends_on_padding(loaded),
    }
    return [reason for reason, holds in reasons.items() if holds]


def depends_on_padding(loaded: Loaded) -> bool:
    """Whether outputs depend on padding, by a rule for the architecture, without a measurement.

    Masks keep padding out of attention, but not out of positions that are counted from the first column (a causal
    LM without position_ids, an encoder padded on the left), recurrent states, and convolutions over sounds of
    several lengths.
    """
    if not loaded.args.reads:
        return getattr(loaded.feature_extractor, "nb_max_frames", None) is None  # Whisper's inputs have one length
    left = loaded.tokenizer.padding_side == "left"
    if loaded.args.reads == "encoder":
        return left
    has_positions = "position_ids" in inspect.signature(type(loaded.model).forward).parameters
    return not (left and has_positions) or getattr(loaded.model, "_is_stateful", False)


def draws_by_row(loaded: Loaded, settings: dict[str, Any] | None = None) -> bool:
    """Whether outputs are sampled with separate random numbers for each line. settings: override the run's."""
    from fastgen.optimizer.transformers.row_draws import can_draw_by_row

    def value(name: str) -> Any:
        return settings[name] if settings is not None and name in settings else loaded.value(name)

    unsupported = ("prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha", "dola_layers")
    has_beams = (value("num_beams") or 1) > 1
    return bool(value("do_sample")) and not any(map(value, unsupported)) and can_draw_by_row(loaded.model, has_beams)


def _reasons_of_prompts(loaded: Loaded) -> dict[str, Any]:
    """Returns settings that treat padding as prompt: causal LMs continue prompts that are padded on the left."""
    value = loaded.value
    counts_prompt = value("max_new_tokens") is None
    longest = value("max_length")
    ngram = value("no_repeat_ngram_size") or 0
    pad_ends = value("pad_token_id") in token_ids(value("eos_token_id"))
    ends_at_position = longest is None and positions(loaded.model.config, "decoder") is not None
    penalty = (value("repetition_penalty") or 1.0) != 1.0
    # [[id, …], …], or {(id, …): bias}, or [[[id, …], bias], …]
    sequences = [*(value("bad_words_ids") or ()), *(value("sequence_bias") or ())]
    sequences = [sequence[0] if isinstance(sequence[0], (list, tuple)) else sequence for sequence in sequences]
    return {
        "max_length counts padding": counts_prompt and longest is not None,
        "without a length, outputs end at MODEL's last position, padding counted": counts_prompt and ends_at_position,
        "min_length counts padding": value("min_length") and value("min_new_tokens") is None,
        "repetition_penalty counts padding": penalty and REPETITION_PENALTY_COUNTS_PADDING,
        # An n-gram with padding in it blocks something only after a token that pads and that ends no output.
        "no_repeat_ngram_size counts padding": ngram == 1 or (ngram > 1 and not pad_ends),
        "sequences of several tokens are looked for in padding": any(len(sequence) > 1 for sequence in sequences),
        "forced_bos_token_id looks at the longest prompt of a batch": value("forced_bos_token_id") is not None,
        "the watermark reads padding": value("watermarking_config") is not None,
        "token_healing pads the prompts again": value("token_healing"),
    }


def language_settings(loaded: Loaded) -> dict[str, Any]:
    """Sets the tokenizer's source language; returns arguments of generate for the beginning of outputs.

    Raises InputError for a language that MODEL does not have.
    """
    args, tokenizer = loaded.args, loaded.tokenizer
    takes = inspect.signature(type(loaded.model).generate).parameters
    if "language" in takes:
        return _of_whisper(args, loaded.model.generation_config)
    ids = language_ids(tokenizer)
    codes: dict[str, str] = {}
    for name in filter(args.setting, ("tgt_lang", "src_lang")):
        if not (ids and hasattr(tokenizer, name)):
            raise InputError(f"{args.setting(name)}: MODEL {args.model} has no languages to choose from")
        codes[name] = _find(args, name, getattr(args, name), ids)
        setattr(tokenizer, name, codes[name])
    if codes:
        # Some tokenizers apply a new tgt_lang to the texts that follow.
        tokenizer.src_lang = tokenizer.src_lang
    if args.forced_bos_token is not None:
        token = args.forced_bos_token
        index = tokenizer.convert_tokens_to_ids(args.forced_bos_token)
        if index is None or (index == tokenizer.unk_token_id and token != tokenizer.unk_token):
            raise InputError(f"{args.setting('forced_bos_token')}: is not one token of MODEL's vocabulary")
        return {"forced_bos_token_id": index}
    if "tgt_lang" not in codes:
        return {}
    if "tgt_lang" in takes:
        return {"tgt_lang": codes["tgt_lang"].strip("_")}
    starts = type(tokenizer).__name__.removesuffix("Fast") in DECODER_STARTS_WITH_LANGUAGE
    if starts and (rival := args.setting("decoder_start_token_id")):
        raise InputError(f"{rival} and {args.setting('tgt_lang')} contradict each other (accepted: one of them)")
    return {"decoder_start_token_id" if starts else "forced_bos_token_id": ids[codes["tgt_lang"]]}


def language_ids(tokenizer: Any) -> dict[str, int]:
    """Returns a tokenizer's languages and their token ids; empty for a tokenizer without languages."""
    codes = getattr(tokenizer, "lang_code_to_id", None)
    if codes is None:
        if not isinstance(getattr(type(tokenizer), "src_lang", None), property):
            return {}
        # NLLB and SeamlessM4T have no table: their languages are their special tokens without a name.
        named = [token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)]
        tokens = [token for token in tokenizer.all_special_tokens if token not in named and token.strip("<>") == token]
        codes = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    return {code: index for code, index in codes.items() if index is not None and index != tokenizer.unk_token_id}


def _of_whisper(args: BatchConfig, config: Any) -> dict[str, Any]:
    """Returns Whisper's settings for languages: its generate takes names and codes, and checks them with a batch."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    if args.tgt_lang is not None:
        other = "Whisper writes the spoken language, or English (the setting task=translate of generate)"
        raise InputError(f"{args.setting('tgt_lang')}: {other}")
    if args.src_lang is None:
        return {}
    if getattr(config, "lang_to_id", None) is None or not getattr(config, "is_multilingual", True):
        raise InputError(f"{args.setting('src_lang')}: MODEL {args.model} has no languages to choose from")
    languages = {token.strip("<|>") for token in config.lang_to_id}
    languages |= {name for name, code in TO_LANGUAGE_CODE.items() if code in languages}
    _find(args, "src_lang", args.src_lang.lower(), languages)
    return {"language": args.src_lang}


def _find(args: BatchConfig, name: str, language: str, languages: Collection[str]) -> str:
    """Returns the tokenizer's spelling of a language: PLBart and SeamlessM4T use __eng__."""
    for code in (language, f"__{language}__"):
        if code in languages:
            return code
    accepted = nearest(language, [code.strip("_") for code in languages])
    raise InputError(f"{args.named(name, language)} is not known to MODEL (accepted: {accepted})")


def nearest(language: str, languages: Collection[str]) -> str:
    """Returns languages with similar names, for a message."""
    nearest = get_close_matches(language, list(languages), n=3, cutoff=0.4) or sorted(languages)[:3]
    return ", ".join(nearest) + (f" and {len(languages) - len(nearest)} more" if len(languages) > len(nearest) else "")
