"""`fastgen.log_likelihoods`: log-likelihoods of continuations of contexts, with common prefixes computed once.

    prefix of a group ──> rests of the contexts ──> continuations, after the keys of their context
    [1, H, P, D]          [contexts, H, R, D]       [contexts * most continuations, H, C, D]
    one forward           a forward of a batch      a forward of a batch, unless all are one token long

Multiple-choice evaluations score several continuations of one context, and all contexts of a task begin with the same
examples. Contexts with a common prefix are a group.
Definitions are those of lm-evaluation-harness: the sum of the log-probabilities of a continuation's tokens, and whether
each of them is the likeliest. If nothing is gained, or the model is not supported, each context is computed with each
of its continuations, in one forward of a batch.

Tests: tests/optimizer/transformers/test_log_likelihoods.py
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from operator import index, methodcaller
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.kv_cache import should_share
from fastgen.optimizer.decoding.report import PREFILL, Reason
from fastgen.optimizer.transformers.checks import generate_call
from fastgen.optimizer.transformers.prefix_groups import Context, Group, Pair, Tokens, batches, contexts_of, groups_of
from fastgen.optimizer.transformers.shared_forward import SharedForward
from fastgen.optimizer.transformers.sources import shared_scores

LogLikelihood = tuple[float, bool]

# The default size of a batch: rows times the length of the longest.
TOKENS_PER_BATCH = 8192


def log_likelihoods(
    model: Any,
    contexts: Sequence[Any],
    continuations: Sequence[Any],
    tokenizer: Any = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[LogLikelihood]:
    """Does the work of `fastgen.log_likelihoods`.

    The tokenizer encodes a context and its continuation as one text; special tokens that it appends are removed.
    tokens_per_batch: rows times the length of the longest. Raises ValueError if contexts and continuations differ in
    number, or one is empty, longer than the model's positions or contains an invalid token id; TypeError if they are
    not lists of strings or of token ids.
    """
    check_type(model)
    for name, texts in (("contexts", contexts), ("continuations", continuations)):
        if isinstance(texts, str) or not isinstance(texts, (Sequence, Tensor, numpy.ndarray)):
            kind = "one string" if isinstance(texts, str) else f"a {type(texts).__name__}"
            raise TypeError(f"{name} is {kind} (accepted: a list of strings, or of lists of token ids)")
    if not isinstance(tokens_per_batch, int) or tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch is {tokens_per_batch!r} (accepted: an integer of at least 1)")
    if len(contexts) != len(continuations):
        raise ValueError(f"{len(contexts)} contexts and {len(continuations)} continuations (accepted: equal numbers)")
    check_decoder_only(model)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    vocabulary = model.config.get_text_config().vocab_size if embedding is None else embedding.shape[0]
    encode = lru_cache(maxsize=None)(partial(_encoded, tokenizer))  # each continuation repeats its context
    pairs = []
    for number, pair in enumerate(zip(contexts, continuations)):
        if all(isinstance(text, str) for text in pair):
            if tokenizer is None:
                text = f"contexts[{number}] is a string, and tokenizer is None"
                raise ValueError(f"{text} (accepted: the model's tokenizer)")
            pair = _encoded_pair(tokenizer, encode, *pair)
        context, continuation = (f"{name}[{number}]" for name in ("contexts", "continuations"))
        pairs.append((_tokens(context, pair[0], vocabulary), _tokens(continuation, pair[1], vocabulary)))
    if not pairs:
        return []
    model = base_of(model)
    with generate_call(model, has_steps=False) as call, torch.no_grad():
        scorer = Scorer(call, model, tokens_per_batch)
        unique_contexts = contexts_of(pairs)
        try:
            answers = scorer.answers(unique_contexts)
        except (IndexError, RuntimeError) as error:  # models that compute positions accept more, at a loss
            _check_lengths(model, pairs, error)
            raise
    return [answers[pair] for pair in pairs]


def check_type(model: Any) -> None:
    """Raises TypeError if this is not a model of transformers."""
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise TypeError(f"model is a {type(model).__name__} (accepted: a decoder-only model of transformers)")


def check_decoder_only(model: Any) -> None:
    """Raises ValueError if a model of transformers has an encoder."""
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has an encoder (accepted: decoder-only models)")


def base_of(model: Any) -> Any:
    """Returns the model inside PEFT's wrapper, if that only forwards calls: LoRA's layers are in the model itself."""
    if type(model).__module__ != "peft.peft_model" or model._forward_hooks or model._forward_pre_hooks:
        return model
    for name in model.active_adapters:
        config = model.peft_config[name]
        if config.peft_type != "LORA" or getattr(config, "alora_invocation_tokens", None):
            return model
    return model.get_base_model()


def _check_lengths(model: Any, pairs: list[Pair], error: Exception) -> None:
    """Raises ValueError if a pair is longer than the number of positions in the model's configuration."""
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    number, (context, continuation) = max(enumerate(pairs), key=lambda item: sum(map(len, item[1])))
    if most is not None and len(context) + len(continuation) > most + 1:
        raise ValueError(
            f"contexts[{number}] and continuations[{number}] have {len(context)} and {len(continuation)} tokens "
            f"(accepted: {most + 1} together, the model's {most} positions and the last token)"
        ) from error


