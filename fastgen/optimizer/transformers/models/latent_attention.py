"""Multi-head latent attention (DeepSeek-V2, -V3 and their successors): shared latents are expanded once per input.

The cache stores latents, which every step expands into the keys and values of all heads. The attention's `expand_kv`
treats each position independently, so each segment can be expanded separately.

Tests: tests/optimizer/transformers/test_latent_attention.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from fastgen.optimizer.decoding.guards import OfCall
from fastgen.optimizer.decoding.segmented_kv import SegmentedKV
from fastgen.provenance import packages_of

# The method that expands latents; models whose classes lack it have nothing to expand.
NAME = "expand_kv"


@contextmanager
def expanding_in_parts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which the model's latents in segments become keys and values in segments.

    If a second thread generates on the model, this ends for it when the first thread leaves: then its latents are
    expanded for each row, as the library does.
    """
    owners = [module for module in modules if packages_of(getattr(type(module), NAME, None)) == {"transformers"}]
    chosen = [module for module in owners if NAME not in vars(module)]
    for module in chosen:
        setattr(module, NAME, OfCall(_expand, module))
    try:
        yield
    finally:
        for module in chosen:
            vars(module).pop(NAME, None)


def _expand(module: nn.Module, *latents: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values `[rows, heads, length, …]` for the module's two latents `[rows, 1, length, …]`.

    They are segments if the latents are.
    """
    expand = partial(getattr(type(module), NAME), module)
    if not all(isinstance(states, SegmentedKV) and states.is_segmented for states in latents):
        return expand(*latents)
    expanded = [expand(*segments) for segments in zip(*(states.segments for states in latents))]
    keys, values = (SegmentedKV(segments, latents[0].rows, latents[0].usage) for segments in zip(*expanded))
    return keys, values
