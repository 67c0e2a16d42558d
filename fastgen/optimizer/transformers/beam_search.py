"""`GenerationMixin._beam_search`: the library's rules and numbers with fewer copies, and without finished inputs.

The library copies all tokens of all candidates four times in every step. This loop copies the tokens of the beams that
continue, and those of a hypothesis when it becomes one of the best.

Tests: tests/optimizer/transformers/test_finished_inputs.py, tests/optimizer/transformers/test_beam_scores.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops.beams import Candidates, best_of_all, best_of_allowed, best_of_different, on_device
from fastgen.optimizer.decoding.call import count
from fastgen.optimizer.decoding.captures import can_capture
from fastgen.optimizer.decoding.decode_step import LateFlags, staying_in_halves
from fastgen.optimizer.decoding.report import LOOP, Reason
from fastgen.optimizer.transformers import compat
from fastgen.optimizer.transformers.checks import CallChecks, current_call
from fastgen.optimizer.transformers.decode_step import TransformersDecodeStep
from fastgen.optimizer.transformers.outputs import Outputs, replaced_loop
from fastgen.optimizer.transformers.processors import (
    ALONE,
    PrefixConstrainedLogitsProcessor,
    all_rows_occur,
    trie_alone,
)

# The library's score of empty slots, which it also adds to the scores of candidates that are out of the race.
OUT = -1.0e9
# Scores of candidates that are out of the race are below this.
LOWEST = OUT / 2

NAN = Reason("NAN", "scores became NaN after inputs had left the batch: the library starts again")


def _beam_search(checks: CallChecks, processors: Any) -> Any:
    """Returns the outputs of `BeamSearch`; None if the library's loop must run. Adds to the report why."""
    call, (input_ids, _, criteria, config, *_) = checks.call, checks.arguments
    if reasons := checks.settings or checks.loop:
        call.report.add_reasons(LOOP, reasons)
        return None
    call.is_accelerated = True
    captures = can_capture(checks, len(input_ids), (config.max_length or 0) - input_ids.shape[1])
    step = TransformersDecodeStep(checks, processors, config.num_beams, captures)
    try:
        with step:
            return BeamSearch(input_ids, config, step).run(criteria)
    except ScoresAreNaN:
        call.report.add_reasons(LOOP, [NAN])
    return None


# Replaces `GenerationMixin._beam_search`, and the methods that it calls; input_ids `[inputs * num_beams, length]`.
beam_search = replaced_loop(
    _beam_search,
    "_update_finished_beams",
    "_get_top_k_continuations",
    "_get_running_beams_for_next_iteration",
    "_check_early_stop_heuristic",
    "_beam_search_has_unfinished_sequences",
    "_gather_beams",
)


