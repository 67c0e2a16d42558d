"""How large batches are where neither --bs nor --batch_tokens says so.

A batch is as large as a quarter of the memory beside the model allows, counted in the keys and values of its tokens,
but not larger than what still gains: a larger one has more padding, and all of it waits for the longest output.

Nothing here changes from run to run on one machine (all of its memory counts, not what is free): sampling and some
models make outputs depend on what is in a batch, and a seed is to give the same samples again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.model.loading import LoadedModel
from fastgen.cli.transformers.model.settings import effective

LEAST_INPUTS = 8  # however many beams they have: FastSeq's default
SHARE = 4  # one part of so many for keys and values: layers at work need some, and other programs
# Rows of generate (inputs × beams), and tokens of inputs. CPU: as a small and a base model gained; GPU: not measured.
MOST = {"cpu": (256, 1 << 14), "cuda": (1024, 1 << 17)}
COPIES_OF_SCORES = 8  # of a row's scores for every token of the vocabulary, in float32, while a beam is chosen
NEW_TOKENS = 256  # where nothing limits an output
UNKNOWN_MEMORY = 8 << 30  # of a system that does not say
UNKNOWN_VALUES = 32 * 4096  # layers × width of a model of seven billion parameters
LIMITS_OF_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def with_batch_size(args: RunConfig, loaded: LoadedModel, settings: dict[str, Any]) -> RunConfig:
    """`args`, with --bs and --batch_tokens where neither is given."""
    if args.bs is not None or args.batch_tokens is not None:
        return args
    if loaded.feature_extractor is not None or loaded.speaks:  # sounds have frames, most of which a model joins at once
        return replace(args, bs=LEAST_INPUTS)
    config = loaded.model.config.get_text_config(decoder=True)
    rows = rows_per_input(settings, loaded)
    most_rows, most_tokens = MOST.get(loaded.model.device.type, MOST["cpu"])
    weights = sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())
    memory = max(0, total_memory(loaded.model.device) - weights) // SHARE
    token = key_value_bytes(config, loaded.model.dtype)
    new_tokens = effective("max_new_tokens", settings, loaded) or effective("max_length", settings, loaded)
    output = 4 * COPIES_OF_SCORES * config.vocab_size + token * (new_tokens or NEW_TOKENS)
    inputs = max(1, min(max(LEAST_INPUTS, most_rows // rows), memory // (output * rows)))
    return replace(args, bs=inputs, batch_tokens=rows * max(1, min(most_tokens, memory // (token * rows))))


def rows_per_input(settings: dict[str, Any], loaded: LoadedModel) -> int:
    """How many rows generate makes of an input: beams or outputs."""
    return max(effective(name, settings, loaded) or 1 for name in ("num_beams", "num_return_sequences"))


def key_value_bytes(config: Any, dtype: torch.dtype) -> int:
    """Of one token, in all layers of a decoder."""
    try:
        heads = config.num_attention_heads or 1
        width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
        values = config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width
    except Exception:  # of a config without these, or with others for each layer
        values = UNKNOWN_VALUES
    return 2 * values * dtype.itemsize


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU, or that this process's machine or container has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    sizes = [UNKNOWN_MEMORY]
    with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in LIMITS_OF_CONTAINERS:
        with suppress(OSError, ValueError):  # "max" is no limit
            sizes.append(int(Path(path).read_text()))
    return min(sizes)
