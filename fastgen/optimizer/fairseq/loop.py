"""The decoding loop for fairseq's `SequenceGenerator`: the same as upstream's, with one read of the device per step.

All bookkeeping of beams stays on the device; the host reads which candidates end their sentence. Everything that users
may replace (the search strategy, the n-gram blocker, `is_finished`, the models) is called as upstream calls it, with
tensors of the same shapes and in the same order, so that random numbers are drawn in the same order. fairseq's own
`finalize_hypos` builds hypotheses.

fairseq feeds and scores the tokens that outputs must begin with one by one, in all rows. The columns in which every
input has such a token are equal in all beams, and known beforehand (FastSeq §4.1.1): this `Prompt` is computed once per
input in one pass, and its keys and values are stored once per input.

Tests: tests/optimizer/fairseq/test_fairseq_loop.py, tests/optimizer/fairseq/test_fairseq_options.py,
tests/optimizer/fairseq/test_fairseq_generate.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from fairseq.search import BeamSearch, Sampling
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.fairseq.checks import computes_prompt_in_one_pass
from fastgen.optimizer.fairseq.decode_step import DecodingState, FairseqDecodeStep
from fastgen.provenance import comes_with

# Log-probabilities of all words are needed at all positions of the prompt, but not at the same time.
MAX_ELEMENTS = 1 << 25

Hypothesis = dict[str, Tensor]


@dataclass
class Prompt:
    """The columns of the prefixes that were computed in one pass.

    tokens: `[inputs, length]`. forced: their log-probabilities, `[inputs, length]`. last: the log-probabilities of all
    words after them, `[inputs, vocabulary]`.
    """

    tokens: Tensor
    forced: Tensor
    last: Tensor

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def log_probs(self, step: int, rows_per_input: int) -> Tensor:
        """Returns the log-probabilities of a step of the prompt, `[rows, vocabulary]`."""
        left = torch.full_like(self.last, -torch.inf)
        left.scatter_(1, self.tokens[:, step : step + 1], self.forced[:, step : step + 1])
        return left.repeat_interleave(rows_per_input, dim=0)


def prefill_sync(
    call: GenerateCall,
    generator: SequenceGenerator,
    prefixes: Tensor | None,
    first_token: int,
    states: list[DecodingState],
    max_len: int,
) -> Prompt | None:
    """Computes the first tokens of all outputs in one pass, and stores their keys and values in the models' states.

    prefixes: tokens that outputs must begin with, `[inputs, …]`. Returns None if they must be fed one by one.
    """
    if prefixes is None or not computes_prompt_in_one_pass(generator, [state.plan for state in states]):
        return None
    is_word = (prefixes.ne(generator.eos) & prefixes.ne(generator.pad)).all(dim=0)
    length = int(is_word[:max_len].long().cumprod(dim=0).sum())
    if length == 0:
        return None
    tokens = prefixes[:, :length]
    fed = torch.cat([tokens.new_full((len(tokens), 1), first_token), tokens], dim=1)
    outputs = [state.prefill(call, model.decoder, fed) for model, state in zip(generator.model.models, states)]
    size = max(1, MAX_ELEMENTS // (len(tokens) * generator.vocab_size))
    forced = []
    for start in range(0, length, size):
        log_probs = _log_probs(generator, outputs, slice(start, min(start + size, length)))
        forced.append(log_probs.gather(2, tokens[:, start : start + size, None]).squeeze(2))
    log_probs = torch.nan_to_num(torch.cat(forced, dim=1), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    log_probs = torch.where(tokens.eq(generator.unk), log_probs - generator.unk_penalty, log_probs)
    return Prompt(tokens, log_probs, _log_probs(generator, outputs, slice(length, length + 1))[:, -1])


def _log_probs(generator: SequenceGenerator, outputs: list[tuple[Tensor, Any]], positions: slice) -> Tensor:
    """Returns the logarithm of the mean of the models' probabilities, `[inputs, positions, vocabulary]`."""
    parts = []
    for model, (features, extra) in zip(generator.model.models, outputs):
        logits = model.decoder.output_layer(features[:, positions]) / generator.temperature
        parts.append(model.get_normalized_probs((logits, extra), log_probs=True, sample=None))
    return parts[0] if len(parts) == 1 else torch.logsumexp(torch.stack(parts), dim=0) - math.log(len(parts))