def _tokens(name: str, ids: Any, vocabulary: int) -> Tokens:
    """Returns the token ids in an item of an argument. vocabulary: the number of tokens of the model."""
    try:
        tokens = tuple(map(index, ids))
    except TypeError as error:
        accepted = "a list of token ids, or a string as the other one is"
        raise TypeError(f"{name} is {reprlib.repr(ids)} (accepted: {accepted})") from error
    if not tokens:
        raise ValueError(f"{name} is empty (accepted: at least one token)")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name} holds {token} (accepted: token ids from 0 to {vocabulary - 1})")
    return tokens


def _encoded_pair(tokenizer: Any, encode: Callable, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Splits a text as lm-evaluation-harness does; an empty context becomes the token that begins texts.

    encode: `_encoded` with a cache.
    """
    text = context.rstrip()  # spaces belong to the next token
    if not text:
        begin = tokenizer.convert_tokens_to_ids([*filter(None, [_first_token(tokenizer)])])
        ids = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        return (begin, ids) if ids[:1] != begin else (ids[:1], ids[1:])
    ids = encode(text)
    return ids, _encoded(tokenizer, context + continuation)[len(ids) :]


def _first_token(tokenizer: Any) -> str | None:
    """Returns the token that begins texts; like lm-evaluation-harness, the end token if there is no other."""
    return tokenizer.bos_token or tokenizer.eos_token


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a text with the special tokens before it, without those after it.

    No special tokens are added if the text itself begins with the one that begins texts, as in chat templates.
    """
    if (begin := _first_token(tokenizer)) and text.startswith(begin):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = tokenizer(text)["input_ids"]
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return ids[: start + len(plain)]
    return ids


class Scorer(SharedForward):
    """Scores continuations of contexts, with common prefixes and contexts computed once."""

    gives_positions = True

    def __init__(
        self, call: GenerateCall, model: Any, tokens_per_batch: int, softmax_dtype: torch.dtype | None = torch.float32
    ) -> None:
        super().__init__(call, model)
        self.tokens_per_batch, self.softmax_dtype = tokens_per_batch, softmax_dtype

    def should_share(self, keys: Tensor, rows_per_copy: int) -> bool:
        return should_share(self.call.costs, keys, rows_per_copy)

    def _is_worth_a_forward(self, saved_tokens: int) -> bool:
        """Whether a group saves enough tokens to be worth its forward, whatever FASTGEN_SHARE says."""
        return self.call.costs.saves(self.size.tokens(saved_tokens), *self.added)

    def answers(self, contexts: list[Context]) -> dict[Pair, LogLikelihood]:
        """Returns the answer to each pair of a context and a continuation."""
        alone = partial(self.each_alone, contexts)
        if not (groups := self.groups(contexts)):
            return dict(alone())
        return shared_scores([self.model], lambda: dict(self.shared(groups)), lambda: dict(alone()))

    def groups(self, contexts: list[Context]) -> list[Group]:
        """Returns the groups for `shared`; none if nothing is shared, with reasons in the report."""
        self.call.set_rows(len(contexts), sum(len(context.continuations) for context in contexts))
        groups: list[Group] = []
        if PATCH_SET.is_on:
            groups = groups_of(contexts, self._is_worth_a_forward, self.tokens_per_batch)
        count = sum(len(row) for context in contexts for row in set(context.rows))
        for parts, length in groups:
            count -= length + sum(len(part.tokens) - length + sum(map(len, part.suffixes)) for part in parts)
        saved = f"{count} tokens need not be computed"
        if not groups:
            reasons = [Reason("DISABLED", "fastgen is disabled")]
        elif not self.gains(count):
            reasons = [Reason("PREFIX_SHORT", "contexts are too short to gain", saved)]
        else:
            # Padding is between a prefix and the rest of a context, so a window must hold the columns of all rows.
            most = max(len(context.tokens) for context in contexts)
            longest = max(len(tokens) for context in contexts for tokens in context.continuations)
            reasons = self.unsupported_reasons(most + longest, (contexts[0].tokens * 2)[:2])
        self.call.report.add_reasons(PREFILL, reasons)
        if not reasons:
            self.call.report.shared.append(f"contexts: once for all their continuations, {saved}")
        return [] if reasons else groups

    def shared(self, groups: list[Group]) -> Iterator[tuple[Pair, LogLikelihood]]:
        """Yields the answers, with common prefixes and contexts computed once."""
        self.call.is_accelerated = True
        saved = [(length, length * (len(parts) - 1)) for parts, length in groups if length]
        if saved:
            self.call.report.set_prefix(max(saved)[0], sum(tokens for _, tokens in saved), groups=len(saved))
        with self.sharing():
            for parts, length in groups:
                prefix = None
                if length:
                    prefix = self.node(1)
                    self._log_probs(torch.tensor([parts[0].tokens[:length]]), torch.ones(1, length), 1, prefix)
                ordered = sorted(parts, key=lambda context: (len(context.suffixes), len(context.tokens)))
                for batch in batches(ordered, methodcaller("shape", length), self.tokens_per_batch):
                    yield from self._batch(batch, prefix, length)

    def _batch(self, batch: list[Context], prefix: Any, length: int) -> Iterator[tuple[Pair, LogLikelihood]]:
        rests, mask = _padded([context.tokens[length:] for context in batch], left=True)
        suffixes = [context.suffixes for context in batch]
        _, most, longest = map(max, zip(*(context.shape(length) for context in batch)))
        mask = torch.cat([torch.ones(len(batch), length), mask], dim=1)
        contexts = self.node(len(batch), prefix, is_leaf=not most)
        first = self._log_probs(rests, mask, 1, contexts)[:, -1]  # [contexts, vocabulary_size]
        then = torch.empty(len(batch), 0, 0, first.shape[-1])
        if most:
            rows = [row for group in suffixes for row in (*group, *[(0,)] * (most - len(group)))]
            tokens, _ = _padded(rows, left=False)
            mask = torch.cat([mask.repeat_interleave(most, 0), torch.ones(tokens.shape)], dim=1)
            continuations = self.node(len(rows), contexts, is_leaf=True)
            then = self._log_probs(tokens, mask, longest, continuations).unflatten(0, (len(batch), most))
        for row, context in enumerate(batch):
            for continuation in context.continuations:
                scores = first[row : row + 1]
                if len(continuation) > 1:
                    number = suffixes[row].index(continuation[:-1])
                    scores = torch.cat([scores, then[row, number, : len(continuation) - 1]])
                yield (context.tokens, continuation), _likelihood(scores, continuation)

    def each_alone(self, contexts: list[Context]) -> Iterator[tuple[Pair, LogLikelihood]]:
        """Yields the answers, with each context computed together with each of its continuations."""
        pairs_of_row: dict[Tokens, list[Pair]] = {}
        for context in contexts:
            for continuation, row in zip(context.continuations, context.rows):
                pairs_of_row.setdefault(row, []).append((context.tokens, continuation))
        for batch in batches(sorted(pairs_of_row, key=len), lambda row: (len(row), 0, 0), self.tokens_per_batch):
            tokens, mask = _padded(batch, left=False)
            columns = (
                tokens.shape[1]
                + 1
                - min(len(context_tokens) for row in batch for context_tokens, _ in pairs_of_row[row])
            )
            log_probs = self._log_probs(tokens, mask, columns)
            for row, scores in zip(batch, log_probs):
                for context_tokens, continuation in pairs_of_row[row]:
                    start = len(context_tokens) - 1 - (tokens.shape[1] - columns)
                    continuation_scores = scores[start : start + len(continuation)]
                    yield (context_tokens, continuation), _likelihood(continuation_scores, continuation)

    def _log_probs(self, tokens: Tensor, mask: Tensor, columns: int, node: Any = None) -> Tensor:
        """Returns log-probabilities `[rows, columns, vocabulary_size]`; takes the arguments of `logits`."""
        logits = self.logits(columns, tokens.to(self.model.device), mask.long(), node)
        return functional.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)


def _padded(rows: Sequence[Tokens], left: bool) -> tuple[Tensor, Tensor]:
    """Returns padded tokens and their mask, `[rows, length of the longest]`; left: whether padding is on the left."""
    length = max(map(len, rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length)
    for number, row in enumerate(rows):
        columns = slice(length - len(row), None) if left else slice(len(row))
        tokens[number, columns], mask[number, columns] = torch.tensor(row), 1
    return tokens, mask


def _likelihood(scores: Tensor, continuation: Tokens) -> LogLikelihood:
    """Returns the likelihood of a continuation under log-probabilities `[length, vocabulary_size]`."""
    tokens = torch.tensor(continuation, device=scores.device)
    is_greedy = bool((scores.argmax(dim=-1) == tokens).all())
    return float(scores.gather(1, tokens[:, None]).sum()), is_greedy
