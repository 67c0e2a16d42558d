"""Device, model and tokenizer of a run, and checks of their limits, which come before any traceback.

Tests: tests/batch/test_settings.py, tests/batch/test_bad_input.py, tests/batch/test_dates.py
"""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from textwrap import shorten
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.utils import logging as library_logging

from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError, reason
from fastgen.batch.signature import misspelt, model_folder
from fastgen.batch.values import TODAY

LONGEST_LIST = 100  # characters of names of weights in a message
# Models that compute positions for any number of tokens; the number in the config is not a limit.
GROWING_POSITIONS = ("fsmt", "m2m_100", "nllb-moe", "xglm")
# The name of the function by which a chat template reads the clock, and a macro of this name, with %s for a table that
# turns the codes of strftime into text. The library passes only plain values to a template, no functions.
CLOCK = "strftime_now"
DATE_MACRO = r"""{% macro strftime_now(format) %}
{% set date = namespace(text=format) %}
{% for code, text in %s.items() %}
{% if code in format %}
{% set date.text = date.text | replace(code, text) %}
{% endif %}
{% endfor %}
{{ date.text | replace("\0", "%") }}{% endmacro %}
"""
# Tokenizers without a limit have 10**30.
NO_LIMIT = 10**9
SPEECH_TO_SPEECH = {  # the library has no auto class for them
    "seamless_m4t": "SeamlessM4TForSpeechToSpeech",
    "seamless_m4t_v2": "SeamlessM4Tv2ForSpeechToSpeech",
}


@dataclass
class Loaded:
    """A model in evaluation mode on its device, a tokenizer that can pad, and the arguments of generate.

    feature_extractor: turns sound into the model's inputs; None for models that read text. settings: arguments of
    generate. task_params: the settings for the task in the model's config. notes: messages for the user.
    """

    args: BatchConfig
    model: Any
    tokenizer: Any
    feature_extractor: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    task_params: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device for inputs; if the model's first weights are on disk, accelerate moves inputs further."""
        device = self.model.device
        return torch.device("cpu") if device.type == "meta" else device

    def value(self, name: str) -> Any:
        """Returns the value that generate will use, or None if neither flags, --generation_config nor model set it."""
        return self.settings[name] if name in self.settings else getattr(self.model.generation_config, name, None)