def update_finished_beams(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `GenerationMixin._update_finished_beams`: stores the scores that the library's loop has reached."""
    updated = original(self, *args, **kwargs)
    if (call := current_call()) is not None:
        call.host.beam_scores = updated[1]
    return updated


class ScoresAreNaN(Exception):
    """A score is NaN, which counts as the best, also for inputs that have left; only a search with all can continue."""


class BeamSearch:
    """The search for the outputs of B inputs, with M beams each.

    input_ids: the tokens of the beams, `[B * M, length]`. prompt: a copy of the prompt; from the second step on the
    search reads this one, because a processor may have written into the original (as in the library). scores: sums of
    log-probabilities of the beams, the best first, `[B, M]`. best: the tokens of the M best hypotheses, with the
    prompt, `[B, M, max_length]`; best_scores, lengths, complete: their scores, numbers of generated tokens, and whether
    they have ended, `[B, M]`. can_improve: whether a beam may still become one of them, `[B, 1]`. is_full: whether an
    input has enough hypotheses and takes no more, `[B, 1]`. batch_index: the indices of these inputs in the batch,
    `[B]`. late: reads one step late whether the search has ended, and which inputs are final, so that the host does not
    wait for the device, or None; has_ended: whether the search was over before this step, on the device. was_nan:
    whether a score was NaN after inputs had left, on the device.
    """

    def __init__(self, input_ids: Tensor, config: Any, step: TransformersDecodeStep) -> None:
        self.config, self.step, self.num_beams = config, step, config.num_beams
        rows, self.prompt_length = input_ids.shape
        inputs = rows // self.num_beams
        device = input_ids.device
        eos = config._eos_token_tensor
        self.num_candidates = max(2, 1 + (0 if eos is None else eos.shape[0])) * self.num_beams
        self.input_ids, self.prompt = input_ids, input_ids.clone()
        self.scores = torch.zeros((inputs, self.num_beams), dtype=torch.float32, device=device)
        self.scores[:, 1:] = OUT  # all beams are equal at first: only the first one's candidates count
        fill = (config._pad_token_tensor or eos[0]) if eos is not None else -1
        self.best = torch.full((inputs, self.num_beams, config.max_length), fill, dtype=torch.int64, device=device)
        self.best[:, :, : self.prompt_length] = input_ids.view(inputs, self.num_beams, -1)
        self.best_scores = torch.full_like(self.scores, OUT)
        self.lengths = torch.zeros_like(self.scores, dtype=torch.int64)
        self.complete = torch.zeros_like(self.scores, dtype=torch.bool)
        self.can_improve = torch.ones((inputs, 1), dtype=torch.bool, device=device)
        self.is_full = torch.zeros_like(self.can_improve)
        self.outputs = Outputs(config)
        is_trie_alone = [*map(type, step.processors)] == [PrefixConstrainedLogitsProcessor]
        self.is_constrained = is_trie_alone and not (self.outputs.collects or config.do_sample)
        self.batch_index = torch.arange(inputs, device=device)
        self.beam_ids = torch.arange(self.num_beams, device=device)
        self.first_rows = torch.arange(0, rows, self.num_beams, device=device)[:, None]  # of all inputs
        # The other candidates only ensure that enough continue.
        self.may_end = torch.arange(self.num_candidates, device=device) < self.num_beams
        self.results: tuple[Tensor, ...] | None = None  # the hypotheses of all inputs, once some have left
        self.parents = torch.empty((rows, 0), dtype=torch.int32, device=device)
        generated = config.max_length - self.prompt_length
        self.best_parents = torch.full((inputs, self.num_beams, generated), -1, dtype=torch.int32, device=device)
        self.late = LateFlags(1 + inputs, device) if step.stops_late and not config.do_sample else None
        self.has_ended = torch.zeros((), dtype=torch.bool, device=device)
        self.was_nan = torch.zeros_like(self.has_ended)

    def run(self, stopping_criteria: Any) -> Any:
        """Returns what the library returns: sequences `[inputs * num_return_sequences, length]`, or a dictionary."""
        stop = False
        while not stop:
            stop, is_final = self.advance(*self.candidates(), stopping_criteria)
            if self.results is not None:
                self.was_nan |= self.scores.isnan().any()
                if self.late is None and self.was_nan:
                    raise ScoresAreNaN
            if not stop and any(is_final):
                self.compact(is_final)
        if self.was_nan:
            raise ScoresAreNaN
        best, lengths, scores = self.stored()
        self.step.call.host.beam_scores = scores
        returned = self.config.num_return_sequences
        length = self.prompt_length + int(lengths[:, :returned].max())
        of_beams = {
            "sequences_scores": scores[:, :returned].flatten() if self.config.output_scores else None,
            "beam_indices": self.best_parents[:, :returned, : length - self.prompt_length].flatten(0, 1),
        }
        return self.outputs.of(best[:, :returned, :length].flatten(0, 1), self.step, **of_beams)

    def candidates(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the best next tokens: their scores, the rows that they continue, and the tokens, `[B, C]` each."""
        logits = self.step.logits(self.input_ids)
        allowed = self.allowed_candidates(logits) if self.is_constrained else None
        log_probs = None
        width = logits.shape[1]
        samples = self.config.do_sample
        if allowed is None and (self.step.processors or self.outputs.collects or samples):
            log_probs = functional.log_softmax(logits, dim=-1)
            if self.step.processors:
                log_probs = self.step.processors(self.input_ids, log_probs)
            if self.outputs.is_dict:
                self.outputs.add(logits, log_probs, copies=True)
            # With the library's operations, so that errors are the library's: a processor may remove or add tokens.
            by_beam = torch.reshape(log_probs, [*self.scores.shape, *log_probs.shape[1:]])
            log_probs = by_beam.flatten(0, 1)
            width = by_beam.shape[-1]
            if by_beam.dim() != 3 or samples:
                sums = torch.reshape(by_beam + self.scores[:, :, None], (len(self.scores), -1))
                allowed = self.drawn(sums) if samples else torch.topk(sums, k=self.num_candidates)
                width = sums.shape[1] // self.num_beams
        candidates, index = allowed or best_of_all(logits, self.scores, self.num_candidates, log_probs)
        if self.step.steps == 1:
            self.input_ids = self.prompt
        beams = index // width
        tokens = index % width
        return candidates, self.first_rows[: len(beams)] + beams, tokens

    def drawn(self, sums: Tensor) -> Candidates:
        """Returns candidates that are drawn without replacement, in the library's order."""
        index = torch.multinomial(functional.softmax(sums, dim=-1), num_samples=self.num_candidates)
        scores = sums.gather(1, index)
        if compat.SORTS_DRAWN:
            scores, order = scores.sort(dim=-1, descending=True)
            index = index.gather(1, order)
        return scores, index

    def allowed_candidates(self, logits: Tensor) -> Candidates | None:
        """Returns scores and indices `[B, C]` of the best tokens that a trie allows; None if all tokens count."""
        candidates = None
        count_of_rows = self.input_ids.shape[0]
        if (trie := trie_alone(self.step.processors, logits.shape[1])) is None:
            return None
        racing = (self.scores.flatten() > LOWEST).nonzero().flatten() if trie.at_dead_ends else ()
        if len(racing) not in (0, count_of_rows):  # may suffice: in the first step, one row of each input
            rows, tokens = trie.allowed_sync(self.input_ids[racing])
            candidates = best_of_different(logits, self.scores, racing[rows], tokens, self.num_candidates)
        if candidates is None:
            rows, tokens = trie.allowed_sync(self.input_ids)
            if not all_rows_occur(rows, count_of_rows):
                return None
            candidates = best_of_allowed(logits, self.scores, rows, tokens, self.num_candidates)
        if candidates is not None:
            count(ALONE)
        return candidates

    def advance(
        self, candidates: Tensor, parents: Tensor, tokens: Tensor, stopping_criteria: Any
    ) -> tuple[bool, list[bool]]:
        """Continues with the best of the candidates, see `candidates`.

        Returns whether the search has ended, and for each input whether its hypotheses are final.
        """
        length = self.input_ids.shape[1] + 1
        continued = None  # the tokens of all candidates, `[B, C, length]`
        if self.step.checks.stops_by_row:  # by the length and the last token
            ended = stopping_criteria(tokens.view(-1, 1).expand(-1, length), None).view(tokens.shape)
        else:  # a criterion of the program may also write into the tokens
            continued = joined(self.input_ids, parents, tokens)
            ended = stopping_criteria(continued.view(-1, length), self.outputs.scores).view(tokens.shape)
        continuing = torch.add(candidates, ended, alpha=OUT)
        chosen = torch.topk(continuing, k=self.num_beams)[1]
        self.scores = continuing.gather(1, chosen)
        entering = self.enter(candidates, ended, length - self.prompt_length)
        stop, is_final = self.judge(ended, length - self.prompt_length)
        if self.late is None:
            unmoved = entering == self.beam_ids
            stop, unmoved, *is_final = torch.cat([stop.view(1), unmoved.all().view(1), is_final]).tolist()
        else:
            self.has_ended = stop
            has_ended, *is_final = self.late.exchange(torch.cat([stop.view(1), is_final])) or [False]
            stop = has_ended or length >= self.config.max_length
            unmoved = False
        if not unmoved:
            if (tokens_of := continued) is None:
                tokens_of = joined(self.input_ids, parents, tokens)
            self.move_best(self.best, entering, tokens_of)
            if self.outputs.is_dict:
                self.move_best(self.best_parents, entering, joined(self.parents, parents, parents))
        beam_idx = parents.gather(1, chosen).flatten()
        if not stop:
            if continued is None:
                next_tokens = tokens.gather(1, chosen).view(-1, 1)
                self.input_ids = torch.cat([self.input_ids.index_select(0, beam_idx), next_tokens], dim=1)
            else:
                self.input_ids = continued.take_along_dim(chosen[:, :, None], dim=1).flatten(0, 1)
            if self.outputs.is_dict:
                chosen_rows = beam_idx[:, None].int()
                self.parents = torch.cat([self.parents.index_select(0, beam_idx), chosen_rows], dim=1)
        self.step.reorder(beam_idx)  # after the last step, too: user code may keep the cache
        return stop, is_final

    def enter(self, candidates: Tensor, ended: Tensor, generated: int) -> Tensor:
        """Returns the M best, `[B, M]`, of the best so far (numbers 0 to M - 1) and the candidates (from M on)."""
        ended = ended & self.may_end
        scores = candidates / (generated**self.config.length_penalty)
        if self.config.early_stopping is True:
            scores.add_(self.is_full, alpha=OUT)
        scores.add_(~self.can_improve, alpha=OUT).add_(~ended, alpha=OUT)
        merged = torch.cat([self.best_scores, scores], dim=1)
        entering = torch.topk(merged, k=self.num_beams)[1]
        if self.late is not None:  # after the end, no hypothesis is added
            entering = torch.where(self.has_ended, self.beam_ids, entering)
        self.best_scores = merged.gather(1, entering)
        self.complete = torch.cat([self.complete, ended], dim=1).gather(1, entering)
        lengths = torch.full_like(ended, generated, dtype=torch.int64)
        self.lengths = torch.cat([self.lengths, lengths], dim=1).gather(1, entering)
        return entering

    def judge(self, ended: Tensor, generated: int) -> tuple[Tensor, Tensor]:
        """Updates `can_improve` and `is_full`; returns whether the search has ended, and which inputs may leave.

        These are inputs whose hypotheses are final, `[B]`, which they stay, so that inputs may leave a step late.
        """
        config = self.config
        if config.early_stopping == "never" and config.length_penalty > 0.0:
            generated = config.max_length - self.prompt_length
        best_possible = self.scores[:, :1] / (generated**config.length_penalty)
        worst = self.best_scores.amin(dim=1, keepdim=True)
        to_beat = torch.where(self.complete, worst, OUT)
        self.can_improve = self.can_improve & (best_possible > to_beat).any(dim=-1, keepdim=True)
        stop = ~self.can_improve.any() | ended.all()
        may_change = self.can_improve
        if config.early_stopping is True:
            self.is_full = self.complete.all(dim=-1, keepdim=True)
            stop |= self.is_full.all()
            may_change = may_change & ~self.is_full
        if len(self.scores) == 1:
            return stop, stop.new_empty(0)
        return stop, torch.where(may_change, False, worst > LOWEST).flatten()

    @staticmethod
    def move_best(best: Tensor, entering: Tensor, candidates: Tensor) -> None:
        """Updates the tokens or parents of the best hypotheses, `[B, M, …]`, with candidates' `[B, C, length]`."""
        length = candidates.shape[2]
        merged = torch.cat([best[:, :, :length], candidates], dim=1)
        best[:, :, :length] = merged.take_along_dim(entering[:, :, None], dim=1)

    def compact(self, is_final: list[bool]) -> None:
        """Drops inputs whose hypotheses are final, if that is worthwhile."""
        if not (remaining := [index for index, final in enumerate(is_final) if not final]):
            return
        if self.late is not None:
            remaining, _ = staying_in_halves(remaining, len(is_final))
        leaving = (len(is_final) - len(remaining)) * self.num_beams
        left = self.config.max_length - self.input_ids.shape[1]
        if not leaving or not self.step.should_compact(leaving, left):
            return
        if self.late is not None:
            self.late.keep([0, *(1 + index for index in remaining)])
            self.was_nan |= self.scores.isnan().any()  # since the flags of the previous step
        self.results = self.stored()
        batch_index = on_device(remaining, self.batch_index.device)
        rows = (batch_index[:, None] * self.num_beams + self.beam_ids).flatten()
        self.step.compact(batch_index, rows)
        self.input_ids = self.input_ids.index_select(0, rows)
        for name in ("scores", "best", "best_scores", "lengths", "complete", "can_improve", "is_full", "batch_index"):
            setattr(self, name, getattr(self, name).index_select(0, batch_index))

    def stored(self) -> tuple[Tensor, ...]:
        """Returns best, lengths and best_scores of all inputs, with the present ones of those that remain."""
        current = self.best, self.lengths, self.best_scores
        if self.results is None:  # no input has left
            return current
        for results, values in zip(self.results, current):
            results[self.batch_index] = values
        return self.results


def joined(rows: Tensor, parents: Tensor, added: Tensor) -> Tensor:
    """Returns `rows[parents]`, `[B, C, length]`, with `added` `[B, C]` appended: `[B, C, length + 1]`."""
    return torch.cat([rows[parents], added[:, :, None].to(rows.dtype)], dim=2)
