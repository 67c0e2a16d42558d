"""The prompt of a language model: computed once per input in one pass, its keys and values kept once per input.

fairseq feeds the tokens that outputs have to begin with one by one, in all rows, and scores them. As far as every input
has such a token, they are equal in all beams, and known beforehand (FastSeq §4.1.1).

Tests: tests/optimizer/fairseq/test_fairseq_caches.py, tests/optimizer/fairseq/test_fairseq_generate.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from fairseq import search
from torch import Tensor

from fastgen.optimizer.decoding.loop_state import sum_in_order
from fastgen.optimizer.fairseq.checks import HostGenerator, computes_prompt_at_once
from fastgen.optimizer.fairseq.decode_step import DecodingState

# Log-probabilities of all words are needed at all positions of the prompt, but not at once.
MAX_ELEMENTS = 1 << 25


@dataclass
class Prompt:
    """tokens: the columns of the prefixes that were computed at once, `[inputs, length]`.

    forced: their log-probabilities, `[inputs, length]`. last: those of all words after them, `[inputs, vocabulary]`.
    """

    tokens: Tensor
    forced: Tensor
    last: Tensor

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def log_probs(self, step: int, rows_per_input: int) -> Tensor:
        """What is left of the log-probabilities of step `step`, `[rows, vocabulary]`."""
        left = torch.full_like(self.last, -torch.inf)
        left.scatter_(1, self.tokens[:, step : step + 1], self.forced[:, step : step + 1])
        return left.repeat_interleave(rows_per_input, dim=0)

    def scores(self, rows_per_input: int) -> Tensor:
        """Sums of log-probabilities after each step, `[rows, length]`, as beam search has them: one beam is left."""
        beams = torch.full((len(self.tokens), rows_per_input, self.length), -torch.inf, device=self.forced.device)
        beams[:, 0] = sum_in_order(self.forced)
        return beams.flatten(0, 1).to(self.forced.dtype)

    def skips_search(self, generator: HostGenerator) -> bool:
        """Whether the search can be told the outcome of forced tokens: it draws nothing and keeps no state."""
        return type(generator.search) is search.BeamSearch and generator.repeat_ngram_blocker is None


def prefill_sync(
    generator: HostGenerator, prefixes: Tensor | None, first_token: int, states: list[DecodingState], max_len: int
) -> Prompt | None:
    """Computes at once what all outputs begin with, and leaves its keys and values in the states of all models.

    prefixes: tokens that outputs have to begin with, `[inputs, …]`. Returns None if they have to be fed by steps.
    """
    if prefixes is None or not computes_prompt_at_once(generator, [state.plan for state in states]):
        return None
    is_word = (prefixes.ne(generator.eos) & prefixes.ne(generator.pad)).all(dim=0)
    length = int(is_word[:max_len].long().cumprod(dim=0).sum())
    if length == 0:
        return None
    tokens = prefixes[:, :length]
    fed = torch.cat([tokens.new_full((len(tokens), 1), first_token), tokens], dim=1)
    outputs = [state.prefill(model.decoder, fed) for model, state in zip(generator.model.models, states)]
    size = max(1, MAX_ELEMENTS // (len(tokens) * generator.vocab_size))
    forced = []
    for start in range(0, length, size):
        log_probs = _log_probs(generator, outputs, slice(start, min(start + size, length)))
        forced.append(log_probs.gather(2, tokens[:, start : start + size, None]).squeeze(2))
    known = torch.nan_to_num(torch.cat(forced, dim=1), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    known = torch.where(tokens.eq(generator.unk), known - generator.unk_penalty, known)
    return Prompt(tokens, known, _log_probs(generator, outputs, slice(length, length + 1))[:, -1])


def _log_probs(generator: HostGenerator, outputs: list[tuple[Tensor, Any]], positions: slice) -> Tensor:
    """The logarithm of the mean of the models' probabilities, `[inputs, positions, vocabulary]`."""
    found = []
    for model, (features, extra) in zip(generator.model.models, outputs):
        logits = model.decoder.output_layer(features[:, positions]) / generator.temperature
        found.append(model.get_normalized_probs((logits, extra), log_probs=True, sample=None))
    return found[0] if len(found) == 1 else torch.logsumexp(torch.stack(found), dim=0) - math.log(len(found))
