"""`GenerationMixin._sample`: captured steps, compaction, and drafts on a CPU. Other calls go to the library's loop.

Rows that have ended leave the batch: at once on a CPU, in halves on a GPU. In sampling, random numbers are still drawn
for all rows, as by the library, so that a seed gives the same samples.

Tests: tests/optimizer/transformers/test_finished_inputs.py, tests/optimizer/transformers/test_captured_steps.py,
tests/optimizer/transformers/test_refused_calls.py
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fastgen.config import CONFIG
from fastgen.ops.beams import on_device
from fastgen.ops.probes import probe
from fastgen.optimizer.decoding.captures import can_capture, unwanted_reasons
from fastgen.optimizer.decoding.cost_model import CostModel, ModelSize, Work, size_of
from fastgen.optimizer.decoding.decode_step import LateFlags, staying_in_halves
from fastgen.optimizer.decoding.report import DRAFTS, LOOP, STEPS, Reason, check, that_hold
from fastgen.optimizer.transformers import compat
from fastgen.optimizer.transformers.checks import CallChecks
from fastgen.optimizer.transformers.decode_step import TransformersDecodeStep, is_worth_compacting
from fastgen.optimizer.transformers.outputs import Outputs, replaced_loop
from fastgen.optimizer.transformers.processors import may_write
from fastgen.optimizer.transformers.row_draws import RowDraws

# Random integers drawn in one piece; and the number below which torch draws faster, if no row has ended.
MOST_BITS = 1 << 20
MIN_ELEMENTS_TO_DRAW = 1 << 17

MANTISSA = (1 << 53) - 1  # the bits of a uniform double

# Calls with fewer steps, or with more rows, get no drafts: the first row whose draft fails ends the draft of all. With
# FASTGEN_REPEATABLE=1 each call compares its first drafts anew, which costs more than drafts of several rows save.
MIN_DRAFT_STEPS = 8
MOST_DRAFT_ROWS = 8
MOST_DRAFT_ROWS_REPEATABLE = 1


def _sample(checks: CallChecks, processors: Any) -> Any:
    """Returns the outputs of `TokenLoop`; None if the library's loop must run."""
    call, (input_ids, _, criteria, config, *_) = checks.call, checks.arguments
    compacts, captures, drafts = parts_of_loop(checks)
    if not (compacts or captures or drafts):
        return None
    call.is_accelerated = True
    sources = _sources(call.host.source, len(input_ids)) if drafts else None
    step = TransformersDecodeStep(checks, processors, 1, captures, sources)
    with step:
        return TokenLoop(input_ids, config, step, compacts).run(criteria, checks.arguments.streamer)


# Replaces `GenerationMixin._sample`, greedy search or sampling; input_ids `[rows, length]`.
sample = replaced_loop(_sample)


