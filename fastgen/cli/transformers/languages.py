"""--src_lang, --tgt_lang and --forced_bos_token: what they mean for the tokenizer of a model, and for generate.

Multilingual models differ in where they want the languages. Most tokenizers (NLLB, mBART, M2M100) put the source's
code around the input and the decoder is forced to begin with the target's. The first mBART and PLBart were trained
with the target's code as the decoder's first input. SeamlessM4T and Whisper look languages up inside generate.

Tests: tests/cli/transformers/test_cli_flags.py
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.args import RunConfig
from fastgen.cli.transformers.model import Loaded

# Tokenizers of models whose decoder takes the target's code in place of a start token.
DECODER_STARTS_WITH_LANGUAGE = ("MBartTokenizer", "PLBartTokenizer")
SEAMLESS = ("seamless_m4t", "seamless_m4t_v2")


def language_settings(loaded: Loaded) -> dict[str, Any]:
    """Has the tokenizer mark inputs as texts of --src_lang; returns arguments of generate that begin outputs as asked.

    Raises InputError for a language that MODEL has not.
    """
    args, tokenizer = loaded.args, loaded.tokenizer
    if loaded.model.config.model_type == "whisper":
        return _of_whisper(args, loaded.model.generation_config)
    known = language_ids(tokenizer)
    for flag, attribute in (("--tgt_lang", "tgt_lang"), ("--src_lang", "src_lang")):
        language = getattr(args, attribute)
        if language is None:
            continue
        if not (known and hasattr(tokenizer, attribute)):
            raise InputError(f"{flag} {language}: MODEL {args.model} has no languages to choose from")
        setattr(tokenizer, attribute, _find(flag, language, known))
    if args.src_lang is not None or args.tgt_lang is not None:
        # Some tokenizers take a new tgt_lang as the language of the texts that come next.
        tokenizer.src_lang = tokenizer.src_lang
    if args.forced_bos_token is not None:
        return {"forced_bos_token_id": _token_id(args.forced_bos_token, tokenizer)}
    if loaded.model.config.model_type in SEAMLESS:
        return _of_seamless(args, loaded.model.generation_config, known)
    if args.tgt_lang is None:
        return {}
    code = _find("--tgt_lang", args.tgt_lang, known)
    if type(tokenizer).__name__.removesuffix("Fast") in DECODER_STARTS_WITH_LANGUAGE:
        if args.decoder_start_token_id is not None:
            raise InputError(
                f"{args.given('decoder_start_token_id')} and {args.given('tgt_lang')} contradict each other "
                "(accepted: one of them)"
            )
        return {"decoder_start_token_id": known[code]}
    return {"forced_bos_token_id": known[code]}


def language_ids(tokenizer: Any) -> dict[str, int]:
    """The languages that a tokenizer knows and their token ids; none for a tokenizer that knows no languages."""
    codes = getattr(tokenizer, "lang_code_to_id", None)
    if codes is None:
        if not isinstance(getattr(type(tokenizer), "src_lang", None), property):
            return {}
        # NLLB and SeamlessM4T have no table: their languages are their special tokens without a name.
        named = [token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)]
        tokens = [token for token in tokenizer.all_special_tokens if token not in named and token.strip("<>") == token]
        codes = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    return {code: index for code, index in codes.items() if index is not None and index != tokenizer.unk_token_id}


def _of_seamless(args: RunConfig, config: Any, known: dict[str, int]) -> dict[str, Any]:
    spoken = getattr(config, "vocoder_lang_code_to_id", None) or {}
    if args.tgt_lang is None:
        if args.audio_out:
            raise InputError(f"--task {args.task} needs --tgt_lang (accepted: {_nearest('eng', spoken)})")
        return {}
    code = _find("--tgt_lang", args.tgt_lang, known).strip("_")
    if args.audio_out and code not in spoken:
        raise InputError(f"--tgt_lang {args.tgt_lang} is not spoken by MODEL (accepted: {_nearest(code, spoken)})")
    return {"tgt_lang": code}


def _of_whisper(args: RunConfig, config: Any) -> dict[str, Any]:
    """Whisper's generate takes names and codes, and refuses a language only when it has been given a batch."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    if args.tgt_lang is not None:
        raise InputError(
            f"--tgt_lang {args.tgt_lang}: Whisper writes the language it hears, or English (--gen task=translate)"
        )
    if args.src_lang is None:
        return {}
    if getattr(config, "lang_to_id", None) is None or not getattr(config, "is_multilingual", True):
        raise InputError(f"--src_lang {args.src_lang}: MODEL {args.model} has no languages to choose from")
    codes = {token.strip("<|>") for token in config.lang_to_id}
    names = {name for name, code in TO_LANGUAGE_CODE.items() if code in codes}
    if args.src_lang.lower() not in codes | names:
        raise InputError(
            f"--src_lang {args.src_lang} is not known to MODEL (accepted: {_nearest(args.src_lang, codes | names)})"
        )
    return {"language": args.src_lang}


def _find(flag: str, language: str, known: Collection[str]) -> str:
    """The tokenizer's own spelling: PLBart and SeamlessM4T write __eng__."""
    for code in (language, f"__{language}__"):
        if code in known:
            return code
    accepted = _nearest(language, [code.strip("_") for code in known])
    raise InputError(f"{flag} {language} is not known to MODEL (accepted: {accepted})")


def _nearest(language: str, known: Collection[str]) -> str:
    nearest = get_close_matches(language, list(known), n=3, cutoff=0.4) or sorted(known)[:3]
    return ", ".join(nearest) + (f" and {len(known) - len(nearest)} more" if len(known) > len(nearest) else "")


def _token_id(token: str, tokenizer: Any) -> int:
    index = tokenizer.convert_tokens_to_ids(token)
    if index is None or (index == tokenizer.unk_token_id and token != tokenizer.unk_token):
        raise InputError(f"--forced_bos_token {token}: is not one token of MODEL's vocabulary")
    return index
