"""Sampling in which each row has its own random numbers, independent of the other rows.

The library draws the noise of all rows from one generator, so that a sample depends on its batch. Here each row has its
own Philox stream (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): its key is the seed and the
input's number, and its counter starts at the row's number within that input. At each step, one uniform number chooses a
token by the cumulated probabilities, after all warpers, and all other scores become -inf: the library's own draw then
must choose that token. Sampled beams take a number for each continuation of an input, which are drawn one after the
other without replacement, and the library's own choice of the best gets their order as scores. So the unpatched library
draws the same.

Tests: tests/optimizer/transformers/test_row_draws.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList

from fastgen.optimizer.decoding.guards import OfCall

STEPS_AT_ONCE = 64  # numbers per row that are copied to the device together
NUMBERS_OF_A_COUNT = 4  # numbers per counter value of a Philox4x64
MANTISSA_BITS = 53


class RowDraws:
    """Draws from the scores of a loop's steps; as the last logits processor, it leaves one token for each row.

    keys: for each row the seed, the number of its input, and its number among the rows of that input; 64 bits each.
    Steps are counted from the first call on.
    """

    def __init__(self, keys: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        self._keys = keys
        # On devices without doubles, the last bits of the sums decide between close tokens.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._uniform = torch.empty((len(keys), 0), dtype=self._dtype, device=device)
        self._first_length: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores `[rows, vocabulary_size]` with the drawn token of each row at 0, the rest at -inf."""
        tokens, total = self._drawn(scores, self._step(input_ids), None)
        # Not finite if the scores are not: then the library's draw raises its own error.
        return torch.full_like(scores, -math.inf).scatter_(1, tokens[:, None], (total * 0).to(scores.dtype))

    def tokens(self, input_ids: Tensor, scores: Tensor, row_index: Tensor) -> Tensor:
        """Returns the token of each row, int64 `[rows]`; row_index: the indices of these rows among all.

        Raises RuntimeError, like `torch.multinomial`, if probabilities are not finite.
        """
        tokens, total = self._drawn(scores, self._step(input_ids), row_index)
        _check_finite(total)
        return tokens

    def continuations(self, scores: Tensor, step: int, count: int) -> Tensor:
        """Returns `count` different indices for each row of scores, int64 `[rows, count]`, as they are drawn.

        Raises RuntimeError, like `torch.multinomial`, if probabilities are not finite.
        """
        left = scores.clamp(min=torch.finfo(scores.dtype).min)  # -inf is for indices that are drawn
        indices = []
        for number in range(step * count, (step + 1) * count):
            index, total = self._drawn(left, number, None)
            _check_finite(total)
            indices.append(index)
            left = left.scatter(1, index[:, None], -math.inf)
        return torch.stack(indices, dim=1)

    def _step(self, input_ids: Tensor) -> int:
        if self._first_length is None:
            self._first_length = input_ids.shape[1]
        return input_ids.shape[1] - self._first_length

    def _drawn(self, scores: Tensor, step: int, row_index: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the tokens for number `step` of each row, and the sum of its probabilities `[rows, 1]`."""
        if step >= self._uniform.shape[1]:
            counter = self._uniform.shape[1] // NUMBERS_OF_A_COUNT
            counters = [np.array((counter, 0, 0, sample), np.uint64) for *_, sample in self._keys]
            keys = [np.array(key[:2], np.uint64) for key in self._keys]  # NumPy would round large numbers in a tuple
            generators = [np.random.Philox(key=key, counter=start) for key, start in zip(keys, counters)]
            bits = np.stack([generator.random_raw(STEPS_AT_ONCE) for generator in generators])
            numbers = torch.from_numpy((bits >> (64 - MANTISSA_BITS)) * 2.0**-MANTISSA_BITS)
            self._uniform = torch.cat([self._uniform, numbers.to(self._uniform)], dim=1)
        uniform = self._uniform[:, step : step + 1]
        uniform = uniform if row_index is None else uniform[row_index]
        cumulated = scores.softmax(dim=-1, dtype=torch.float32).cumsum(dim=-1, dtype=self._dtype)
        total = cumulated[:, -1:]
        tokens = (cumulated <= uniform * total).sum(dim=-1)
        return tokens.clamp_(max=scores.shape[-1] - 1), total


def _check_finite(total: Tensor) -> None:
    if total.device.type == "cpu" and not total.isfinite().all():
        raise RuntimeError("probabilities to draw from are not finite")


def _with_draws(original: Callable[..., Any], draws: RowDraws, *args: Any, **kwargs: Any) -> LogitsProcessorList:
    """Appends the draws to the library's processors."""
    return LogitsProcessorList([*original(*args, **kwargs), draws])


def _drawn_beams(
    original: Callable[..., Any], draws: RowDraws, accumulated_log_probs: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Lets the library take the drawn continuations as the best, in their order, and gives them their scores."""
    step = kwargs["cur_len"] - kwargs["decoder_prompt_len"]
    count = kwargs["beams_to_keep"]
    indices = draws.continuations(accumulated_log_probs, step, count)  # [inputs, count]
    ranks = torch.arange(count, 0, -1, device=indices.device).to(accumulated_log_probs.dtype).expand_as(indices)
    ranked = torch.full_like(accumulated_log_probs, -math.inf).scatter_(1, indices, ranks)
    _, sequences, beam_indices = original(ranked, **kwargs | {"do_sample": False})
    return accumulated_log_probs.gather(1, indices), sequences, beam_indices


# By whether the loop is of beams: the loop's name, a method that it calls, and what replaces it.
_LOOPS: dict[bool, tuple[str, str, Callable[..., Any]]] = {
    False: ("_sample", "_get_logits_processor", _with_draws),
    True: ("_beam_search", "_get_top_k_continuations", _drawn_beams),
}


def can_draw_by_row(model: Any, beams: bool = False) -> bool:
    """Whether the model's `generate` and its loop, of samples or of sampled beams, are the library's."""
    kind = type(model)
    loop, method, _ = _LOOPS[beams]
    own = ("generate", loop, method)
    is_librarys = (getattr(kind, name, None) is getattr(GenerationMixin, name) for name in own)
    return isinstance(model, GenerationMixin) and all(is_librarys)


@contextmanager
def drawing_by_row(model: Any, draws: RowDraws, beams: bool = False) -> Iterator[None]:
    """Makes this model's `generate` use these draws inside the context; beams: for the inputs of sampled beams."""
    _, method, replacement = _LOOPS[beams]
    setattr(model, method, OfCall(replacement, partial(getattr(type(model), method), model), draws))
    try:
        yield
    finally:
        delattr(model, method)
