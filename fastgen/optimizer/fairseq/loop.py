"""The decoding loop for fairseq's `SequenceGenerator`: what upstream's does, with one read of the device in a step.

All bookkeeping of beams stays on the device; the host reads which candidates end their sentence. What the user may have
replaced (the search strategy, the n-gram blocker, `is_finished`, the models) is called as upstream calls it, with
tensors of the same shapes and in the same order, so that random numbers are drawn in the same order, too. Hypotheses
are built by fairseq's own `finalize_hypos`.

The tokens that the outputs of a language model have to begin with are fed one by one by fairseq, in all rows, and
scored. As far as every input has such a token, they are equal in all beams, and known beforehand (FastSeq §4.1.1): the
`Prompt` is computed once per input in one pass, its keys and values are kept once per input.

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
from fastgen.optimizer.fairseq.checks import computes_prompt_at_once
from fastgen.optimizer.fairseq.decode_step import DecodingState, FairseqDecodeStep
from fastgen.provenance import comes_with

# Log-probabilities of all words are needed at all positions of the prompt, but not at once.
MAX_ELEMENTS = 1 << 25

Hypothesis = dict[str, Tensor]


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


def prefill_sync(
    call: GenerateCall,
    generator: SequenceGenerator,
    prefixes: Tensor | None,
    first_token: int,
    states: list[DecodingState],
    max_len: int,
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
    outputs = [state.prefill(call, model.decoder, fed) for model, state in zip(generator.model.models, states)]
    size = max(1, MAX_ELEMENTS // (len(tokens) * generator.vocab_size))
    forced = []
    for start in range(0, length, size):
        log_probs = _log_probs(generator, outputs, slice(start, min(start + size, length)))
        forced.append(log_probs.gather(2, tokens[:, start : start + size, None]).squeeze(2))
    known = torch.nan_to_num(torch.cat(forced, dim=1), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    known = torch.where(tokens.eq(generator.unk), known - generator.unk_penalty, known)
    return Prompt(tokens, known, _log_probs(generator, outputs, slice(length, length + 1))[:, -1])


def _log_probs(generator: SequenceGenerator, outputs: list[tuple[Tensor, Any]], positions: slice) -> Tensor:
    """The logarithm of the mean of the models' probabilities, `[inputs, positions, vocabulary]`."""
    found = []
    for model, (features, extra) in zip(generator.model.models, outputs):
        logits = model.decoder.output_layer(features[:, positions]) / generator.temperature
        found.append(model.get_normalized_probs((logits, extra), log_probs=True, sample=None))
    return found[0] if len(found) == 1 else torch.logsumexp(torch.stack(found), dim=0) - math.log(len(found))