def load(args: BatchConfig, processor: str, has_weights: bool = True) -> Loaded:
    """Loads model and tokenizer. Raises InputError if MODEL does not exist, is broken, or cannot generate.

    processor: the library's class that makes inputs from lines. has_weights: False in a process that only plans.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = str(model_folder(args.model) or args.model)
    try:
        if has_weights:
            torch.zeros(1, device=device).item()  # reading fails on the meta device
        with _quiet_loading():
            config = transformers.AutoConfig.from_pretrained(source)
            kind = _class_of(args, config)
            options = {name: getattr(args, name) for name in ("attn_implementation", "device_map", "dtype")}
            options |= {} if has_weights else {"device_map": "meta"}
            options = {name: value for name, value in options.items() if value is not None}
            model, info = kind.from_pretrained(source, output_loading_info=True, **options)
            processing = getattr(transformers, processor).from_pretrained(source)
    except InputError:
        raise
    except Exception as error:
        # from_pretrained raises almost anything for a broken folder: OSError, ValueError, KeyError, SafetensorError, …
        flags = map(args.setting, ("device", "dtype", "attn_implementation"))
        what = " ".join(filter(None, [f"MODEL {args.model}", *flags]))
        raise InputError(misspelt(args.model) or f"{what}: cannot be loaded ({reason(error)})") from error
    if not model.can_generate():
        raise InputError(f"MODEL {args.model}: {type(model).__name__} cannot generate")
    parameters = dict(model.named_parameters())
    if missing := sorted(name for name in info["missing_keys"] if name in parameters):
        names = shorten(", ".join(missing), LONGEST_LIST, placeholder=" …")
        raise InputError(f"MODEL {args.model}: has no weights for {names}: it would generate at random")
    if args.device_map is None and has_weights:
        model.to(device)
    tokenizer = getattr(processing, "tokenizer", processing)
    return Loaded(args, model.eval(), tokenizer, getattr(processing, "feature_extractor", None))


def _class_of(args: BatchConfig, config: Any) -> Any:
    """Returns the class that loads the model, for the task in the settings."""
    transcribing = auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "AutoModelForSpeechSeq2Seq"
    sounds = {
        "automatic-speech-recognition": transcribing,
        "speech-to-text": transcribing,
        "text-to-speech": (tuple(SPEECH_TO_SPEECH), "AutoModelForTextToWaveform"),
        "speech-to-speech": (SPEECH_TO_SPEECH, ""),
    }
    of_text = f"without {args.named('causal_lm')} and {args.named('task')}"
    causal = f"with {args.named('causal_lm', True)}"
    classes: dict[str, tuple[Any, str]] = {
        of_text: (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "AutoModelForSeq2SeqLM"),
        causal: (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM"),
        **{f"with {args.named('task', task)}": names for task, names in sounds.items()},
    }
    requested = causal if args.causal_lm else of_text
    if args.task in sounds:
        requested = f"with {args.setting('task')}"
    kind = config.model_type
    supported, name = classes[requested]
    if kind not in supported:
        ways = " or ".join(way for way, (names, _) in classes.items() if kind in names)
        accepted = f"accepted {ways}" if ways else "accepted: models that generate text from text or from speech"
        raise InputError(f"MODEL {args.model}: {kind} cannot generate {requested} ({accepted})")
    return getattr(transformers, name or supported[kind])


def prepare_tokenizer(args: BatchConfig, tokenizer: Any, padding_side: str | None) -> None:
    """Makes the tokenizer able to pad; padding_side: unless --padding_side is set; None: the tokenizer's own side."""
    # For a folder without tokenizer files, transformers may silently build a tokenizer without words.
    if not hasattr(tokenizer, "get_vocab") or len(tokenizer.get_vocab()) - len(tokenizer.all_special_tokens) < 2:
        raise InputError(f"MODEL {args.model}: has no tokenizer")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(f"MODEL {args.model}: its tokenizer has neither a pad nor an eos token")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = args.padding_side or padding_side or tokenizer.padding_side


def set_date(loaded: Loaded) -> BatchConfig:
    """Puts the run's date into the chat template, and returns the arguments with it; without it for other templates.

    Raises InputError for a date that the template does not have, and for shards that would have several dates.
    """
    args = loaded.args
    template = loaded.tokenizer.get_chat_template()
    if CLOCK not in template:
        if args.date not in (None, TODAY):
            raise InputError(f"{args.setting('date')}: the chat template of MODEL {args.model} has no date")
        return replace(args, date=None)
    if args.date == TODAY:
        now = datetime.now().isoformat(timespec="seconds")
        if args.num_shards is not None:
            why = f"the chat template of MODEL {args.model} has today's date, and shards may start on different days"
            raise InputError(f"{args.setting('num_shards')}: {why} (accepted: with {args.named('date', now[:10])})")
        loaded.notes.append(f"the date in prompts: {args.named('date', now)}")
        args = replace(args, date=now)
    if args.date is not None:  # without one, each call of the template reads the clock
        loaded.tokenizer.chat_template = _dated(template, datetime.fromisoformat(args.date))
    return args


