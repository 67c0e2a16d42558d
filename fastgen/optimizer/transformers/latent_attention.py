"""Multi-head latent attention (DeepSeek-V2, -V3 and those after them): shared latents are expanded once per input.

The cache keeps latents, which every step expands into the keys and values of all heads. The attention's `expand_kv`
does that for each position by itself, so what the rows of an input share can be expanded apart from their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from fastgen.optimizer.decoding.two_part_states import TwoPartStates
from fastgen.origin import packages_of

NAME = "expand_kv"


@contextmanager
def expanding_in_parts(model: nn.Module) -> Iterator[None]:
    """Inside this context the model's latents in two parts become keys and values in two parts.

    A second thread that generates on the model may find it without this once the first has left: then its latents are
    expanded for each row, as the library does.
    """
    found = [module for module in model.modules() if packages_of(getattr(type(module), NAME, None)) == {"transformers"}]
    chosen = [module for module in found if NAME not in vars(module)]
    for module in chosen:
        setattr(module, NAME, Expansion(module))
    try:
        yield
    finally:
        for module in chosen:
            vars(module).pop(NAME, None)


class Expansion:
    """The `expand_kv` of one module, in parts where its latents are in parts."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, heads, length, …]` of the module's two latents `[rows, 1, length, …]`."""
        expand = partial(getattr(type(self.module), NAME), self.module)
        if not all(isinstance(states, TwoPartStates) and states.in_parts for states in latents):
            return expand(*latents)
        shared = expand(*(states.shared for states in latents))
        own = expand(*(states.own for states in latents))
        fan_out, usage = latents[0].fan_out, latents[0].usage
        keys, values = (TwoPartStates(*parts, fan_out, usage) for parts in zip(shared, own))
        return keys, values
