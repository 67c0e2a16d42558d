"""`fastgen.token_log_probs`: log-probabilities of completions, as trainers need them, with gradients.

Tests: tests/optimizer/transformers/test_token_log_probs.py
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fastgen.optimizer.transformers.log_likelihoods import base_of


class Scores(NamedTuple):
    """Log-probabilities of tokens, and the entropies of their distributions or None; `[rows, columns]`."""

    log_probs: Tensor
    entropies: Tensor | None


def token_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    completion_length: int,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Does the work of `fastgen.token_log_probs`."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    _check(model, input_ids, mask, completion_length, temperature)
    scorer = TokenScorer(base_of(model), temperature, entropy)
    scores = scorer.plain(input_ids, attention_mask, completion_length)
    hidden = (mask[:, 1:] * mask[:, :-1])[:, -completion_length:] == 0
    log_probs, *entropies = (values.masked_fill(hidden, 0.0) for values in scores if values is not None)
    return (log_probs, *entropies) if entropies else log_probs


def _check(model: Any, input_ids: Tensor, mask: Tensor, completion_length: int, temperature: float) -> None:
    """Raises TypeError or ValueError with the name of an argument, its value and what is accepted."""
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise TypeError(f"model is a {type(model).__name__} (accepted: a decoder-only model of transformers)")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has an encoder (accepted: decoder-only models)")
    if input_ids.dim() != 2 or mask.shape != input_ids.shape:
        shapes = f"input_ids {[*input_ids.shape]} and attention_mask {[*mask.shape]}"
        raise ValueError(f"{shapes} (accepted: both [rows, length])")
    if not 1 <= completion_length < input_ids.shape[1]:
        accepted = f"1 to {input_ids.shape[1] - 1}, less than the length of input_ids"
        raise ValueError(f"completion_length is {completion_length} (accepted: {accepted})")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature} (accepted: a number above 0)")


class TokenScorer:
    """The forwards of one call."""

    def __init__(self, model: Any, temperature: float, entropy: bool) -> None:
        self.model, self.temperature, self.entropy = model, temperature, entropy
        self.accepted = set(inspect.signature(model.forward).parameters)

    def plain(self, input_ids: Tensor, attention_mask: Tensor | None, columns: int) -> Scores:
        """Returns the scores of the last columns, from one forward of all rows."""
        arguments = {} if attention_mask is None else {"attention_mask": attention_mask}
        return self._scores(input_ids[:, -columns:], self._logits(columns + 1, input_ids, **arguments)[:, :-1])

    def _logits(self, columns: int, input_ids: Tensor, **arguments: Any) -> Tensor:
        """Returns the logits of the last columns, `[rows, columns, vocabulary_size]`."""
        if "logits_to_keep" in self.accepted:
            arguments["logits_to_keep"] = columns
        if "past_key_values" not in arguments:
            arguments["use_cache"] = False
        return self.model(input_ids, return_dict=True, **arguments).logits[:, -columns:]

    def _scores(self, tokens: Tensor, logits: Tensor) -> Scores:
        """Returns the scores of tokens `[rows, columns]` under logits `[rows, columns, vocabulary_size]`."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature != 1.0:
            logits = logits / self.temperature
        norms = logits.logsumexp(dim=-1, keepdim=True)
        log_probs = (logits.gather(-1, tokens[:, :, None]) - norms).squeeze(-1)
        if not self.entropy:
            return Scores(log_probs, None)
        everything = logits - norms
        return Scores(log_probs, -(everything.exp() * everything).sum(dim=-1))