def _sources(source: Tensor | None, rows: int) -> list[list[int]]:
    """Returns the encoder's tokens for each row; empty if there are none."""
    if source is None or rows % len(source):
        return []
    return source.repeat_interleave(rows // len(source), dim=0).tolist()


def parts_of_loop(checks: CallChecks) -> tuple[bool, bool, bool]:
    """Returns whether rows may leave, steps are captured, and drafts checked; if none, the library's loop runs.

    Adds to the report why not.
    """
    call, model, (input_ids, _, criteria, config, *_) = checks.call, checks.model, checks.arguments
    call.report.add_reasons(LOOP, checks.settings)
    nothing = False, False, False
    if checks.settings:
        return nothing
    rows, length = input_ids.shape
    steps = (config.max_length or 0) - length
    size = size_of(model, checks.known_code)
    unwanted = unwanted_reasons(call, input_ids.device, steps)
    call.report.add_reasons(STEPS, unwanted)
    is_cpu = input_ids.device.type == "cpu"
    compacts = is_worth_compacting(call.costs, size, rows - 1, rows, steps, steps - 1) if is_cpu else not unwanted
    compacts = compacts and not (config.return_dict_in_generate or call.host.user_cache)
    compacts = compacts and _can_end_early(input_ids, criteria, config)
    drafts = _may_draft(checks, steps)
    if unwanted and not (compacts or drafts):
        return nothing
    call.report.add_reasons(LOOP, checks.loop)
    if checks.loop:
        return nothing
    captures = can_capture(checks, rows, steps)
    return compacts and (is_cpu or captures), captures, drafts


def _may_draft(checks: CallChecks, steps: int) -> bool:
    """Whether the steps of this loop look for drafts, so that there are texts and a cache; adds to the report."""
    if CONFIG.drafts == "off":
        checks.call.report.add_reasons(DRAFTS, [Reason("DRAFTS_OFF", "FASTGEN_DRAFTS=off")])
        return False
    input_ids, arguments = checks.arguments.input_ids, checks.arguments.model_kwargs
    is_possible = input_ids.device.type == "cpu" and input_ids.dim() == 2 and arguments.get("use_cache")
    size = size_of(checks.model, checks.known_code)
    if not is_possible or not compat.LAYERS_ARE_KNOWN:
        return False
    reasons = unwanted_drafts(checks.call.costs, size, len(input_ids), steps)
    checks.call.report.add_reasons(DRAFTS, reasons)
    return not reasons


@check(DRAFTS)
def unwanted_drafts(costs: CostModel, size: ModelSize, rows: int, steps: int) -> list[Reason]:
    """Returns why it is not worthwhile to look for drafts in a call of `steps` steps."""
    step = size.step(rows)
    most = MOST_DRAFT_ROWS_REPEATABLE if CONFIG.repeatable else MOST_DRAFT_ROWS
    least = costs.min_computed * costs.seconds(Work(step.modules))
    return that_hold(
        ("FEW_STEPS", f"the call has fewer than {MIN_DRAFT_STEPS} steps", steps < MIN_DRAFT_STEPS),
        ("MANY_ROWS", f"{rows} rows (at most {most})", rows > most),
        ("TOO_SMALL", "a step takes longer in Python than in kernels", costs.seconds(step.without_modules) < least),
    )


def _can_end_early(input_ids: Tensor, stopping_criteria: Any, config: Any) -> bool:
    """Whether some of several rows may end before other rows, on a CPU or a GPU.

    Not with no_repeat_ngram_size 1: a row that has ended may have no token left, for which the library raises an error.
    """
    has_end = any(type(criterion) is EosTokenCriteria for criterion in stopping_criteria)
    several = input_ids.shape[0] > 1 and input_ids.device.type in ("cpu", "cuda")
    draws = not config.do_sample or (config.no_repeat_ngram_size != 1 and _draws_as_torch(input_ids.device))
    return has_end and several and draws


class TokenLoop:
    """A greedy or sampling loop: each row gets one token at each step.

    input_ids: the tokens of the rows in the batch, `[rows, length]`; unfinished: whether each has not ended, bool
    `[rows]`; row_index: their indices among all_rows rows. finished: indices and tokens of the batch before each
    compaction. late: reads `unfinished` one step late, so that the host does not wait for the device, or None;
    late_flags: what it has read. draws_itself: whether tokens are drawn with `_draw` or `_draw_on_gpu`.
    drew_for_padding: whether a padding token was fed and a token drawn from its logits. criteria, lengths: the stopping
    criteria; those of the length are evaluated on the host.
    """

    def __init__(self, input_ids: Tensor, config: Any, step: TransformersDecodeStep, compacts: bool) -> None:
        self.config, self.step, self.compacts = config, step, compacts
        device = input_ids.device
        self.input_ids = input_ids
        self.all_rows = input_ids.shape[0]
        self.pad = None if config._pad_token_tensor is None else config._pad_token_tensor.to(device)
        self.unfinished = torch.ones(self.all_rows, dtype=torch.bool, device=device)
        self.row_index = torch.arange(self.all_rows, device=device)
        self.finished: list[tuple[Tensor, Tensor]] = []
        self.outputs = Outputs(config)
        self.late = LateFlags(self.all_rows, device) if step.stops_late else None
        self.late_flags: list[bool] = []
        self.drew_for_padding = False
        self.draws_itself = config.do_sample and device.type in ("cpu", "cuda") and _draws_as_torch(device)
        self.random = _generator_of(device)

    def run(self, stopping_criteria: Any, streamer: Any = None) -> Any:
        """Returns what the library returns: sequences `[rows, length]`, or a dictionary."""
        self.pads = self.pad is not None and any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.criteria = stopping_criteria
        self.lengths: list[MaxLengthCriteria] = []
        if self.step.checks.stops_by_row:
            self.lengths = [criterion for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
            rest = [criterion for criterion in stopping_criteria if type(criterion) is not MaxLengthCriteria]
            self.criteria = rest[0] if len(rest) == 1 else type(stopping_criteria)(rest)
        logits = self.step.logits(self.input_ids)
        with compat.optimized_for_decode(self.step.model):
            while not self.advance(logits, streamer):
                if self.compacts:
                    self.compact()
                logits = self.step.logits(self.input_ids)
        if streamer is not None:
            streamer.end()
        if self.pad is None or not self.finished:  # without padding no row ends before the rest
            return self.outputs.of(self.input_ids, self.step)
        output = self.pad.repeat(self.all_rows, self.input_ids.shape[1])
        for rows, tokens in [*self.finished, (self.row_index, self.input_ids)]:
            output[rows, : tokens.shape[1]] = tokens
        return output

    def advance(self, logits: Tensor, streamer: Any) -> bool:
        """Adds a token to each row, and returns whether all rows have ended."""
        previous_state = self.random.get_state() if self.config.do_sample and self.late is not None else None
        tokens = self.chosen(logits)
        if self.pads:
            tokens = torch.where(self.unfinished, tokens, self.pad)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=1)
        if streamer is not None and not compat.STREAMS_AFTER_CRITERIA:
            streamer.put(tokens.cpu())
        is_last = self.has_full_length()
        if self.criteria:
            ended = self.criteria(self.input_ids, self.outputs.scores)
            if ended.dtype != torch.bool:  # of a program's criteria; the library counts with integers
                ended = ~(self.unfinished.long() & ~ended).bool()
            self.unfinished = self.unfinished & ~ended
        if streamer is not None and compat.STREAMS_AFTER_CRITERIA:
            streamer.put(tokens.cpu())
        if not self.criteria:
            return is_last
        if self.late is None:
            return is_last or not bool(self.unfinished.any())
        self.drew_for_padding |= not all(self.late_flags)  # these rows had ended two steps ago: their padding was fed
        self.late_flags = self.late.exchange(self.unfinished)
        if self.late_flags and not any(self.late_flags):  # this step was superfluous
            if previous_state is not None:
                self.random.set_state(previous_state)
            self.input_ids = self.input_ids[:, :-1]
            return True
        return is_last or self.input_ids.shape[1] >= self.config.max_length

    def chosen(self, logits: Tensor) -> Tensor:
        """Returns a token for each row from logits `[rows, vocabulary_size]`, and adds the step to the outputs."""
        processors, draws = self.step.processors, self.config.do_sample
        collects = self.outputs.collects
        draws_by_row = draws and processors and not collects and type(processors[-1]) is RowDraws
        by_row = processors[-1] if draws_by_row else None
        if by_row is not None:
            processors = type(processors)(processors[:-1])
        if collects or may_write(processors):  # the next forward may overwrite them
            logits = logits.clone()
        scores = processors(self.input_ids, logits) if processors else logits
        self.outputs.add(logits, scores)
        if not draws:
            return torch.argmax(scores, dim=-1)
        if by_row is not None:
            return by_row.tokens(self.input_ids, scores, self.row_index)
        # With the library's operations, and random numbers for all rows.
        return self.drawn(functional.softmax(scores, dim=-1))

    def has_full_length(self) -> bool:
        """Whether a criterion of the length ends all rows: it gets no tokens, and is not computed on the device."""
        tokens = torch.empty((1, 1), dtype=torch.int64, device="cpu").expand(1, self.input_ids.shape[1])
        ends = [bool(criterion(tokens, None)) for criterion in self.lengths]  # each may warn
        return any(ends)

    def drawn(self, probs: Tensor) -> Tensor:
        """Draws a token per row from probabilities `[rows, vocabulary_size]`; any token for a row that gets padding."""
        if not self.draws_itself or probs.shape[:-1] != self.unfinished.shape:
            return torch.multinomial(probs, num_samples=1).squeeze(1)
        if probs.is_cuda:
            return _draw_on_gpu(probs, self.all_rows, self.row_index)
        live = self.unfinished if self.pads else torch.ones_like(self.unfinished)
        all_unfinished = len(probs) == self.all_rows and bool(live.all())
        is_small = all_unfinished and probs.numel() < MIN_ELEMENTS_TO_DRAW
        if is_small or not probs.sum().isfinite():  # raises an error if probs are not finite
            return torch.multinomial(probs, num_samples=1).squeeze(1)
        if all_unfinished:
            return _draw(probs, self.all_rows, self.row_index)
        tokens = torch.zeros_like(live, dtype=torch.int64)
        tokens[live] = _draw(probs[live], self.all_rows, self.row_index[live])
        return tokens

    def compact(self) -> None:
        """Drops rows that have ended, if that is worthwhile.

        All remaining inputs keep the same number of rows, the most that any of them needs, because they share keys. The
        library also draws for rows that have ended, and raises an error if the logits of padding are not finite: until
        one row has shown that they are finite, no row is dropped.
        """
        step = self.step
        if step.call.rows and step.steps == 1:
            step.rows_per_input = step.call.rows // step.call.inputs
        unfinished = self.unfinished.tolist() if self.late is None else self.late_flags
        if all(unfinished) or not self.pads:
            return
        if self.config.do_sample and not self.drew_for_padding:
            if self.late is None:
                fed = self.input_ids[:, -2:-1]  # empty in the first step after embeddings
                self.drew_for_padding = bool((fed == self.pad).any())
            if not self.drew_for_padding:
                return
        by_input, inputs, most = self.staying(unfinished)
        left = self.config.max_length - self.input_ids.shape[1]
        leaving = len(unfinished) - len(inputs) * most
        if not leaving or not step.should_compact(leaving, left):
            return
        rows = []
        for index in inputs:
            unfinished_first = sorted(range(step.rows_per_input), key=lambda row: not by_input[index][row])
            rows += [index * step.rows_per_input + row for row in sorted(unfinished_first[:most])]
        self.finished.append((self.row_index, self.input_ids))
        device = self.input_ids.device
        chosen = on_device(rows, device)
        step.compact(on_device(inputs, device), chosen)
        if self.late is not None:
            self.late.keep(rows)
        self.input_ids, self.unfinished = self.input_ids[chosen], self.unfinished[chosen]
        self.row_index = self.row_index[chosen]

    def staying(self, unfinished: list[bool]) -> tuple[list[list[bool]], list[int], int]:
        """Returns the flags by input, which inputs stay, and how many rows each keeps; on a GPU powers of two."""
        size = self.step.rows_per_input
        by_input = [unfinished[first : first + size] for first in range(0, len(unfinished), size)]
        inputs = [index for index, flags in enumerate(by_input) if any(flags)]
        most = max(map(sum, by_input))
        if self.late is not None:
            inputs, most = staying_in_halves(inputs, len(by_input), most, size)
        return by_input, inputs, most


def _generator_of(device: torch.device) -> torch.Generator:
    """Returns the generator of a GPU's random numbers, or of the CPU's."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _draw(probs: Tensor, rows: int, row_index: Tensor) -> Tensor:
    """Draws what `torch.multinomial` draws from probabilities `[rows, vocabulary_size]`, for some rows, ascending.

    torch divides by exponential noise, and takes 64 random bits for each number. These are drawn for all rows; the rest
    is computed for the given rows, on all threads. AMD EPYC (family 25, model 17), 2 threads, 64 rows of 50,257 tokens,
    ms: torch 61, here 36; for 32 of these rows 17.
    """
    vocabulary = probs.shape[1]
    noise = torch.empty_like(probs)
    done = 0
    block = max(1, MOST_BITS // vocabulary)
    bits = probs.new_empty((min(block, rows), vocabulary), dtype=torch.int64)
    for first in range(0, rows, block):
        drawn = bits[: rows - first].random_()
        chosen = row_index[(row_index >= first) & (row_index < first + block)] - first
        if len(chosen):
            uniform = (drawn[chosen] & MANTISSA).double().mul_(-(2.0**-53))
            noise[done : done + len(chosen)] = uniform.log1p_().neg_()
        done += len(chosen)
    return (probs / noise).argmax(dim=-1)


def _draw_on_gpu(probs: Tensor, rows: int, row_index: Tensor) -> Tensor:
    """Draws the same from softmax's probabilities.

    torch checks the largest and the smallest number and the sum of each row in eleven kernels. Softmax gives
    probabilities or, for logits that are not finite, NaN, which one sum shows.
    """
    torch._assert_async(probs.sum() < math.inf, "probabilities to draw from are not finite")
    noise = probs.new_empty((rows, probs.shape[1])).exponential_()
    if len(probs) < rows:
        noise = noise[row_index]
    return torch.div(probs, noise, out=noise).argmax(dim=-1)


@probe("this torch draws samples in another way")
def _draws_as_torch(device: torch.device) -> bool:
    """Whether this version of torch draws one sample per row as `_draw` does on a CPU, or `_draw_on_gpu`."""
    random = _generator_of(device)
    probs = torch.rand(6, 3000).softmax(dim=-1).to(device)
    rows = torch.tensor([1, 2, 4], device=device)
    state = random.get_state()
    try:
        expected = torch.multinomial(probs, num_samples=1).squeeze(1)[rows]
        expected_state = random.get_state()
        random.set_state(state)
        draw = _draw if device.type == "cpu" else _draw_on_gpu
        return torch.equal(draw(probs[rows], 6, rows), expected) and torch.equal(random.get_state(), expected_state)
    finally:
        random.set_state(state)