def _dated(template: str, date: datetime) -> str:
    """Returns a chat template in which the macro replaces the library's function that reads the clock."""
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in string.ascii_letters]
    table = {"%%": "\0"} | {code: date.strftime(code) for code in codes}
    return DATE_MACRO.replace("%s", json.dumps(table), 1) + template


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Silences progress bars and reports of transformers and the hub; a message in one line has what matters."""
    with ExitStack() as stack:
        for logger in map(logging.getLogger, ("transformers", "huggingface_hub")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        if library_logging.is_progress_bar_enabled():
            library_logging.disable_progress_bar()
            stack.callback(library_logging.enable_progress_bar)
        yield


def positions(config: Any, part: str) -> int | None:
    """Returns how many tokens the "encoder" or the "decoder" has positions for; None if there is no limit."""
    if config.model_type in GROWING_POSITIONS:
        return None
    text_config = getattr(config, part, None)  # EncoderDecoderModel and T5Gemma have separate configs
    if not isinstance(text_config, transformers.PretrainedConfig):
        text_config = config.get_text_config(**{part: True})
    for name in (f"max_{part}_position_embeddings", "max_position_embeddings"):
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def embedded_tokens(model: Any) -> int | None:
    """Returns how many tokens the model has embeddings for; after an invalid one, a GPU process is unusable."""
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embedding.num_embeddings if isinstance(embedding, torch.nn.Embedding) else None


def check_limits(loaded: Loaded) -> None:
    """Raises InputError for flags that this model does not support, whatever the input."""
    args, config = loaded.args, loaded.model.config
    args.check_outputs(loaded.value("num_return_sequences") or 1)
    limits = {name: positions(config, "decoder") for name in ("max_length", "max_new_tokens") if args.setting(name)}
    limits["max_tokenizer_length"] = None if loaded.args.reads is None else positions(config, loaded.args.reads)
    last_token = config.get_text_config(decoder=True).vocab_size - 1
    for name, value in {"max_tokenizer_length": args.max_tokenizer_length, **loaded.settings}.items():
        limit = last_token if name.endswith("_token_id") else limits.get(name)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if limit is not None and isinstance(item, int) and item > limit:
                raise InputError(f"{args.named(name, item)} is more than MODEL allows (accepted: up to {limit})")
    threshold = loaded.value("no_speech_threshold")
    if threshold is not None and loaded.settings.get("logprob_threshold") is None:
        raise InputError(f"no_speech_threshold {threshold} needs a logprob_threshold (accepted: both)")
    most = input_limit(loaded)
    if most is not None and most[0] < 1:
        raise InputError(f"no input fits: at most {most[0]} tokens are left for it ({most[1]})")


def lengths_of_inputs(loaded: Loaded) -> tuple[int | None, tuple[int, str] | None]:
    """Returns the length to which inputs are truncated, or None, and their limit as from `input_limit`."""
    args = loaded.args
    limit = input_limit(loaded)
    requested = args.max_tokenizer_length
    if args.truncation:
        return min(filter(None, (requested, limit and limit[0])), default=None), limit
    if args.no_truncation and requested is not None:
        limit = min(filter(None, (limit, (requested, args.setting("max_tokenizer_length")))))
        requested = None
    return requested, limit


def input_limit(loaded: Loaded, new_tokens: int | None = None) -> tuple[int, str] | None:
    """Returns the most tokens that an input may have, and what sets the limit; None without one, and for speech.

    new_tokens: the record's own number of tokens to generate.
    """
    args = loaded.args
    if loaded.args.reads is None:
        return None
    limits = []
    # --max_tokenizer_length replaces the tokenizer's own limit.
    if args.max_tokenizer_length is None and (own := loaded.tokenizer.model_max_length) < NO_LIMIT:
        limits.append((own, f"MODEL's tokenizer; {args.named('max_tokenizer_length')} sets another"))
    number = positions(loaded.model.config, loaded.args.reads)
    total = loaded.value("max_length")
    new_tokens = new_tokens or loaded.value("max_new_tokens")
    if loaded.args.reads == "encoder" and number is not None:
        limits.append((number, "MODEL's positions"))
    elif number is not None:
        following = new_tokens or 1
        limits.append((number - following, f"MODEL's {number} positions less {following} for generated tokens"))
    if loaded.args.reads == "decoder" and new_tokens is None and total is not None:
        name = args.setting("max_length") or f"max_length {total}"
        limits.append((total - 1, f"{name}, which counts the prompt"))
    return min(limits, default=None)
