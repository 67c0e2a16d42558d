"""The prompt of a language model: computed once per input in one pass, its keys and values kept once per input.

fairseq feeds the tokens that outputs have to begin with one by one, in all rows, and scores them. As far as every input
has such a token, they are equal in all beams, and known beforehand (FastSeq §4.1.1).

Tests: tests/optimizer/fairseq/test_fairseq_caches.py, tests/optimizer/fairseq/test_fairseq_generate.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fairseq import search
from torch import Tensor

from fastgen.optimizer.decoding.beam_search import sum_in_order
from fastgen.optimizer.decoding.reasons import Reason
from fastgen.optimizer.fairseq.plan import ModelPlan
from fastgen.optimizer.fairseq.states import DecodingState, filling

# Log-probabilities of all words are needed at all positions of the prompt, but not at once.
MAX_ELEMENTS = 1 << 25


@dataclass
class Prompt:
    """length: the number of columns of the prefixes that were computed at once.

    forced: log-probabilities of their tokens, `[inputs, length]`. last: those of all words after them, `[inputs,
    vocabulary]`.
    """

    length: int
    forced: Tensor
    last: Tensor

    def log_probs(self, tokens: Tensor, step: int, rows_per_input: int) -> Tensor:
        """What is left of the log-probabilities of step `step`, `[rows, vocabulary]`; tokens `[inputs, …]`."""
        left = torch.full_like(self.last, -torch.inf)
        left.scatter_(1, tokens[:, step : step + 1], self.forced[:, step : step + 1])
        return left.repeat_interleave(rows_per_input, dim=0)

    def scores(self, rows_per_input: int) -> Tensor:
        """Sums of log-probabilities after each step, `[rows, length]`, as beam search has them: one beam is left."""
        beams = torch.full((*self.forced.shape[:1], rows_per_input, self.length), -torch.inf, device=self.forced.device)
        beams[:, 0] = sum_in_order(self.forced)
        return beams.flatten(0, 1).to(self.forced.dtype)


def unsupported_reasons(generator: Any, plans: list[ModelPlan]) -> list[Reason]:
    """Why prefixes are fed one token at a time; empty if they may be computed at once."""
    reasons = []
    if generator.model.has_encoder():
        reasons.append(Reason("ENCODER", "the model has an encoder: its prefixes are fed token by token"))
    if any(plan.others or plan.reasons for plan in plans):
        reasons.append(Reason("MODEL_STATE", "modules with states of their own"))
    if any(plan.user_code or plan.watched for plan in plans):
        reasons.append(Reason("USER_CODE", "code of the program in the decoder may see each step"))
    if generator.lm_model is not None:
        reasons.append(Reason("SECOND_LANGUAGE_MODEL", "a second language model"))
    return reasons


def common_length_sync(prefixes: Tensor, eos: int, pad: int, max_len: int) -> int:
    """The number of leading columns in which every input has a token that does not end it."""
    tokens = prefixes[:, :max_len]
    common = (tokens.ne(eos) & tokens.ne(pad)).all(dim=0)
    return int(common.long().cumprod(dim=0).sum())


def skips_search(generator: Any) -> bool:
    """Whether the search can be told the outcome of forced tokens: it draws nothing and keeps no state of its own."""
    return type(generator.search) is search.BeamSearch and generator.repeat_ngram_blocker is None


def prefill(generator: Any, tokens: Tensor, states: list[DecodingState]) -> Prompt | None:
    """Computes tokens `[inputs, 1 + length]`, the first of which begins the sentence, and fills the states' caches.

    None if a layer did not leave its keys, because it had a reason to be computed by fairseq.
    """
    models = generator.model.models
    features = []
    for model, state in zip(models, states):
        with filling(state):
            features.append(model.decoder.forward(tokens, features_only=True))
    if not all(state.is_filled for state in states):
        for state in states:
            state.forget_prompt()
        return None
    for state in states:
        state.start_rows()
    chunks = [_of_model(generator, model, feature) for model, feature in zip(models, features)]
    inputs, positions = tokens.shape
    size = max(1, MAX_ELEMENTS // (inputs * generator.vocab_size))
    forced = []
    for start in range(0, positions - 1, size):
        end = min(start + size, positions - 1)
        log_probs = _average([chunk(start, end) for chunk in chunks])
        forced.append(log_probs.gather(2, tokens[:, start + 1 : end + 1, None]).squeeze(2))
    known = torch.nan_to_num(torch.cat(forced, dim=1), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    known = torch.where(tokens[:, 1:].eq(generator.unk), known - generator.unk_penalty, known)
    return Prompt(positions - 1, known, _average([chunk(positions - 1, positions) for chunk in chunks])[:, -1])


def _of_model(generator: Any, model: Any, output: tuple) -> Callable[[int, int], Tensor]:
    """A function from positions to their log-probabilities `[inputs, positions, vocabulary]`."""
    features, extra = output

    def log_probs(start: int, end: int) -> Tensor:
        logits = model.decoder.output_layer(features[:, start:end]) / generator.temperature
        return model.get_normalized_probs((logits, extra), log_probs=True, sample=None)

    return log_probs


def _average(log_probs: list[Tensor]) -> Tensor:
    """The logarithm of the mean of the models' probabilities."""
    if len(log_probs) == 1:
        return log_probs[0]
    return torch.logsumexp(torch.stack(log_probs), dim=0) - math.log(len(log_probs))
