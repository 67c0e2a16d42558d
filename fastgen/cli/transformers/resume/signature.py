"""What decides which records a run writes: --resume goes on only where all of it is as it was.

Names are those under which a difference is reported. Values are taken before anything has used the model: what
generate and the tokenizer keep of a call is no part of it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from fastgen.cli.transformers.files.lines import Survey
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.model.loading import LoadedModel
from fastgen.cli.transformers.resume.differences import DIGEST

# A flag that is not named here counts. MODEL and INPUT count by what is in them, not by their names.
FLAGS_WITHOUT_EFFECT_ON_RECORDS = (
    "model",
    "input",
    "output",
    "resume",
    "overwrite",
    "quiet",
    "verbose",
    "preprocess_workers",
    "postprocess_workers",
    "reference_path",
    "reference_field",
    "padding",
    "return_tensors",
    "score_path",
)
# Where a model was loaded from, and by which version: they differ where the model does not.
WHEREABOUTS = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "is_local", "local_files_only")
SAMPLES_PER_PARAMETER = 64


def signature(args: RunConfig, loaded: LoadedModel, survey: Survey | None) -> dict[str, Any]:
    """JSON values by the names that users know; `survey` is None for an INPUT that can be read only once."""
    extractor, own = loaded.feature_extractor, getattr(loaded.model, "generation_config", None)
    flags = {name: value for name, value in asdict(args).items() if name not in FLAGS_WITHOUT_EFFECT_ON_RECORDS}
    return {
        **{f"--{name}": _json_value(value) for name, value in flags.items()},
        "MODEL's architecture": type(loaded.model).__name__,
        "MODEL's config": _digest_of(_config(loaded.model.config)),
        "MODEL's generation_config": _digest_of(own and _config(own)),
        "MODEL's weights": fingerprint_sync(loaded.model),
        "MODEL's tokenizer": _digest_of(_tokenizer(loaded.tokenizer)),
        "MODEL's feature extractor": None if extractor is None else _digest_of(json.loads(extractor.to_json_string())),
        "INPUT's content": None if survey is None else DIGEST + survey.sha256,
        "INPUT's number of lines": None if survey is None else survey.lines,
    }


def fingerprint_sync(model: torch.nn.Module) -> str:
    """A digest of names, shapes, dtypes and a few values of each parameter and buffer: other weights, not every bit.

    A model of billions of parameters takes as long as a small one.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        values = tensor.detach().reshape(-1)
        values = values[:: max(1, len(values) // SAMPLES_PER_PARAMETER)]
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return DIGEST + digest.hexdigest()


def _config(config: transformers.PretrainedConfig | transformers.GenerationConfig) -> Any:
    return _without_whereabouts(json.loads(config.to_json_string(use_diff=False)))


def _without_whereabouts(value: Any) -> Any:
    """Also of the configs inside a config."""
    if isinstance(value, dict):
        return {name: _without_whereabouts(each) for name, each in value.items() if name not in WHEREABOUTS}
    return [_without_whereabouts(each) for each in value] if isinstance(value, list) else value


def _tokenizer(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, Any]:
    """What decides how it cuts text into tokens, and tokens back into text."""
    settings = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if name not in WHEREABOUTS and not name.endswith("_file")
    }
    return {
        "class": type(tokenizer).__name__,
        "settings": _json_value(settings),
        "special_tokens": _json_value(tokenizer.special_tokens_map),
        "chat_template": tokenizer.chat_template,
        "padding_side": tokenizer.padding_side,
        "vocabulary": _backend(tokenizer) if tokenizer.is_fast else _slow_vocabulary(tokenizer),
    }


def _backend(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, Any]:
    """Without what every call sets anew."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: value for name, value in backend.items() if name not in ("truncation", "padding")}


def _slow_vocabulary(tokenizer: transformers.PreTrainedTokenizerBase) -> list[Any]:
    """Tokens, and the files that have merges or a sentencepiece model, which Python does not show otherwise."""
    files: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory() as folder:
        with suppress(NotImplementedError):  # a class of somebody's own need not be able to save anything
            files = tokenizer.save_vocabulary(folder)
        return [sorted(tokenizer.get_vocab().items()), *(_digest(Path(file).read_bytes()) for file in files)]


def _json_value(value: Any) -> Any:
    """What JSON does not know counts by its description, without addresses in memory."""
    if isinstance(value, dict):
        return {str(name): _json_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device, transformers.AddedToken)):
        return repr(value)
    return type(value).__name__


def _digest_of(value: Any) -> str:
    return _digest(json.dumps(value, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return DIGEST + hashlib.sha256(data).hexdigest()