class Loop:
    """One call of `SequenceGenerator._generate`: B sentences that are still being generated, with M rows (beams) each.

    The rows of a sentence stand next to each other. A step proposes C candidates for each sentence, the best first; of
    these M beams go on. C is 2M where a candidate may end its sentence, so that M remain in any case.

    tokens: `[rows, max_len + 2]`, the first one begins the sentence. scores: sums of log-probabilities,
    `[rows, max_len + 1]`. ignored: which of the first M candidates count no more, because the sentence has collected so
    many hypotheses, or because nothing was left for this place, `[B, M]`. ids: numbers of the sentences in the data
    set. source_lengths: `[B]`. prefixes: tokens that outputs have to begin with, `[B, …]`. prompt: the columns of the
    prefixes whose keys are in the states of `step`, if there are any. hypotheses, finished: of all sentences of the
    batch.
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
            for step in range(self.skip_prompt(), self.max_len + 1):  # one more than words, for the end of the sentence
                scores, tokens, rows = self.propose(step)
                ended = tokens.eq(self.generator.eos) & scores.ne(-torch.inf)  # [B, C]
                ended[:, : self.num_beams] &= ~self.ignored
                finished = self.collect(step, scores, rows, ended)
                if all(self.finished) or (self.generator.search.stop_on_max_len and step >= self.max_len):
                    break
                if step >= self.max_len:
                    raise AssertionError(f"sentences without an end at step {step}, the last (max_len {self.max_len})")
                self.go_on(step, scores, tokens, rows, ended, finished)
        return _sorted_sync(self.hypotheses)

    def skip_prompt(self) -> int:
        """Writes the prompt where the search draws nothing and keeps no state; returns the first step left to do."""
        prompt, generator, search = self.prompt, self.generator, self.generator.search
        is_librarys = type(search) is BeamSearch and comes_with(search.step, BeamSearch)
        if prompt is None or not is_librarys or generator.repeat_ngram_blocker is not None:
            return 0
        self.tokens[:, 1 : prompt.length + 1] = prompt.tokens.repeat_interleave(self.num_beams, dim=0)
        self.scores[:, : prompt.length] = -torch.inf
        sums = [*accumulate(prompt.forced.unbind(1))]  # each rounded, as a search adds them up step by step
        self.scores[:: self.num_beams, : prompt.length] = torch.stack(sums, dim=1)  # one beam is left
        return prompt.length

    def propose(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the search proposes for the next token, the best first: scores, tokens and their rows, `[B, C]` each."""
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
        """Log-probabilities `[rows, vocabulary]` of the next token, after all rules about single tokens."""
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
        """Adds the hypotheses that end; returns the batch index of each sentence that is finished by it."""
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

    def go_on(
        self, step: int, scores: Tensor, tokens: Tensor, rows: Tensor, ended: Tensor, finished: list[int]
    ) -> None:
        """Drops finished sentences, and makes the best candidates that do not end the rows of the next step."""
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
    """The hypotheses of each sentence, the best first; reads all scores at once."""
    scores = [hypothesis["score"] for sentence in hypotheses for hypothesis in sentence]
    remaining = iter(torch.stack(scores).tolist() if scores else ())
    orders = [torch.tensor([next(remaining) for _ in sentence]).sort(descending=True)[1] for sentence in hypotheses]
    return [[sentence[index] for index in order.tolist()] for sentence, order in zip(hypotheses, orders)]


def _flags_sync(flags: Tensor) -> list[list[bool]]:
    return flags.tolist()


def _on_device(values: list[int], device: torch.device) -> Tensor:
    """Numbers of the host (int64) for the device, without waiting for it."""
    numbers: Any = torch.tensor(values, dtype=torch.int64)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


class StepHistory:
    """Values `[rows, width]` of up to `steps` steps, for at most `rows` rows, which change places.

    What was written is never moved. A table of ancestors is moved instead: the value that belongs to row i at step s
    lies in row `ancestors[i, s]` of step s.
    """

    def __init__(self, steps: int, values: Tensor, dtype: torch.dtype) -> None:
        rows, width = values.shape
        self.values = torch.empty((steps, rows, width), dtype=dtype, device=values.device)
        self.ancestors = torch.zeros((rows, steps), dtype=torch.int64, device=values.device)
        self.rows = torch.arange(rows, device=values.device)
        self.written = 0

    def write(self, step: int, values: Tensor) -> None:
        """Values `[rows, width]` of the rows as they lie at this step."""
        rows = values.shape[0]
        self.values[step, :rows] = values
        self.ancestors[:, step] = self.rows[:rows]
        self.written = step + 1

    def reorder(self, order: Tensor) -> None:
        """Makes row i what row `order[i]` (int64) was; there may be fewer rows than before."""
        self.ancestors = self.ancestors.index_select(0, order)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Returns the written steps of these rows (int64), as a tensor `[rows, width, steps]` would in dimension 0."""
        ancestors = self.ancestors.index_select(dim, rows)[:, : self.written].t()  # [steps, rows]
        steps = torch.arange(self.written, device=rows.device).unsqueeze(1)
        return self.values[steps, ancestors].permute(1, 2, 0).contiguous()
