"""The decoding loop for fairseq's `SequenceGenerator`: what upstream's does, without waiting for the device.

All bookkeeping stays on the device; a step reads one thing, which candidates have ended. What the user may have
replaced (the search strategy, the n-gram blocker, `is_finished`, the models) is called as upstream calls it, with
tensors of the same shapes and in the same order, so that random numbers are drawn in the same order, too.

Tests: tests/optimizer/fairseq/test_fairseq_loop.py, tests/optimizer/fairseq/test_fairseq_options.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from fastgen.optimizer.decoding import beam_search
from fastgen.optimizer.decoding.step_history import StepHistory
from fastgen.optimizer.fairseq import hypotheses
from fastgen.optimizer.fairseq.decode_step import FairseqDecodeStep
from fastgen.optimizer.fairseq.hypotheses import Collected, Hypothesis, Scoring
from fastgen.optimizer.fairseq.prompt import Prompt, skips_search
from fastgen.origin import comes_with


@dataclass
class Sentences:
    """The sentences that are still being generated, M rows for each, those of a sentence next to each other.

    numbers: which sentence of the batch has each place. ids: their numbers in the data set. tokens: `[rows, max_len +
    2]`, the first one begins the sentence. scores: sums of log-probabilities, `[rows, max_len + 1]`. ignored: which
    beams count no more, `[B, M]`. source_lengths: `[B]`. prefixes: tokens that outputs have to begin with, `[B, …]`.
    """

    numbers: list[int]
    ids: Tensor
    tokens: Tensor
    scores: Tensor
    ignored: Tensor
    source_lengths: Tensor
    prefixes: Tensor | None = None

    @property
    def places(self) -> Tensor:
        return torch.arange(len(self.numbers), device=self.tokens.device)

    def keep(self, places: list[int], index: Tensor) -> None:
        """Drops the sentences that are not at `places`; of tokens and scores `take` takes the rows that go on."""
        self.numbers = [self.numbers[place] for place in places]
        self.source_lengths = self.source_lengths.index_select(0, index)
        self.ignored = self.ignored.index_select(0, index)
        if self.prefixes is not None:
            self.prefixes = self.prefixes.index_select(0, index)

    def take(self, rows: Tensor, step: int) -> None:
        """Row i becomes what row `rows[i]` is, as far as it is written before `step` is."""
        if rows.shape[0] < self.tokens.shape[0]:
            self.tokens, self.scores = self.tokens.index_select(0, rows), self.scores.index_select(0, rows)
            return
        self.tokens[:, : step + 1] = self.tokens[:, : step + 1].index_select(0, rows)
        if step > 0:
            self.scores[:, :step] = self.scores[:, :step].index_select(0, rows)


@dataclass
class Candidates:
    """What the search proposes for the next token, the best first, `[B, C]` each."""

    scores: Tensor
    tokens: Tensor
    beams: Tensor

    def keep(self, index: Tensor) -> None:
        self.scores, self.tokens, self.beams = (
            states.index_select(0, index) for states in (self.scores, self.tokens, self.beams)
        )


class Loop:
    """One call of `SequenceGenerator._generate`."""

    def __init__(
        self,
        generator: SequenceGenerator,
        sentences: Sentences,
        step: FairseqDecodeStep,
        max_len: int,
        prompt: Prompt | None = None,
    ) -> None:
        """prompt: the beginning of all sentences, whose keys are in the states of `step`, if there is one."""
        self.generator = generator
        self.prompt = prompt
        self.sentences = sentences
        self.step = step
        self.max_len = max_len
        self.num_beams = generator.beam_size
        self.collected = Collected(self.num_beams, [[] for _ in sentences.numbers])
        self.attention: StepHistory | None = None
        self.scoring = Scoring(
            generator.eos, generator.normalize_scores, generator.len_penalty, generator.match_source_len
        )
        suppressed = generator.token_indices_to_suppress
        self.suppressed = None if suppressed is None else suppressed.to(sentences.tokens.device)

    def run(self) -> list[list[Hypothesis]]:
        with self.step:
            return self.search()

    def search(self) -> list[list[Hypothesis]]:
        for step in range(self.skip_prompt(), self.max_len + 1):  # one more than words, for the end of the sentence
            candidates = self.propose(step)
            ended = beam_search.ending(candidates.scores, candidates.tokens, self.generator.eos, self.sentences.ignored)
            finished = self.collect(step, candidates, _flags_sync(ended[:, : self.num_beams]))
            if len(finished) == len(self.sentences.numbers) or self._stops(step):
                break
            if step >= self.max_len:
                raise AssertionError(f"sentences without an end at step {step}, the last one (max_len {self.max_len})")
            self.go_on(step, candidates, ended, finished)
        return self.collected.sorted_sync()

    def skip_prompt(self) -> int:
        """Writes the prompt if the search need not see how; returns the first step that is left to do."""
        if self.prompt is None or not skips_search(self.generator):
            return 0
        length, sentences = self.prompt.length, self.sentences
        sentences.tokens[:, 1 : length + 1] = sentences.prefixes[:, :length].repeat_interleave(self.num_beams, dim=0)
        sentences.scores[:, :length] = self.prompt.scores(self.num_beams)
        return length

    def propose(self, step: int) -> Candidates:
        generator, sentences = self.generator, self.sentences
        written = sentences.tokens[:, : step + 1]
        log_probs = self.log_probs(step, written)
        sentences.scores = sentences.scores.type_as(log_probs)
        if generator.should_set_src_lengths:
            generator.search.set_src_lengths(sentences.source_lengths)
        size, beams = len(sentences.numbers), self.num_beams
        if generator.repeat_ngram_blocker is not None:
            log_probs = generator.repeat_ngram_blocker(sentences.tokens, log_probs, size, beams, step)
            if isinstance(generator.search, Sampling):  # a row that has ended may have no token left to draw
                impossible = log_probs.amax(1, keepdim=True).exp().eq(0)
                log_probs.masked_fill_(sentences.ignored.view(-1, 1) & impossible, 0.0)
        return Candidates(
            *generator.search.step(
                step,
                log_probs.view(size, -1, generator.vocab_size),
                sentences.scores.view(size, beams, -1)[:, :, :step],
                sentences.tokens[:, : step + 1],
                sentences.ids,
            )
        )

    def log_probs(self, step: int, written: Tensor) -> Tensor:
        """Log-probabilities `[rows, vocabulary]` of the next token, after all rules about single tokens."""
        generator, prompt = self.generator, self.prompt
        if prompt is not None and step < prompt.length:
            return prompt.log_probs(self.sentences.prefixes, step, self.num_beams)
        if prompt is not None and step == prompt.length:
            log_probs, weights = prompt.last.repeat_interleave(self.num_beams, dim=0), None
        else:
            log_probs, weights = self.step.log_probs(written)
        if weights is not None:
            if self.attention is None:
                self.attention = StepHistory(self.max_len + 1, weights, torch.float32)
            self.attention.write(step, weights)
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
        prefixes = self.sentences.prefixes
        if prefixes is not None and step < prefixes.shape[1] and step < self.max_len:
            return self.force_prefix(step, log_probs)
        if step < generator.min_len:
            log_probs[:, generator.eos] = -torch.inf
        if self.suppressed is not None:
            log_probs.index_fill_(1, self.suppressed, -torch.inf)
        return log_probs

    def force_prefix(self, step: int, log_probs: Tensor) -> Tensor:
        sentences, generator = self.sentences, self.generator
        if not forces_as_upstream(generator):
            log_probs, sentences.tokens, sentences.scores = generator._prefix_tokens(
                step, log_probs, sentences.scores, sentences.tokens, sentences.prefixes, self.num_beams
            )
            return log_probs
        tokens = sentences.prefixes[:, step].repeat_interleave(self.num_beams)
        return beam_search.force_tokens(log_probs, tokens, generator.pad)

    def collect(self, step: int, candidates: Candidates, ended: list[list[bool]]) -> list[int]:
        """Keeps the hypotheses that end; returns the places of the sentences that are finished."""
        sentences, generator = self.sentences, self.generator
        wanted = self.collected.wanted(ended, sentences.numbers)
        if wanted:
            width = candidates.scores.shape[1]
            index = hypotheses.on_device(
                [place * width + candidate for place, candidate in wanted] + [place for place, _ in wanted],
                sentences.tokens.device,
            )
            chosen, places = index.view(2, -1)
            rows = beam_search.rows_of(candidates.beams, sentences.places, self.num_beams)
            built = hypotheses.build(
                step,
                rows.flatten().index_select(0, chosen),
                candidates.scores.flatten().index_select(0, chosen),
                sentences.tokens,
                sentences.scores,
                self.attention,
                sentences.source_lengths.index_select(0, places),
                self.scoring,
            )
            for (place, _), hypothesis in zip(wanted, built):
                self.collected.sentences[sentences.numbers[place]].append(hypothesis)

        def is_finished(place: int, collected: int) -> bool:
            return generator.is_finished(step, place, self.max_len, collected, self.num_beams)

        return self.collected.finished(is_finished, ended, sentences.numbers)

    def go_on(self, step: int, candidates: Candidates, ended: Tensor, finished: list[int]) -> None:
        """Drops finished sentences, and makes the best candidates that do not end the rows of the next step."""
        sentences, search = self.sentences, self.generator.search
        places, kept = sentences.places, None
        if finished:
            remaining = [place for place in range(len(sentences.numbers)) if place not in finished]
            places = kept = hypotheses.on_device(remaining, sentences.tokens.device)
            search.prune_sentences(kept)
            sentences.keep(remaining, kept)
            candidates.keep(kept)
            ended = ended.index_select(0, kept)
        active, sentences.ignored = beam_search.going_on(ended, sentences.ignored)
        parents = beam_search.rows_of(candidates.beams.gather(1, active), places, self.num_beams).view(-1)
        sentences.take(parents, step)
        size = len(sentences.numbers)
        sentences.tokens.view(size, self.num_beams, -1)[:, :, step + 1] = candidates.tokens.gather(1, active)
        sentences.scores.view(size, self.num_beams, -1)[:, :, step] = candidates.scores.gather(1, active)
        search.update_constraints(active)
        if kept is not None:
            sentences.ids = sentences.ids[kept]
        if self.attention is not None:
            self.attention.reorder(parents)
        self.step.reorder(parents, kept)

    def _stops(self, step: int) -> bool:
        return self.generator.search.stop_on_max_len and step >= self.max_len


def forces_as_upstream(generator: SequenceGenerator) -> bool:
    return comes_with(generator._prefix_tokens, SequenceGenerator)


def _flags_sync(flags: Tensor) -> list[list[bool]]:
    return flags.tolist()
