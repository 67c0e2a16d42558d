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

import inspect
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer

from fastgen.models.cache_names import CACHE
from fastgen.ops.token_scores import token_scores
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.cost_model import size_of
from fastgen.optimizer.decoding.report import PREFILL, LeaveAlone, Reason, check, leave_alone_for
from fastgen.optimizer.decoding.segmented_kv import KV, in_segments
from fastgen.optimizer.transformers import checks, prefixes
from fastgen.optimizer.transformers.checkpointing import checkpointing, checkpointing_modules, switched_off
from fastgen.optimizer.transformers.checkpointing import unsupported_reasons as checkpointing_reasons
from fastgen.optimizer.transformers.log_likelihoods import base_of, check_decoder_only, check_type
from fastgen.optimizer.transformers.models import latent_attention
from fastgen.optimizer.transformers.row_buckets import Bucket, buckets_sync
from fastgen.optimizer.transformers.sources import shared_scores

# Log-probabilities of tokens `[rows, columns]`, followed by the entropies of their distributions if they are wanted.
Scores = list[Tensor]

# Of a mixture of experts: the loss of its routers would need masks of the parts, and nobody reads it here.
ROUTERS = "output_router_logits"


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
                partial(scorer.shared_sync, input_ids, mask, completion_length),
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


class BeginningLayer(DynamicLayer):
    """A layer that stores the keys and values of beginnings with their graph, the first that it gets.

    A layer of the model that is computed again for the backward gets the same keys and values back.
    """

    is_initialized: bool

    def __init__(self, layer: DynamicLayer) -> None:
        super().__init__()
        self.is_sliding = layer.is_sliding

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class RestLayer(DynamicLayer):
    """A layer that has the keys and values of beginnings, and returns them with those of the rows' rests in segments.

    It stores nothing, so that it can be called any number of times.
    """

    def __init__(self, beginning: BeginningLayer, rows: int, usage: Counter[str]) -> None:
        super().__init__()
        self.__dict__ |= vars(beginning)
        self.rows, self.usage = rows, usage

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        return in_segments([(self.keys, self.values), (key_states, value_states)], self.rows, self.usage)


