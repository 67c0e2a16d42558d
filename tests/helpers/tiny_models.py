"""Tiny models of all architectures whose outputs react to any mistake, their inputs, and arguments of `generate`."""

import functools
from typing import Any

import pytest
import torch
from architectures import SPECIAL, VOCABULARY, architecture_of

BEAMS = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 7}
SAMPLES = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 7}
GREEDY = {"do_sample": False, "max_new_tokens": 7}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "samples": {"num_return_sequences": 2, "do_sample": True},
}
TOKENS_ONLY = {"return_dict_in_generate": False, "output_scores": False, "output_logits": False}
BOTH = pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))


def lively(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Makes weights so large that attention has a say: with the usual 0.02 a wrong key would change no token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.2 * parameter.shape[1] ** -0.5, generator=generator)
    return model


def tiny(name: str, **overrides: Any) -> torch.nn.Module:
    """The tiny lively model of an architecture; name: as in `architecture_of`; overrides: of its configuration."""
    return lively(architecture_of(name, **overrides).model())


def under_autocast(name: str, **overrides: Any) -> torch.nn.Module:
    """The tiny model of an architecture as accelerate prepares it for bfloat16.

    accelerate's settings of the process, which another test may have set, are forgotten before and after.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        return accelerator.prepare_model(tiny(name, **overrides), evaluation_mode=True)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


unchanged = functools.cache(tiny)  # for calls that leave the model as it is: built once in a process


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(*lengths: int, side: str = "left", seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on one side to the longest, and their mask."""
    longest = max(lengths)
    input_ids, mask = token_ids(len(lengths), longest, seed=seed), torch.ones(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        padding = slice(0, longest - length) if side == "left" else slice(length, longest)
        input_ids[row, padding], mask[row, padding] = SPECIAL["pad_token_id"], 0
    return {"input_ids": input_ids, "attention_mask": mask}


def with_prefix(*lengths: int, prefix: int = 7, side: str = "left", seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of these lengths that begin with `prefix` equal tokens, the same for all seeds, and then differ."""
    inputs, longest = padded(*lengths, side=side, seed=seed), max(lengths)
    for row, length in enumerate(lengths):
        start = longest - length if side == "left" else 0
        inputs["input_ids"][row, start : start + prefix] = token_ids(1, prefix, seed=9)[0]
        inputs["input_ids"][row, start + prefix] = 10 + 8 * seed + row
    return inputs


def inputs_of(name: str, *lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on the side where the architecture wants it, or as many sounds or images."""
    kind = architecture_of(name).kind
    if kind in ("speech", "vision"):
        return architecture_of(name).inputs(rows=len(lengths), seed=seed)
    return padded(*lengths, side="right" if kind == "seq2seq" else "left", seed=seed)
