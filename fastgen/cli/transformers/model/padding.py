"""Whether an input's outputs depend on how much it is padded, which is how much longer others in its batch are.

Masks keep padding out of attention. Some models let it in elsewhere: positions that are counted from the first column
on, states that pass through it, convolutions and norms over whole rows. Which models do is not written anywhere, so it
is measured: a few steps of generate for one short input alone, and beside a longer one.
"""

from __future__ import annotations

import numpy as np
import torch

import fastgen
from fastgen.cli.transformers.model.loading import LoadedModel
from fastgen.cli.transformers.stages.audio import collate_audio, extract
from fastgen.cli.transformers.stages.batches import Arrays, pad_text

STEPS = 4
PLAIN = {
    "max_length": None,
    "max_new_tokens": STEPS,
    "min_new_tokens": STEPS,
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_logits": True,
    "return_dict_in_generate": True,
}
LENGTHS = (5, 16)  # tokens; tenths of a second
# Rounding depends on the shape of a batch as well. What padding does is that or many times as much.
TIMES_ROUNDING = 20
LEAST_DIFFERENCE = 1e-3  # of the spread of the logits


def outputs_depend_on_padding_sync(loaded: LoadedModel, **language: str) -> bool:
    """Of the unpatched model, for inputs of random tokens or of noise. language: further arguments of generate."""
    short, long = (_input(loaded, length) for length in LENGTHS)
    if all(short[name].shape == long[name].shape for name in short):
        return False
    with fastgen.disabled():
        alone, together, padded = (_logits(loaded, rows, language) for rows in ([short], [short, short], [short, long]))
    rounding, difference = _largest_difference(alone, together), _largest_difference(alone, padded)
    # A difference that is no number is one, too.
    return not difference <= max(TIMES_ROUNDING * rounding, LEAST_DIFFERENCE * alone[alone.isfinite()].std().item())


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """What both hold in a place, infinity too, is no difference."""
    return torch.where(one == other, 0, one - other).abs().max().item()


def _input(loaded: LoadedModel, length: int) -> Arrays:
    draw = np.random.default_rng(length)
    if loaded.feature_extractor is not None:
        rate = loaded.feature_extractor.sampling_rate
        return extract(loaded.feature_extractor, draw.normal(scale=0.1, size=length * rate // 10).astype(np.float32))
    known = min(len(loaded.tokenizer), loaded.model.config.get_text_config(decoder=True).vocab_size)
    words = sorted(set(range(known)) - set(loaded.tokenizer.all_special_ids))
    return {"input_ids": draw.choice(words, size=length)}


def _logits(loaded: LoadedModel, rows: list[Arrays], language: dict[str, str]) -> torch.Tensor:
    """Of the first row, after each of STEPS tokens that are the most likely ones: [STEPS, V]."""
    tokenizer = loaded.tokenizer
    if loaded.feature_extractor is not None:
        inputs = collate_audio(loaded.feature_extractor, rows)
    else:
        inputs = pad_text(tokenizer.pad_token_id, tokenizer.padding_side == "left")(rows)
    generated = loaded.model.generate(
        **{name: tensor.to(loaded.model.device) for name, tensor in inputs.items()},
        **PLAIN,
        **language,
        pad_token_id=tokenizer.pad_token_id,
    )
    return torch.stack([step[0] for step in generated.logits]).float().cpu()
