"""The decoding loop for fairseq's `SequenceGenerator`: the same as upstream's, with one read of the device per step.

All bookkeeping of beams stays on the device; the host reads which candidates end their sentence. On a GPU it reads them
while the next step runs, if the search draws nothing: sentences leave the batch one step late, with the same outputs.
Everything that users may replace (the search strategy, the n-gram blocker, `is_finished`, the models) is called as
upstream calls it, with tensors of the same shapes and in the same order, so that random numbers are drawn in the same
order. fairseq's own `finalize_hypos` builds hypotheses.

fairseq feeds and scores the tokens that outputs must begin with one by one, in all rows. The columns in which every
input has such a token are equal in all beams, and known beforehand (FastSeq §4.1.1): this `Prompt` is computed once per
input in one pass, and its keys and values are stored once per input.

Tests: tests/optimizer/fairseq/test_fairseq_loop.py, tests/optimizer/fairseq/test_fairseq_options.py,
tests/optimizer/fairseq/test_fairseq_generate.py
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any

import torch
from fairseq.search import BeamSearch, Sampling
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from fastgen.ops.beams import Ancestors, follow, on_device
from fastgen.optimizer.decoding.decode_step import LateFlags, staying_in_halves
from fastgen.optimizer.fairseq.checks import CallChecks, computes_prompt_in_one_pass
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


def prefill_sync(checks: CallChecks, states: list[DecodingState]) -> Prompt | None:
    """Computes the first tokens of all outputs in one pass, and stores their keys and values in the models' states.

    Returns None if there are no prefixes, or if they must be fed one by one.
    """
    generator, prefixes = checks.generator, checks.prefixes
    if prefixes is None or not computes_prompt_in_one_pass(generator, [state.plan for state in states]):
        return None
    is_word = (prefixes.ne(generator.eos) & prefixes.ne(generator.pad)).all(dim=0)
    length = int(is_word[: checks.max_len].long().cumprod(dim=0).sum())
    if length == 0:
        return None
    tokens = prefixes[:, :length]
    fed = torch.cat([tokens.new_full((len(tokens), 1), checks.first_token), tokens], dim=1)
    outputs = [state.prefill(checks.call, model.decoder, fed) for model, state in zip(generator.model.models, states)]
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


@dataclass
class Candidates:
    """C candidates for the next token of each of B sentences, the best first, and the state to make hypotheses from.

    scores, tokens, rows, ended: `[B, C]`; ended: whether a candidate ends its sentence. written, sums: tokens and
    scores of the rows before the candidates. sentences: the numbers of those in this batch, among all of the call.
    """

    step: int
    scores: Tensor
    tokens: Tensor
    rows: Tensor
    ended: Tensor
    written: Tensor
    sums: Tensor
    attention: StepHistory | None
    source_lengths: Tensor
    sentences: list[int]


class Loop:
    """One call of `SequenceGenerator._generate`: a batch of B sentences with M rows (beams) each.

    The rows of a sentence are adjacent. A step proposes C candidates for each sentence, the best first, and M of them
    continue. C is 2M, because a candidate may end its sentence, so that M remain in any case.

    tokens: `[rows, max_len + 2]`, the first one begins the sentence. scores: sums of log-probabilities,
    `[rows, max_len + 1]`. ignored: which of the first M candidates no longer count, because the sentence has collected
    an equal number of hypotheses, or because no candidate was left for this slot, `[B, M]`. ids: numbers of the
    sentences in the data set. source_lengths: `[B]`. prefixes: tokens that outputs must begin with, `[B, …]`. prompt:
    the columns of the prefixes whose keys are in the states of `step`, if any. hypotheses, finished: for all sentences
    of the call. sentences: the numbers of those in the batch. unfinished: the indices in the batch of those that are
    not finished; the rest are about to leave it.
    """

    def __init__(self, step: FairseqDecodeStep, ids: Tensor, source_lengths: Tensor, prompt: Prompt | None) -> None:
        self.step, self.ids, self.source_lengths, self.prompt = step, ids, source_lengths, prompt
        checks: CallChecks = step.checks
        generator, max_len = checks.generator, checks.max_len
        self.generator, self.max_len, self.prefixes = generator, max_len, checks.prefixes
        self.num_beams = generator.beam_size
        inputs = step.call.inputs
        device = source_lengths.device
        self.tokens = torch.full((step.rows, max_len + 2), generator.pad, dtype=torch.int64, device=device)
        self.tokens[:, 0] = checks.first_token
        self.scores = torch.zeros((step.rows, max_len + 1), device=device)
        self.ignored = torch.zeros((inputs, self.num_beams), dtype=torch.bool, device=device)
        self.attention: StepHistory | None = None
        self.hypotheses: list[list[Hypothesis]] = [[] for _ in range(inputs)]
        self.finished = [False] * inputs
        self.sentences = [*range(inputs)]
        is_own = self.is_beam_search and comes_with(generator.is_finished, SequenceGenerator)
        reads_late = device.type == "cuda" and is_own
        self.late_flags = LateFlags(inputs * self.num_beams, device) if reads_late else None
        suppressed = generator.token_indices_to_suppress
        self.suppressed = None if suppressed is None else suppressed.to(device)

    def run(self) -> list[list[Hypothesis]]:
        with self.step:
            late: Candidates | None = None
            for step in range(self.skip_prompt(), self.max_len + 1):  # one more for the end of the sentence
                proposed = self.propose(step)
                ended = proposed.ended[:, : self.num_beams].flatten()
                flags = [] if self.late_flags is None else self.late_flags.exchange(ended)
                if late is not None:
                    self.collect(late, flags)
                late = proposed if self.late_flags is not None and step < self.max_len else None
                if late is None and not all(self.finished):
                    self.collect(proposed, ended.tolist())
                if all(self.finished) or (self.generator.search.stop_on_max_len and step >= self.max_len):
                    break
                if step >= self.max_len:
                    raise AssertionError(f"sentences without an end at step {step}, the last (max_len {self.max_len})")
                self.advance(proposed)
        return _sorted_sync(self.hypotheses)

    @property
    def unfinished(self) -> list[int]:
        return [number for number, sentence in enumerate(self.sentences) if not self.finished[sentence]]

    @property
    def is_beam_search(self) -> bool:
        """Whether the search is the library's own, which draws nothing and keeps no state."""
        search = self.generator.search
        return type(search) is BeamSearch and comes_with(search.step, BeamSearch)

    def skip_prompt(self) -> int:
        """Writes the prompt if the search is stateless and draws nothing; returns the first remaining step."""
        prompt = self.prompt
        if prompt is None or not self.is_beam_search or self.generator.repeat_ngram_blocker is not None:
            return 0
        self.tokens[:, 1 : prompt.length + 1] = prompt.tokens.repeat_interleave(self.num_beams, dim=0)
        self.scores[:, : prompt.length] = -torch.inf
        sums = [*accumulate(prompt.forced.unbind(1))]  # rounded at each step, as a search does
        self.scores[:: self.num_beams, : prompt.length] = torch.stack(sums, dim=1)  # one beam remains
        return prompt.length

    def propose(self, step: int) -> Candidates:
        """Returns the candidates for the next token."""
        generator = self.generator
        search = self.generator.search
        sentences, beams = self.ignored.shape
        log_probs = self.log_probs(step, self.tokens[:, : step + 1])
        self.scores = self.scores.type_as(log_probs)
        if generator.should_set_src_lengths:
            search.set_src_lengths(self.source_lengths)
        if generator.repeat_ngram_blocker is not None:
            log_probs = generator.repeat_ngram_blocker(self.tokens, log_probs, sentences, beams, step)
            if isinstance(search, Sampling):  # a row that has ended may have no token left to draw
                impossible = log_probs.amax(1, keepdim=True).exp().eq(0)
                log_probs.masked_fill_(self.ignored.view(-1, 1) & impossible, 0.0)
        by_beam = log_probs.view(sentences, -1, generator.vocab_size)
        sums = self.scores.view(sentences, beams, -1)
        scores, tokens, parents = search.step(step, by_beam, sums[:, :, :step], self.tokens[:, : step + 1], self.ids)
        first_rows = torch.arange(0, len(self.tokens), self.num_beams, device=parents.device)
        ended = tokens.eq(generator.eos) & scores.ne(-torch.inf)
        ended[:, :beams] &= ~self.ignored
        return Candidates(
            *(step, scores, tokens, parents + first_rows[:, None], ended, self.tokens, self.scores),
            *(self.attention, self.source_lengths, self.sentences),
        )

    def log_probs(self, step: int, written: Tensor) -> Tensor:
        """Returns log-probabilities `[rows, vocabulary]` of the next token, after all rules about single tokens."""
        generator, prompt = self.generator, self.prompt
        if prompt is not None and step < prompt.length:
            return prompt.log_probs(step, self.num_beams)
        if prompt is not None and step == prompt.length:
            log_probs = prompt.last.repeat_interleave(self.num_beams, dim=0)
            weights = None
        else:
            log_probs, weights = self.step.log_probs(written)
        if weights is not None:
            if self.attention is None:
                self.attention = StepHistory(self.max_len + 2, weights)
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

    def collect(self, candidates: Candidates, flags: list[bool]) -> None:
        """Adds hypotheses of unfinished sentences that end, and notes which sentences they finish.

        flags: `ended` of the first M candidates of each sentence.
        """
        chosen = []
        for index in compress(range(len(flags)), flags):
            number, candidate = divmod(index, self.num_beams)
            if not self.finished[candidates.sentences[number]]:
                chosen.append(number * candidates.scores.shape[1] + candidate)
        if not chosen:
            return
        # fairseq maps rows to sentences by the list of finished ones. It gets the sentences that are not in this batch
        # instead, because some of it may have finished since this step.
        outside = [True] * len(self.finished)
        for sentence in candidates.sentences:
            outside[sentence] = False
        index = on_device(chosen, candidates.scores.device)
        finished = self.generator.finalize_hypos(
            candidates.step,
            candidates.rows.flatten().index_select(0, index),
            candidates.scores.flatten().index_select(0, index),
            candidates.written,
            candidates.sums,
            self.hypotheses,
            outside,
            self.num_beams,
            candidates.attention,
            candidates.source_lengths,
            self.max_len,
        )
        for number in finished:
            self.finished[candidates.sentences[number]] = True

    def remaining(self, step: int) -> list[int] | None:
        """Returns the indices of the sentences that stay in the batch; None if all do.

        Finished ones leave at once, or in halves if steps may be captured on a GPU.
        """
        unfinished, sentences = self.unfinished, len(self.ignored)
        captures = None if self.late_flags is None else self.step.captures
        if captures is not None:
            unfinished, _ = staying_in_halves(unfinished, sentences)
        leaving = (sentences - len(unfinished)) * self.num_beams
        stays = not leaving or (captures is not None and not captures.should_leave(leaving, self.max_len - step))
        return None if stays else unfinished

    def advance(self, proposed: Candidates) -> None:
        """Drops finished sentences, and continues with the best candidates that do not end."""
        search = self.generator.search
        batch_index = None
        step = proposed.step
        scores, tokens, rows, ended = proposed.scores, proposed.tokens, proposed.rows, proposed.ended
        if (remaining := self.remaining(step)) is not None:
            self.sentences = [self.sentences[number] for number in remaining]
            batch_index = on_device(remaining, scores.device)
            search.prune_sentences(batch_index)
            scores, tokens, rows, ended, self.ignored, self.source_lengths = (
                states.index_select(0, batch_index)
                for states in (scores, tokens, rows, ended, self.ignored, self.source_lengths)
            )
            self.ids = self.ids[batch_index]
            self.prefixes = None if self.prefixes is None else self.prefixes.index_select(0, batch_index)
        candidates = ended.shape[1]
        stopped = ended.clone()
        stopped[:, : self.num_beams] |= self.ignored
        indices = torch.arange(candidates, device=ended.device)
        rank, active = torch.topk(stopped * (2 * candidates) + indices, k=self.num_beams, dim=1, largest=False)
        self.ignored = rank.ge(2 * candidates)
        parents = rows.gather(1, active).view(-1)
        self.tokens = self.tokens.index_select(0, parents)  # candidates that are read late have the earlier ones
        self.scores = self.scores.index_select(0, parents)
        self.tokens[:, step + 1] = tokens.gather(1, active).view(-1)
        self.scores[:, step] = scores.gather(1, active).view(-1)
        search.update_constraints(active)
        if self.attention is not None:
            self.attention = self.attention.reordered(parents)
        self.step.reorder(parents, batch_index)


