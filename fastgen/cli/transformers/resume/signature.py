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
        **{f"--{name}": value for name, value in flags.items()},
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
    """Its values and those of the configs inside of it."""
    return json.loads(config.to_json_string(use_diff=False), object_hook=_without_whereabouts)


def _without_whereabouts(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in WHEREABOUTS}


def _tokenizer(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, Any]:
    """What decides how it cuts text into tokens, and tokens back into text."""
    settings = _without_whereabouts(tokenizer.init_kwargs)
    if tokenizer.is_fast:
        vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
        del vocabulary["truncation"], vocabulary["padding"]  # every call sets them anew
    else:
        vocabulary = _slow_vocabulary(tokenizer)
    described = {
        "class": type(tokenizer).__name__,
        "settings": {name: value for name, value in settings.items() if not name.endswith("_file")},
        "special_tokens": tokenizer.special_tokens_map,
        "chat_template": tokenizer.chat_template,
        "padding_side": tokenizer.padding_side,
        "vocabulary": vocabulary,
    }
    return json.loads(json.dumps(described, default=_described))


def _slow_vocabulary(tokenizer: transformers.PreTrainedTokenizerBase) -> list[Any]:
    """Tokens, and the files that have merges or a sentencepiece model, which Python does not show otherwise."""
    files: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory() as folder:
        with suppress(NotImplementedError):  # a class of somebody's own need not be able to save anything
            files = tokenizer.save_vocabulary(folder)
        return [sorted(tokenizer.get_vocab().items()), *(_digest(Path(file).read_bytes()) for file in files)]


def _described(value: Any) -> str:
    """By this counts what JSON does not know, without addresses in memory."""
    known = isinstance(value, (torch.dtype, torch.device, transformers.AddedToken))
    return repr(value) if known else type(value).__name__


def _digest_of(value: Any) -> str:
    return _digest(json.dumps(value, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return DIGEST + hashlib.sha256(data).hexdigest()
