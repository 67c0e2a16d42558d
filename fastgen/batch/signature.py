"""The signature of a run: what determines its records. --resume resumes only if it is unchanged.

Its names are used to report differences. Nothing here loads the model: a changed one is detected by its files.

Tests: tests/batch/test_signature.py
"""

from __future__ import annotations

import hashlib
import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fastgen.batch.config import OUTPUTS, RECORDS, BatchConfig, names_of
from fastgen.batch.errors import InputError
from fastgen.batch.files import Survey
from fastgen.batch.values import TODAY

BUILT_IN = "demo"  # the model in the package, as MODEL
DIGEST = "sha256:"  # the prefix of values that mean nothing to a reader
IGNORED_FILES = (".md", ".gitattributes", ".lock", ".py", ".png", ".jpg")
LARGE_FILE = 64 << 20
SAMPLES, SAMPLE = 1024, 4096  # number and size of the pieces that represent a larger file


def signature(args: BatchConfig, survey: Survey | None) -> dict[str, Any]:
    """Returns the signature, JSON values by names for users; survey: None for an INPUT that can be read only once.

    Settings that affect nothing do not count. MODEL and INPUT count by their contents, not by their names.
    A model from the hub counts with its commit, after it is loaded: see `with_commit`.
    """
    names = {*names_of(affects=OUTPUTS), *names_of(affects=RECORDS)} - {"gen"}
    settings = {args.named(name): getattr(args, name) for name in sorted(names)}
    settings |= {args.named(name): value for name, value in args.gen}
    if args.date == TODAY:  # not known until the model is loaded
        settings[args.named("date")] = None
    model = {"MODEL": args.model}
    if (folder := model_folder(args.model)) is not None:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.endswith(IGNORED_FILES))
        model = {f"MODEL's {path.name}": _digest(path) for path in files}
    content = None if survey is None else DIGEST + survey.sha256
    lines = None if survey is None else survey.lines
    contents = {"INPUT's content": content, "INPUT's number of lines": lines}
    return json.loads(json.dumps(settings | model | contents))


def model_folder(model: str) -> Path | None:
    """Returns the folder that MODEL names, None for a name on the hub. Raises InputError if the folder is missing."""
    if model == BUILT_IN:
        from fastgen.models.demo import demo_path

        return demo_path()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"MODEL {model}: is a file (accepted: a folder, a hub name, or demo)")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InputError(f"MODEL {model}: there is no such folder")
    return None


def misspelt(model: str) -> str:
    """Returns the message for a MODEL that could not be loaded, is not a folder and resembles `demo`; else empty."""
    if model_folder(model) is not None or not get_close_matches(model, [BUILT_IN]):
        return ""
    return f"MODEL {model}: is not a folder, and was not found on the hub (did you mean {BUILT_IN}?)"


def with_commit(signed: dict[str, Any], config: Any) -> dict[str, Any]:
    """Returns the signature with the commit of a model from the hub."""
    commit = getattr(config, "_commit_hash", None)
    return signed | {"MODEL's commit": commit} if "MODEL" in signed and commit else signed


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns the changes between two signatures, in words; an unknown commit is not a change."""
    changes = []
    for name in [*new, *(name for name in old if name not in new and name != "MODEL's commit")]:
        old_value, new_value = old.get(name), new.get(name)
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            changes += [f"{name}: {change}" for change in differences(old_value, new_value)]
        elif _in_words(old_value) != _in_words(new_value):
            says_nothing = any(isinstance(value, str) and value.startswith(DIGEST) for value in (old_value, new_value))
            what = "changed" if says_nothing else f"was {_in_words(old_value)} and is {_in_words(new_value)} now"
            changes.append(f"{name} {what}")
    return changes


def _in_words(value: Any) -> str:
    if value is None or value is False or value == []:
        return "not given"
    return "given" if value is True else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _digest(path: Path) -> str:
    """Returns the checksum of a file, or, if it is large, of its size and samples, which differ for other weights."""
    size = os.path.getsize(path)
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        if size <= LARGE_FILE:
            digest.update(file.read())
        for number in range(SAMPLES if size > LARGE_FILE else 0):
            file.seek(number * (size - SAMPLE) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return DIGEST + digest.hexdigest()