class TokenScorer:
    """The forwards of one call."""

    def __init__(self, call: GenerateCall, model: Any, temperature: float, entropy: bool) -> None:
        self.call, self.model, self.temperature, self.entropy = call, model, temperature, entropy
        self.accepted = set(inspect.signature(model.forward).parameters)
        self.gains = partial(call.costs.should_split_prefix, size_of(model, checks.KNOWN))

    def shared_sync(self, input_ids: Tensor, mask: Tensor, columns: int) -> Scores:
        """Returns the scores of the last columns, with common beginnings computed once.

        Raises LeaveAlone if nothing is gained, or the model is not supported.
        """
        return self.of_buckets(self.buckets_sync(input_ids, mask), input_ids, mask, columns)

    def buckets_sync(self, input_ids: Tensor, mask: Tensor) -> list[Bucket]:
        """Returns buckets with all rows, and reports them. Raises LeaveAlone as `shared_sync`."""
        buckets = self._buckets_sync(input_ids, mask)
        leave_alone_for(self.unsupported_reasons(input_ids.shape[1]))
        self._report(buckets)
        return buckets

    def unsupported_reasons(self, length: int) -> list[Reason]:
        """Returns why the model cannot share beginnings; empty if it can."""
        modules = checkpointing_modules(self.model)
        with switched_off(modules), torch.no_grad():  # the caches of a scorer are not written in place
            return checkpointing_reasons(modules) or self._unsupported_reasons(length)

    def of_buckets(self, buckets: list[Bucket], input_ids: Tensor, mask: Tensor, columns: int) -> Scores:
        """Returns the scores of the last columns, with the beginning of each group computed once."""
        modules = checkpointing_modules(self.model)
        with switched_off(modules), checkpointing(modules), self._expanding_latents(modules):
            return self._of_buckets(buckets, input_ids, mask, columns)

    @check(PREFILL)
    def _buckets_sync(self, input_ids: Tensor, mask: Tensor) -> list[Bucket]:
        """Returns buckets with all rows. Raises LeaveAlone if nothing is gained."""
        rows, length = input_ids.shape
        self.call.set_rows(rows, rows)
        if not PATCH_SET.is_on:
            raise LeaveAlone([Reason("DISABLED", "fastgen is disabled")])
        if rows == 1 or not self.gains((rows - 1) * length):  # whatever the tokens are
            raise LeaveAlone([Reason("TOO_SMALL", "the model or the batch is too small to gain")])
        return buckets_sync(input_ids, mask, self.gains)

    def _expanding_latents(self, modules: list[nn.Module]) -> AbstractContextManager[None]:
        """A context in which latents in segments are expanded once; not in layers that are computed again outside."""
        facts = self.call.facts_of(self.model, checks.KNOWN)
        return nullcontext() if modules else latent_attention.expanding_in_parts(facts.modules.values())

    def _report(self, buckets: list[Bucket]) -> None:
        """Adds to the report what will be shared."""
        shared = [bucket for bucket in buckets if bucket.split]
        groups, saved = sum(bucket.groups for bucket in shared), sum(bucket.saved for bucket in shared)
        self.call.set_rows(sum(bucket.groups for bucket in buckets), self.call.rows)
        self.call.report.set_prefix(max(bucket.split for bucket in shared), saved, groups=groups)
        self.call.is_accelerated = True

    def _unsupported_reasons(self, length: int) -> list[Reason]:
        """Returns why a forward of this model cannot be continued from another one, with gradients or without."""
        cache = DynamicCache(config=self.model.config)
        of_call = checks.CallChecks(self.call, self.model)
        if reasons := of_call.prefix(cache, length, False) + of_call.rows:
            return reasons
        device = self.model.device
        arguments = {
            "input_ids": torch.ones(1, 2, dtype=torch.int64, device=device),
            "attention_mask": torch.ones(1, 2, dtype=torch.int64, device=device),
            CACHE: cache,
            **({ROUTERS: False} if ROUTERS in self.accepted else {}),
        }
        facts = self.call.facts_of(self.model, checks.KNOWN)

        def forward(tried: dict[str, Any]) -> Any:
            before = facts.row_tensors()
            outputs = self.model(**prefixes.without_cached_columns(tried), use_cache=True)
            facts.row_states = of_call.row_states({2}, before) or facts.row_states
            return outputs

        return prefixes.model_reasons(facts, forward, prefixes.CommonPrefix(2), arguments) or facts.row_states or []

    def plain(self, input_ids: Tensor, attention_mask: Tensor | None, columns: int) -> Scores:
        """Returns the scores of the last columns, from one forward of all rows."""
        logits = self._logits(columns + 1, input_ids, attention_mask)[:, :-1]
        return self._scores(input_ids[:, -columns:], logits)

    def _of_buckets(self, buckets: list[Bucket], input_ids: Tensor, mask: Tensor, columns: int) -> Scores:
        """Returns the scores of the last columns in the order of the rows."""
        length, order = input_ids.shape[1], [row for bucket in buckets for row in bucket.rows]
        first = length - columns  # the first column whose token is scored
        scores = []
        for bucket in buckets:
            rows, end = torch.tensor(bucket.rows, device=input_ids.device), max(bucket.end, first + 1)
            tokens, visible = input_ids[rows, :end], mask[rows, :end]
            if bucket.split:
                parts = self._of_groups(bucket, tokens, visible, first)
            else:
                parts = [self.plain(tokens, visible, end - first)]
            scores.append([_padded(torch.cat(values, dim=1), length - end) for values in zip(*parts)])
        places = torch.tensor(order, device=input_ids.device).argsort()
        return [torch.cat(values)[places] for values in zip(*scores)]

    def _of_groups(self, bucket: Bucket, tokens: Tensor, visible: Tensor, first: int) -> list[Scores]:
        """Returns the scores of tokens `[rows, length]` from column `first` on, in parts of consecutive columns."""
        split, firsts = bucket.split, slice(None, None, bucket.rows_per_group)
        beginnings: Any = DynamicCache(config=self.model.config)
        beginnings.layers = [BeginningLayer(layer) for layer in beginnings.layers]
        mask, mask_of_rests = visible[firsts, :split], None
        if not bool(mask.all()):  # on the left; what is hidden on the right comes after all that is scored
            mask_of_rests = torch.cat([visible[:, :split], torch.ones_like(visible[:, split:-1])], dim=1)
        logits = self._logits(max(split + 1 - first, 1), tokens[firsts, :split], mask, beginnings)
        scores = []
        if split >= first:
            of_beginnings = self._scores(tokens[firsts, first : split + 1], logits)
            scores.append([values.repeat_interleave(bucket.rows_per_group, dim=0) for values in of_beginnings])
        rests: Any = DynamicCache()
        rests.layers = [RestLayer(layer, len(tokens), self.call.report.kernels) for layer in beginnings.layers]
        columns = tokens.shape[1] - max(first, split + 1)
        logits = self._logits(columns, tokens[:, split:-1], mask_of_rests, rests)
        return [*scores, self._scores(tokens[:, -columns:], logits)]

    def _logits(self, columns: int, input_ids: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        """Returns the logits of the last columns, `[rows, columns, vocabulary_size]`."""
        arguments = {prefixes.MASK: mask, CACHE: cache, "logits_to_keep": columns, ROUTERS: False}
        arguments = {name: value for name, value in arguments.items() if value is not None and name in self.accepted}
        outputs = self.model(input_ids, use_cache=cache is not None, return_dict=True, **arguments)
        return outputs.logits[:, -columns:]

    def _scores(self, tokens: Tensor, logits: Tensor) -> Scores:
        """Returns the scores of tokens `[rows, columns]` under logits `[rows, columns, vocabulary_size]`."""
        return token_scores(logits, tokens, self.temperature, self.entropy)


def _padded(values: Tensor, columns: int) -> Tensor:
    """Returns values `[rows, columns, …]` with so many more columns of zeros."""
    return functional.pad(values, (*[0, 0] * (values.dim() - 2), 0, columns))
