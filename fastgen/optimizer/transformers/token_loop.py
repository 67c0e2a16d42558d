"""`GenerationMixin._sample`: captured steps, and greedy decoding with compaction on a CPU.

Where tokens are drawn all rows stay, so that a seed gives the same ones. All other calls go to the library's loop.

Tests: tests/optimizer/transformers/test_finished_inputs.py, tests/optimizer/transformers/test_captured_steps.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.generation.stopping_criteria import EosTokenCriteria

from fastgen.optimizer.decoding.call import GenerateCall, current_call
from fastgen.optimizer.decoding.checks import unwanted_reasons
from fastgen.optimizer.decoding.loop_state import LateStopCheck
from fastgen.optimizer.decoding.reasons import LOOP, STEPS, Reason
from fastgen.optimizer.transformers import checks
from fastgen.optimizer.transformers.decode_step import TransformersDecodeStep, rows_of
from fastgen.optimizer.transformers.no_repeat_ngram import writing_processors
from fastgen.optimizer.transformers.requested_outputs import drop_unused_outputs


@drop_unused_outputs
def sample(
    original: Callable,
    self: checks.HostModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    processors = writing_processors(logits_processor, generation_config)
    call, captures, compacts = current_call(), False, False
    if call is not None and _fits(call, streamer, generation_config):
        compacts = _can_end_early(input_ids, stopping_criteria, generation_config)
        unwanted = unwanted_reasons(call, input_ids.device, (generation_config.max_length or 0) - input_ids.shape[1])
        call.report.add_reasons(STEPS, unwanted)
        fits = (compacts or not unwanted) and not checks.loop_reasons(
            call, self, stopping_criteria, generation_config, synced_gpus, model_kwargs
        )
        compacts = compacts and fits
        captures = fits and checks.can_capture(call, self, generation_config, input_ids, model_kwargs)
    if call is None or not (captures or compacts):
        return original(
            self,
            input_ids,
            processors,
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
    rows = input_ids.shape[0]
    with TransformersDecodeStep(call, self, generation_config, processors, model_kwargs, rows, 1, captures) as step:
        return TokenLoop(input_ids, generation_config, step, compacts).run(stopping_criteria)


def _fits(call: GenerateCall, streamer: Any, config: Any) -> bool:
    """Whether this loop does all that the call asks for; tells the report why not."""
    reasons = []
    if streamer is not None:
        reasons.append(Reason("STREAMER", "a streamer is given"))
    if config.compile_config is not None:
        reasons.append(Reason("COMPILED", "compile_config is set"))
    call.report.add_reasons(LOOP, reasons)
    return not reasons


def _can_end_early(input_ids: Tensor, stopping_criteria: Any, config: Any) -> bool:
    """Whether some of several rows may end before others, on a CPU."""
    has_end = any(type(criterion) is EosTokenCriteria for criterion in stopping_criteria)
    several = input_ids.shape[0] > 1 and input_ids.device.type == "cpu"
    return has_end and several and not config.do_sample


class TokenLoop:
    """Rows that get one token at each step, greedy or drawn.

    input_ids: of the rows that are there, `[rows, length]`; going_on: those that have not ended; batch_index: which of
    all rows they are. finished: before inputs left, the indices and tokens of those that were there. late_stop:
    where the end is read one step late, because the host is not to wait for the device.
    """

    def __init__(self, input_ids: Tensor, config: Any, step: TransformersDecodeStep, compacts: bool) -> None:
        self.config, self.step, self.compacts = config, step, compacts
        rows, device = input_ids.shape[0], input_ids.device
        self.input_ids = input_ids
        self.pad = None if config._pad_token_tensor is None else config._pad_token_tensor.to(device)
        self.going_on = torch.ones(rows, dtype=torch.bool, device=device)
        self.batch_index = torch.arange(rows, device=device)
        self.finished: list[tuple[Tensor, Tensor]] = []
        self.late_stop = LateStopCheck(device) if step.stops_late else None
        is_cuda = device.type == "cuda"
        self.random = torch.cuda.default_generators[device.index] if is_cuda else torch.default_generator

    def run(self, stopping_criteria: Any) -> Tensor:
        """The sequences `[rows, length]`, as the library returns them."""
        logits = self.step.logits(self.input_ids)
        with getattr(self.step.model, "_optimize_model_for_decode", nullcontext)():
            while not self.advance(logits, stopping_criteria):
                if self.compacts:
                    self.compact()
                logits = self.step.logits(self.input_ids)
        if self.pad is None or not self.finished:  # without padding no row ends before the others
            return self.input_ids
        output = self.pad.repeat(len(self.finished[0][0]), self.input_ids.shape[1])
        for rows, found in [*self.finished, (self.batch_index, self.input_ids)]:
            output[rows, : found.shape[1]] = found
        return output

    def advance(self, logits: Tensor, stopping_criteria: Any) -> bool:
        """Adds a token to each row; returns whether all have ended."""
        scores = self.step.process(self.input_ids, logits.clone()) if self.step.processors else logits
        draws = self.config.do_sample
        before = self.random.get_state() if draws and self.late_stop is not None else None
        tokens = _drawn(scores) if draws else scores.argmax(dim=-1)
        if self.pad is not None:
            tokens = torch.where(self.going_on, tokens, self.pad)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=1)
        self.going_on = self.going_on & ~stopping_criteria(self.input_ids, None)
        has_ended = ~self.going_on.any()
        if self.late_stop is None:
            return bool(has_ended)
        if self.late_stop.exchange(has_ended):  # this step was one too many
            if before is not None:
                self.random.set_state(before)
            self.input_ids = self.input_ids[:, :-1]
            return True
        return self.input_ids.shape[1] >= self.config.max_length

    def compact(self) -> None:
        """Drops the inputs of which all rows have ended, where that pays."""
        step = self.step
        if step.call.rows and step.steps == 1:
            step.rows_per_input = step.call.rows_per_input
        by_input = self.going_on.view(-1, step.rows_per_input).any(dim=1)
        kept = by_input.nonzero().flatten()
        left = self.config.max_length - self.input_ids.shape[1]
        if len(kept) == len(by_input) or not step.should_compact(len(by_input) - len(kept), len(by_input), left):
            return
        self.finished.append((self.batch_index, self.input_ids))
        rows = rows_of(kept, step.rows_per_input)
        step.compact(kept, rows)
        self.input_ids, self.going_on = self.input_ids[rows], self.going_on[rows]
        self.batch_index = self.batch_index[rows]


def _drawn(scores: Tensor) -> Tensor:
    """Tokens `[rows]`, with the operations of the library's loop."""
    return torch.multinomial(functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
