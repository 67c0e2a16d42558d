"""--src_lang, --tgt_lang and --forced_bos_token: what they mean for the tokenizer of a model, and for generate.

Multilingual models differ in where they want the languages. Most tokenizers (NLLB, mBART, M2M100) put the source's
code around the input and the decoder is forced to begin with the target's. The first mBART and PLBart were trained
with the target's code as the decoder's first input. SeamlessM4T and Whisper look languages up inside generate.
"""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import transformers

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.flags.run_config import RunConfig

# Tokenizers of models whose decoder takes the target's code in place of a start token.
DECODER_STARTS_WITH_LANGUAGE = ("MBartTokenizer", "PLBartTokenizer")
SEAMLESS = ("seamless_m4t", "seamless_m4t_v2")


def set_languages(
    args: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase, model: transformers.PreTrainedModel
) -> None:
    """Has the tokenizer mark inputs as texts of --src_lang; raises InputError for a language that MODEL has not."""
    if args.src_lang is None and args.tgt_lang is None:
        return
    if model.config.model_type == "whisper":
        _check_languages_of_whisper(args, model)
        return
    known = language_ids(tokenizer)
    for flag, attribute in (("--tgt_lang", "tgt_lang"), ("--src_lang", "src_lang")):
        language = getattr(args, attribute)
        if language is None:
            continue
        if not (known and hasattr(tokenizer, attribute)):
            raise InputError(f"{flag} {language}: MODEL {args.model} has no languages to choose from")
        setattr(tokenizer, attribute, _find(flag, language, known))
    if hasattr(tokenizer, "src_lang"):
        # Some tokenizers take a new tgt_lang as the language of the texts that come next.
        tokenizer.src_lang = tokenizer.src_lang


def language_settings(
    args: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase, model: transformers.PreTrainedModel
) -> dict[str, Any]:
    """Keyword arguments of generate that make outputs begin as --tgt_lang and --forced_bos_token ask."""
    if args.forced_bos_token is not None:
        return {"forced_bos_token_id": _token_id(args.forced_bos_token, tokenizer)}
    if model.config.model_type == "whisper":
        return {} if args.src_lang is None else {"language": args.src_lang}
    is_seamless = model.config.model_type in SEAMLESS
    spoken = getattr(model.generation_config, "vocoder_lang_code_to_id", None) or {} if is_seamless else {}
    if args.tgt_lang is None:
        if args.speaks and is_seamless:
            raise InputError(f"--task {args.task} needs --tgt_lang (accepted: {_nearest('eng', spoken)})")
        return {}
    known = language_ids(tokenizer)
    code = _find("--tgt_lang", args.tgt_lang, known)
    if is_seamless:
        code = code.strip("_")
        if args.speaks and code not in spoken:
            raise InputError(f"--tgt_lang {args.tgt_lang} is not spoken by MODEL (accepted: {_nearest(code, spoken)})")
        return {"tgt_lang": code}
    if _name(tokenizer) in DECODER_STARTS_WITH_LANGUAGE:
        if args.decoder_start_token_id is not None:
            raise InputError(
                f"--decoder_start_token_id {args.decoder_start_token_id} and --tgt_lang {args.tgt_lang} contradict "
                "each other (accepted: one of them)"
            )
        return {"decoder_start_token_id": known[code]}
    return {"forced_bos_token_id": known[code]}


def language_ids(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, int]:
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


def _check_languages_of_whisper(args: RunConfig, model: transformers.PreTrainedModel) -> None:
    """Whisper's generate takes names and codes, and refuses a language only when it has been given a batch."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    if args.tgt_lang is not None:
        raise InputError(
            f"--tgt_lang {args.tgt_lang}: Whisper writes the language it hears, or English (--gen task=translate)"
        )
    own = model.generation_config
    if getattr(own, "lang_to_id", None) is None or not getattr(own, "is_multilingual", True):
        raise InputError(f"--src_lang {args.src_lang}: MODEL {args.model} has no languages to choose from")
    codes = {token.strip("<|>") for token in own.lang_to_id}
    names = {name for name, code in TO_LANGUAGE_CODE.items() if code in codes}
    if args.src_lang.lower() not in codes | names:
        raise InputError(
            f"--src_lang {args.src_lang} is not known to MODEL (accepted: {_nearest(args.src_lang, codes | names)})"
        )


def _token_id(token: str, tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    index = tokenizer.convert_tokens_to_ids(token)
    if index is None or (index == tokenizer.unk_token_id and token != tokenizer.unk_token):
        raise InputError(f"--forced_bos_token {token}: is not one token of MODEL's vocabulary")
    return index


def _name(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    return type(tokenizer).__name__.removesuffix("Fast")
