"""The scores of finished beams without those of every token at every step.

generate returns `sequences_scores` only together with `output_scores`, which keeps a tensor [rows, vocabulary] for each
step: gigabytes for a batch of summaries. fastgen's beam search gives out the few that are wanted; the library's keeps
them up to date in its method `_update_finished_beams` (transformers 5.0 to 5.23), where they can be taken from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from fastgen.optimizer.transformers import beam_search

METHOD = "_update_finished_beams"
ARGUMENTS = {"output_scores", "return_dict_in_generate"}


def can_be_taken(model: transformers.PreTrainedModel) -> bool:
    """Whether `taken` works for this model."""
    return hasattr(model, METHOD)


@contextmanager
def taken(model: transformers.PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """A list that holds, after a generate call inside the block, the scores [B, num_beams], best first."""
    update = getattr(model, METHOD)
    last: list[torch.Tensor] = []

    def watched(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        updated = update(*args, **kwargs)
        last[:] = [updated[1]]
        return updated

    token = beam_search.SCORES.set(last)
    setattr(model, METHOD, watched)  # of this object: others of its class, and their threads, do not see it
    try:
        yield last
    finally:
        delattr(model, METHOD)
        beam_search.SCORES.reset(token)
