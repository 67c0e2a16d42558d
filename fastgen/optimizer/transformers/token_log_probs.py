"""`fastgen.token_log_probs`: log-probabilities of completions, as trainers need them, with gradients.

    beginnings of groups ──> keys and values, with their graph ──> rests of all rows ──> log-probabilities
    [groups, s]              [groups, H_kv, s, D]                  [rows, T - s]         [rows, columns]

Rows with a common beginning are a group, and groups of one size take two forwards together (`Bucket`). Columns stay
where they are, so that positions are those of a forward of all rows. Autograd records both forwards: a beginning's keys
get the sum of the gradients of all rows that attend to them. Rows in no group take one forward as they are, and so do
all rows if the model is not supported or nothing is gained.

Tests: tests/optimizer/transformers/test_token_log_probs.py
"""

from __future__ import annotations

from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops.token_scores import token_scores
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.report import PREFILL, LeaveAlone, Reason, check, leave_alone_for
from fastgen.optimizer.transformers import checks, prefix_groups
from fastgen.optimizer.transformers.log_likelihoods import base_of, check_decoder_only, check_type
from fastgen.optimizer.transformers.prefix_groups import Bucket
from fastgen.optimizer.transformers.shared_forward import SharedForward
from fastgen.optimizer.transformers.sources import shared_scores

# Log-probabilities of tokens `[rows, columns]`, followed by the entropies of their distributions if they are wanted.
Scores = list[Tensor]


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
    visible = visible_columns(mask, completion_length)
    with checks.generate_call(model, has_steps=False) as call:
        scorer = TokenScorer(call, base_of(model), temperature, entropy)
        try:
            scores = shared_scores(
                [scorer.model],
                lambda: scorer.of_buckets(scorer.buckets_sync(input_ids, mask), input_ids, mask, completion_length),
                partial(scorer.plain, input_ids, attention_mask, completion_length),
                visible=visible,
            )
        except LeaveAlone as left_alone:
            call.report.add_reasons(PREFILL, left_alone.reasons)
            scores = scorer.plain(input_ids, attention_mask, completion_length)
    log_probs, *entropies = (values.masked_fill(~visible, 0.0) for values in scores)
    return (log_probs, *entropies) if entropy else log_probs


def visible_columns(mask: Tensor, columns: int) -> Tensor:
    """Returns which of the last columns, `[rows, columns]`, have a score: those of tokens that follow a token."""
    return (mask[:, 1:] * mask[:, :-1])[:, -columns:] != 0


def _check(model: Any, input_ids: Tensor, mask: Tensor, completion_length: int, temperature: float) -> None:
    """Raises TypeError or ValueError with the name of an argument, its value and what is accepted."""
    check_type(model)
    check_decoder_only(model)
    for name, value in (("input_ids", input_ids), ("attention_mask", mask)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__} (accepted: a tensor [rows, length])")
    if input_ids.dim() != 2 or mask.shape != input_ids.shape:
        shapes = f"input_ids {[*input_ids.shape]} and attention_mask {[*mask.shape]}"
        raise ValueError(f"{shapes} (accepted: both [rows, length])")
    accepted = f"an integer from 1 to {input_ids.shape[1] - 1}, less than the length of input_ids"
    try:
        length = index(completion_length)  # also of numpy and torch
    except TypeError:
        raise TypeError(f"completion_length is {completion_length!r} (accepted: {accepted})") from None
    if not 1 <= length < input_ids.shape[1]:
        raise ValueError(f"completion_length is {length} (accepted: {accepted})")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature} (accepted: a number above 0)")