class Loop:
    """One call of `SequenceGenerator._generate`: B unfinished sentences with M rows (beams) each.

    The rows of a sentence are adjacent. A step proposes C candidates for each sentence, the best first, and M of them
    continue. C is 2M, because a candidate may end its sentence, so that M remain in any case.

    tokens: `[rows, max_len + 2]`, the first one begins the sentence. scores: sums of log-probabilities,
    `[rows, max_len + 1]`. ignored: which of the first M candidates no longer count, because the sentence has collected
    so many hypotheses, or because no candidate was left for this place, `[B, M]`. ids: numbers of the sentences in the
    data set. source_lengths: `[B]`. prefixes: tokens that outputs must begin with, `[B, …]`. prompt: the columns of the
    prefixes whose keys are in the states of `step`, if any. hypotheses, finished: for all sentences of the batch.
    """

    def __init__(
        self,
        generator: SequenceGenerator,
        step: FairseqDecodeStep,
        max_len: int,
        first_token: int,
        ids: Tensor,
        source_lengths: Tensor,
        prefixes: Tensor | None = None,
        prompt: Prompt | None = None,
    ) -> None:
        self.generator, self.step, self.max_len = generator, step, max_len
        self.ids, self.source_lengths, self.prefixes, self.prompt = ids, source_lengths, prefixes, prompt
        self.num_beams, inputs, device = generator.beam_size, step.call.inputs, source_lengths.device
        self.tokens = torch.full((step.rows, max_len + 2), generator.pad, dtype=torch.int64, device=device)
        self.tokens[:, 0] = first_token
        self.scores = torch.zeros((step.rows, max_len + 1), device=device)
        self.ignored = torch.zeros((inputs, self.num_beams), dtype=torch.bool, device=device)
        self.attention: StepHistory | None = None
        self.hypotheses: list[list[Hypothesis]] = [[] for _ in range(inputs)]
        self.finished = [False] * inputs
        suppressed = generator.token_indices_to_suppress
        self.suppressed = None if suppressed is None else suppressed.to(device)

    def run(self) -> list[list[Hypothesis]]:
        with self.step:
            for step in range(self.skip_prompt(), self.max_len + 1):  # one more for the end of the sentence
                scores, tokens, rows = self.propose(step)
                ended = tokens.eq(self.generator.eos) & scores.ne(-torch.inf)  # [B, C]
                ended[:, : self.num_beams] &= ~self.ignored
                finished = self.collect(step, scores, rows, ended)
                if all(self.finished) or (self.generator.search.stop_on_max_len and step >= self.max_len):
                    break
                if step >= self.max_len:
                    raise AssertionError(f"sentences without an end at step {step}, the last (max_len {self.max_len})")
                self.advance(step, scores, tokens, rows, ended, finished)
        return _sorted_sync(self.hypotheses)

    def skip_prompt(self) -> int:
        """Writes the prompt if the search is stateless and draws nothing; returns the first remaining step."""
        prompt, generator, search = self.prompt, self.generator, self.generator.search
        is_librarys = type(search) is BeamSearch and comes_with(search.step, BeamSearch)
        if prompt is None or not is_librarys or generator.repeat_ngram_blocker is not None:
            return 0
        self.tokens[:, 1 : prompt.length + 1] = prompt.tokens.repeat_interleave(self.num_beams, dim=0)
        self.scores[:, : prompt.length] = -torch.inf
        sums = [*accumulate(prompt.forced.unbind(1))]  # rounded at each step, as a search does
        self.scores[:: self.num_beams, : prompt.length] = torch.stack(sums, dim=1)  # one beam remains
        return prompt.length

    def propose(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the candidates for the next token, the best first: scores, tokens and rows, `[B, C]` each."""
        generator, search, (sentences, beams) = self.generator, self.generator.search, self.ignored.shape
        log_probs = self.log_probs(step, self.tokens[:, : step + 1])
        self.scores = self.scores.type_as(log_probs)
        if generator.should_set_src_lengths:
            search.set_src_lengths(self.source_lengths)
        if generator.repeat_ngram_blocker is not None:
            log_probs = generator.repeat_ngram_blocker(self.tokens, log_probs, sentences, beams, step)
            if isinstance(search, Sampling):  # a row that has ended may have no token left to draw
                impossible = log_probs.amax(1, keepdim=True).exp().eq(0)
                log_probs.masked_fill_(self.ignored.view(-1, 1) & impossible, 0.0)
        by_beam, sums = log_probs.view(sentences, -1, generator.vocab_size), self.scores.view(sentences, beams, -1)
        scores, tokens, parents = search.step(step, by_beam, sums[:, :, :step], self.tokens[:, : step + 1], self.ids)
        first_rows = torch.arange(0, len(self.tokens), self.num_beams, device=parents.device)
        return scores, tokens, parents + first_rows[:, None]

    def log_probs(self, step: int, written: Tensor) -> Tensor:
        """Returns log-probabilities `[rows, vocabulary]` of the next token, after all rules about single tokens."""
        generator, prompt = self.generator, self.prompt
        if prompt is not None and step < prompt.length:
            return prompt.log_probs(step, self.num_beams)
        if prompt is not None and step == prompt.length:
            log_probs, weights = prompt.last.repeat_interleave(self.num_beams, dim=0), None
        else:
            log_probs, weights = self.step.log_probs(written)
        if weights is not None:
            if self.attention is None:
                self.attention = StepHistory(self.max_len + 2, weights, torch.float32)
            self.attention.write(step + 1, weights)
        if generator.lm_model is not None:
            predicted = generator.lm_model(written)
            fused = generator.lm_model.get_normalized_probs(predicted, log_probs=True, sample=None)
            log_probs += fused[:, -1, :] * generator.lm_weight
        log_probs = torch.nan_to_num_(log_probs, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        log_probs[:, generator.pad] = -torch.inf
        log_probs[:, generator.unk] -= generator.unk_penalty
        if step >= self.max_len:
            log_probs[:, : generator.eos] = -torch.inf
            log_probs[:, generator.eos + 1 :] = -torch.inf
        elif self.prefixes is not None and step < self.prefixes.shape[1]:
            log_probs, self.tokens, self.scores = generator._prefix_tokens(
                step, log_probs, self.scores, self.tokens, self.prefixes, self.num_beams
            )
            return log_probs
        if step < generator.min_len:
            log_probs[:, generator.eos] = -torch.inf
        if self.suppressed is not None:
            log_probs.index_fill_(1, self.suppressed, -torch.inf)
        return log_probs

    def collect(self, step: int, scores: Tensor, rows: Tensor, ended: Tensor) -> list[int]:
        """Adds hypotheses that end, and returns the batch index of each sentence that they finish."""
        flags, candidates = _flags_sync(ended[:, : self.num_beams]), scores.shape[1]
        chosen = [row * candidates + column for row, one in enumerate(flags) for column, ends in enumerate(one) if ends]
        if not chosen:
            return []
        index = _on_device(chosen, scores.device)
        return self.generator.finalize_hypos(
            step,
            rows.flatten().index_select(0, index),
            scores.flatten().index_select(0, index),
            self.tokens,
            self.scores,
            self.hypotheses,
            self.finished,
            self.num_beams,
            self.attention,
            self.source_lengths,
            self.max_len,
        )

    def advance(
        self, step: int, scores: Tensor, tokens: Tensor, rows: Tensor, ended: Tensor, finished: list[int]
    ) -> None:
        """Drops finished sentences, and continues with the best candidates that do not end."""
        search, batch_index = self.generator.search, None
        if finished:
            remaining = [row for row in range(len(self.ignored)) if row not in finished]
            batch_index = _on_device(remaining, scores.device)
            search.prune_sentences(batch_index)
            scores, tokens, rows, ended, self.ignored, self.source_lengths = (
                states.index_select(0, batch_index)
                for states in (scores, tokens, rows, ended, self.ignored, self.source_lengths)
            )
            self.ids = self.ids[batch_index]
            self.prefixes = None if self.prefixes is None else self.prefixes.index_select(0, batch_index)
        candidates, stopped = ended.shape[1], ended.clone()
        stopped[:, : self.num_beams] |= self.ignored
        places = torch.arange(candidates, device=ended.device)
        rank, active = torch.topk(stopped * (2 * candidates) + places, k=self.num_beams, dim=1, largest=False)
        self.ignored = rank.ge(2 * candidates)
        parents = rows.gather(1, active).view(-1)
        for states, written in ((self.tokens, step + 1), (self.scores, step)):
            states[: len(parents), :written] = states[:, :written].index_select(0, parents)
        self.tokens, self.scores = self.tokens[: len(parents)], self.scores[: len(parents)]
        self.tokens[:, step + 1] = tokens.gather(1, active).view(-1)
        self.scores[:, step] = scores.gather(1, active).view(-1)
        search.update_constraints(active)
        if self.attention is not None:
            self.attention.reorder(parents)
        self.step.reorder(parents, batch_index)


def _sorted_sync(hypotheses: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
    """Sorts the hypotheses of each sentence, the best first; reads all scores with one copy."""
    scores = [hypothesis["score"] for sentence in hypotheses for hypothesis in sentence]
    remaining = iter(torch.stack(scores).tolist() if scores else ())
    orders = [torch.tensor([next(remaining) for _ in sentence]).sort(descending=True)[1] for sentence in hypotheses]
    return [[sentence[index] for index in order.tolist()] for sentence, order in zip(hypotheses, orders)]


def _flags_sync(flags: Tensor) -> list[list[bool]]:
    return flags.tolist()


def _on_device(values: list[int], device: torch.device) -> Tensor:
    """Copies numbers of the host (int64) to the device, without waiting for it."""
    numbers: Any = torch.tensor(values, dtype=torch.int64)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


class StepHistory:
    """The values `[rows, width]` of up to `steps` steps, for rows that change places.

    Values are never moved. A table of ancestors is reordered instead: the value of row i at step s is in row
    `ancestors[i, s]` of step s.
    """

    def __init__(self, steps: int, values: Tensor, dtype: torch.dtype) -> None:
        rows, width = values.shape
        self.values = torch.empty((steps, rows, width), dtype=dtype, device=values.device)
        self.ancestors = torch.zeros((rows, steps), dtype=torch.int64, device=values.device)
        self.rows = torch.arange(rows, device=values.device)
        self.written = 0

    def write(self, step: int, values: Tensor) -> None:
        """Stores values `[rows, width]` in the present order of rows."""
        rows = values.shape[0]
        self.values[step, :rows] = values
        self.ancestors[:, step] = self.rows[:rows]
        self.written = step + 1

    def reorder(self, order: Tensor) -> None:
        """Overwrites row i with row `order[i]` (int64); there may be fewer rows than before."""
        self.ancestors = self.ancestors.index_select(0, order)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Returns the steps of these rows (int64), like `index_select` of a tensor `[rows, width, steps]`."""
        ancestors = self.ancestors.index_select(dim, rows)[:, : self.written].t()  # [steps, rows]
        steps = torch.arange(self.written, device=rows.device).unsqueeze(1)
        return self.values[steps, ancestors].permute(1, 2, 0).contiguous()