def _sorted_sync(hypotheses: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
    """Sorts the hypotheses of each sentence, the best first; reads all scores with one copy."""
    scores = [hypothesis["score"] for sentence in hypotheses for hypothesis in sentence]
    remaining = iter(torch.stack(scores).tolist() if scores else ())
    ordered = []
    for sentence in hypotheses:
        of_sentence = torch.tensor([next(remaining) for _ in sentence], device="cpu")
        ordered.append([sentence[index] for index in of_sentence.sort(descending=True)[1].tolist()])
    return ordered


class StepHistory:
    """The values `[rows, width]` of up to `steps` steps, for rows that are reordered.

    Values are never moved, and histories of other orders share them: each has its own table of ancestors.
    """

    def __init__(self, steps: int, values: Tensor) -> None:
        rows, width = values.shape
        self.values = torch.empty((rows, 1, steps, width), dtype=torch.float32, device=values.device)
        self.ancestors = Ancestors(rows, steps, values.device)
        self.ancestors.reset()
        self.written = 0

    def write(self, step: int, values: Tensor) -> None:
        """Stores values `[rows, width]` in the present order of rows."""
        self.values[: values.shape[0], 0, step] = values
        self.ancestors.reset(slice(step, step + 1))
        self.written = step + 1

    def reordered(self, order: Tensor) -> StepHistory:
        """Returns a history whose row i is row `order[i]` (int64); there may be fewer rows. This one stays as it is."""
        history = copy.copy(self)
        history.ancestors = self.ancestors.select(order)
        return history

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Returns the steps of these rows (int64), like `index_select` of a tensor `[rows, width, steps]`."""
        steps = follow(self.ancestors.select(rows).table, self.values[:, :, : self.written])
        return steps[:, 0].transpose(1, 2).contiguous()