class TokenScorer(SharedForward):
    """Scores tokens of rows, with the beginnings of groups computed once."""

    def __init__(self, call: GenerateCall, model: Any, temperature: float, entropy: bool) -> None:
        super().__init__(call, model)
        self.temperature, self.entropy = temperature, entropy

    @check(PREFILL)
    def buckets_sync(self, input_ids: Tensor, mask: Tensor) -> list[Bucket]:
        """Returns buckets with all rows, and reports them.

        Raises LeaveAlone if nothing is gained, or the model is not supported.
        """
        rows, length = input_ids.shape
        self.call.set_rows(rows, rows)
        if not PATCH_SET.is_on:
            raise LeaveAlone([Reason("DISABLED", "fastgen is disabled")])
        if rows == 1 or not self.gains((rows - 1) * length):  # whatever the tokens are
            raise LeaveAlone([Reason("TOO_SMALL", "the model or the batch is too small to gain")])
        buckets = prefix_groups.buckets_sync(input_ids, mask, self.gains)
        leave_alone_for(self.unsupported_reasons(length))
        shared = [bucket for bucket in buckets if bucket.split]
        groups, saved = sum(bucket.groups for bucket in shared), sum(bucket.saved for bucket in shared)
        self.call.set_rows(sum(bucket.groups for bucket in buckets), rows)
        self.call.report.set_prefix(max(bucket.split for bucket in shared), saved, groups=groups)
        self.call.is_accelerated = True
        return buckets

    def plain(self, input_ids: Tensor, attention_mask: Tensor | None, columns: int) -> Scores:
        """Returns the scores of the last columns, from one forward of all rows."""
        logits = self.logits(columns + 1, input_ids, attention_mask)[:, :-1]
        return self.scores(input_ids[:, -columns:], logits)

    def of_buckets(self, buckets: list[Bucket], input_ids: Tensor, mask: Tensor, columns: int) -> Scores:
        """Returns the scores of the last columns in the order of the rows, with each beginning computed once."""
        length = input_ids.shape[1]
        order = [row for bucket in buckets for row in bucket.rows]
        first = length - columns  # the first column whose token is scored
        scores = []
        with self.sharing():
            for bucket in buckets:
                rows = torch.tensor(bucket.rows, device=input_ids.device)
                end = max(bucket.end, first + 1)
                tokens, visible = input_ids[rows, :end], mask[rows, :end]
                if bucket.split:
                    parts = self._of_groups(bucket, tokens, visible, first)
                else:
                    parts = [self.plain(tokens, visible, end - first)]
                scores.append([_padded(torch.cat(values, dim=1), length - end) for values in zip(*parts)])
        inverse = torch.tensor(order, device=input_ids.device).argsort()
        return [torch.cat(values)[inverse] for values in zip(*scores)]

    def _of_groups(self, bucket: Bucket, tokens: Tensor, visible: Tensor, first: int) -> list[Scores]:
        """Returns the scores of tokens `[rows, length]` from column `first` on, in parts of consecutive columns."""
        split = bucket.split
        firsts = slice(None, None, bucket.rows_per_group)
        mask = visible[firsts, :split]
        mask_of_rests = None
        if not bool(mask.all()):  # on the left; what is hidden on the right comes after all that is scored
            mask_of_rests = torch.cat([visible[:, :split], torch.ones_like(visible[:, split:-1])], dim=1)
        beginnings = self.node(bucket.groups)
        logits = self.logits(max(split + 1 - first, 1), tokens[firsts, :split], mask, beginnings)
        scores = []
        if split >= first:
            of_beginnings = self.scores(tokens[firsts, first : split + 1], logits)
            scores.append([values.repeat_interleave(bucket.rows_per_group, dim=0) for values in of_beginnings])
        columns = tokens.shape[1] - max(first, split + 1)
        rests = self.node(len(tokens), beginnings, is_leaf=True)
        logits = self.logits(columns, tokens[:, split:-1], mask_of_rests, rests)
        return [*scores, self.scores(tokens[:, -columns:], logits)]

    def scores(self, tokens: Tensor, logits: Tensor) -> Scores:
        """Returns the scores of tokens `[rows, columns]` under logits `[rows, columns, vocabulary_size]`."""
        return token_scores(logits, tokens, self.temperature, self.entropy)


def _padded(values: Tensor, columns: int) -> Tensor:
    """Returns values `[rows, columns, …]` with `columns` more columns of zeros."""
    return functional.pad(values, (*[0, 0] * (values.dim() - 2), 0, columns))
