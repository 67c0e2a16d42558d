"""The decode steps of a loop, which are the same for all hosts.

    prefill ──> EagerSteps ─────────── `Captures.begin` ──────────> StaticSteps ─┐
                                                                       │ ^       │ the cache is full, or inputs leave:
         EagerSteps, for the rest of the call <── `leave_captures` ────┘ └───────┘ `StaticSteps` over another cache
              the model has changed, memory is short, or inputs cannot be prepared

`DecodeStep.mode` is one of the two, and `change_to` replaces it until the loop ends. `EagerSteps` use the loop's own
cache, `StaticSteps` the static cache of a `CapturedGraph`, whose steps are captured, replayed, or forwards of the
model: after a capture that failed, steps stay static. The host prepares the inputs of each step; only the model's
forward is captured. This module knows no host library.

A host implements, in addition to `runs_user_code` and, if their defaults do not fit, `attends_in_segments` and
`is_streamed`:

    the forward   prefill, inputs, forward, logits_of
    the cache     content, view_of, use, leave, keep_states, crop, compact_cache

Tests: tests/optimizer/transformers/test_captured_steps.py tests/optimizer/fairseq/test_fairseq_captured_steps.py
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastgen.optimizer.decoding.call import GenerateCall, Rollback
from fastgen.optimizer.decoding.captures import Captures
from fastgen.optimizer.decoding.graphs import CapturedGraph, reason_of
from fastgen.optimizer.decoding.report import LOOP, MODEL_CHANGED, STEPS, Reason
from fastgen.optimizer.decoding.static_kv_cache import KVContent, StaticKVCache


class EagerSteps:
    """Steps over the loop's own cache. ahead: the number of its last positions whose tokens do not count yet.

    Drafts ask a mode: `path`, how a forward of `size` tokens would run ("eager", "replay", or "static", without a
    replay); `room`, the most tokens that one may have, if `left` may follow; `want` notes that a captured step of this
    size would have been used; `drop` removes positions that do not count.
    """

    cache: StaticKVCache | None = None

    def __init__(self) -> None:
        self.ahead = 0

    def outputs_of(self, loop: DecodeStep, tokens: Tensor, size: int, is_trial: bool) -> Any:
        inputs = loop.inputs(tokens, None, size)
        if loop.captures is not None and loop.captures.begins_next:
            loop.keep_states()
        outputs = loop.forward(loop.model, inputs, None)
        self.ahead = size
        if (captures := loop.captures) is not None:
            captures.forwards += 1
            graph = None if is_trial else captures.begin(tokens, outputs, size)
            if graph is not None:
                loop.change_to(StaticSteps(captures, graph))
        return outputs

    def path(self, size: int) -> str:
        return "eager"

    def want(self, size: int) -> None:
        pass

    def drop_captures(self) -> None:
        pass

    def room(self, left: int) -> int:
        return left

    def advance(self) -> None:
        self.ahead -= 1

    def drop(self, loop: DecodeStep) -> None:
        if self.ahead:
            loop.crop(self.ahead)
        self.ahead = 0

    def compact(self, loop: DecodeStep, batch_index: Tensor, rows: Tensor) -> None:
        loop.compact_cache(batch_index, rows)

    def end(self) -> None:
        pass


class StaticSteps:
    """Steps over the static cache of a graph, where positions that do not count are overwritten."""

    def __init__(self, captures: Captures, graph: CapturedGraph) -> None:
        self.captures, self.graph = captures, graph
        self.cache: StaticKVCache = graph.cache

    def outputs_of(self, loop: DecodeStep, tokens: Tensor, size: int, is_trial: bool) -> Any:
        # Drafts have checked this before a forward of several tokens.
        if size == 1 and loop.leaves_if_changed():  # the loop's mode is eager now
            return loop.mode.outputs_of(loop, tokens, size, is_trial)
        try:
            is_full = self.cache.generated_length == self.cache.capacity
            graph = self.over(loop, self.cache.content()).graph if is_full else self.graph
            inputs = loop.inputs(tokens, graph, size)
        except Exception as error:
            if size > 1:
                raise
            loop.leave_captures(reason_of(error, loop.model))
            return loop.mode.outputs_of(loop, tokens, size, is_trial)
        self.captures.forwards += 1
        step = self.captures.step_to_run(graph, size)
        return graph.function(inputs) if step is None else step.run(inputs, self.captures)

    def path(self, size: int) -> str:
        return "static" if self.captures.step_to_run(self.graph, size) is None else "replay"

    def want(self, size: int) -> None:
        self.graph.wanted[size] += 1

    def drop_captures(self) -> None:
        """Ends all replays, because the model's steps are captured no more."""
        self.graph.drop()

    def room(self, left: int) -> int:
        return min(left, int(self.cache.capacity - self.cache.generated_length))

    def advance(self) -> None:
        self.cache.advance()

    def drop(self, loop: DecodeStep) -> None:
        pass

    def compact(self, loop: DecodeStep, batch_index: Tensor, rows: Tensor) -> None:
        try:
            self.over(loop, self.cache.content().of_rows(batch_index, rows))
        except torch.cuda.OutOfMemoryError as error:
            loop.leave_captures(reason_of(error, loop.model))
            loop.compact_cache(batch_index, rows)

    def over(self, loop: DecodeStep, content: KVContent) -> StaticSteps:
        """Continues with this content in another static cache, a larger one or one with fewer rows."""
        steps = StaticSteps(self.captures, self.captures.graph_of(content))
        self.end()
        loop.change_to(steps)
        return steps

    def end(self) -> None:
        """Keeps the graph for later calls."""
        self.captures.graphs.put(self.graph)


class LateFlags:
    """Reads the flags of rows or inputs one step late, so that the host never waits for the step that it has queued.

    The flags of a step are copied to the host while the device computes the next one. The loop undoes a step that
    was superfluous.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.slots = [torch.zeros(count, dtype=torch.bool, device="cpu", pin_memory=is_cuda) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)] if is_cuda else []
        self.last: Tensor | None = None  # the flags of the previous step
        self.index: list[int] | None = None  # which of these are returned; None: all

    def exchange(self, flags: Tensor) -> list[bool]:
        """Takes the flags of this step (bool `[count]`), and returns those of the previous one; none at first."""
        slot = self.slots[0][: len(flags)]
        slot.copy_(flags, non_blocking=True)
        if self.copied:
            self.copied[0].record(torch.cuda.current_stream(flags.device))
            self.copied[1].synchronize()  # returns immediately if nothing was recorded
            self.copied.reverse()
        self.slots.reverse()
        values = [] if self.last is None else self.last.tolist()
        if self.index is not None:
            values = [values[index] for index in self.index]
        self.last, self.index = slot, None
        return values

    def keep(self, index: list[int]) -> None:
        """Notes that only the rows or inputs of these flags, ascending, are in the next step."""
        self.index = index


def staying_in_halves(unfinished: list[int], count: int, most: int = 1, rows: int = 1) -> tuple[list[int], int]:
    """Returns which of `count` inputs stay in a captured batch, ascending, and with how many rows each.

    rows: those that an input has now; most: those that an unfinished one needs at most. A graph has a number of rows.
    So finished rows leave once they are half of the batch, and some stay until the next time, so that other calls have
    graphs of these sizes: powers of two.
    """
    if 2 * len(unfinished) * most > count * rows:
        return [*range(count)], rows
    finished = sorted({*range(count)}.difference(unfinished))
    staying = sorted(unfinished + finished[: _power_of_two(len(unfinished)) - len(unfinished)])
    return staying, min(_power_of_two(most), rows)


def _power_of_two(count: int) -> int:
    """Returns the smallest power of two that is not below `count`, which is positive."""
    return 1 << (count - 1).bit_length()


class DecodeStep(AbstractContextManager["DecodeStep"]):
    """Runs all forwards of a loop of `rows` rows, `rows_per_input` of them for each input; `loop` in other modules.

    checks: the host's `CallChecks`. max_length: the most tokens that a row can have. rollback: restores what the loop
    has changed, so that the host can start again. steps: the number of steps so far. mode: how the next one runs.
    captures: begins and holds captures; None if steps are not to be captured, or not any more: then all are eager.
    """

    host: str  # the package
    is_streamed = False  # tokens leave the loop before it ends, so that it cannot be run again

    def __init__(self, checks: Any, rows: int, rows_per_input: int, max_length: int, may_capture: bool) -> None:
        self.checks: Any = checks
        self.call: GenerateCall = checks.call
        self.model: Any = checks.model
        self.rows, self.rows_per_input, self.max_length = rows, rows_per_input, max_length
        self.rollback = Rollback()
        self.steps = 0
        self.mode: EagerSteps | StaticSteps = EagerSteps()
        self.captures: Captures | None = None
        self._is_changed = False  # True: user code has changed the model
        if may_capture:
            self.captures = Captures(self)
            self.call.on_exit.callback(self.end)  # called last: caches are returned first

    def prefill(self, tokens: Tensor) -> Any:
        """Returns the outputs of the first step, which adds all tokens to the cache; None if it is like the rest."""
        return None

    @abstractmethod
    def inputs(self, tokens: Tensor, graph: CapturedGraph | None, size: int = 1) -> dict[str, Any]:
        """Returns the inputs of `forward` for the last `size` tokens of `[rows, length]`, which are not in the cache.

        graph: whose static cache is used, and whose view the inputs do not contain; None for the loop's own cache.
        Raises CannotPad if no mask can hide the padding.
        """

    @staticmethod
    @abstractmethod
    def forward(model: Any, inputs: dict[str, Any], view: Any) -> Any:
        """Returns the model's outputs; adds the tokens' positions to the cache of the view, or to the loop's own."""

    @staticmethod
    @abstractmethod
    def logits_of(outputs: Any) -> Tensor:
        """Returns the logits used to compare two runs of a step."""

    @abstractmethod
    def content(self, left: int) -> tuple[KVContent, Hashable]:
        """Returns the content of the loop's cache, and what else determines a captured step.

        Also prepares `view_of` and `use`. left: how many positions may follow. Its states are those that `keep_states`
        has kept. Raises LeaveAlone if the cache cannot be static.
        """

    @abstractmethod
    def view_of(self, static: StaticKVCache) -> Any:
        """Returns the model's view of a static cache, which must not keep the model alive."""

    @abstractmethod
    def use(self, static: StaticKVCache) -> None:
        """Makes the loop's own cache show what is in this one; forwards read and write it through the graph's view."""

    @abstractmethod
    def leave(self, static: StaticKVCache) -> None:
        """Makes eager steps continue with the keys and values in this cache, which no graph uses any more."""

    def keep_states(self) -> None:
        """Keeps states of the loop's own cache, for hosts with such layers.

        A new graph repeats the last forward: it cuts that forward's keys off, but needs the states before it.
        """

    def crop(self, count: int) -> None:
        """Drops the last positions of the loop's own cache. Only hosts with drafts implement it."""
        raise NotImplementedError

    @abstractmethod
    def compact_cache(self, batch_index: Tensor, rows: Tensor) -> None:
        """Compacts the loop's own cache; takes the arguments of `compact`."""

    @property
    def attends_in_segments(self) -> bool:
        """Whether the model is known to attend with torch's function or `shared_attention`, not with products."""
        return True

    @cached_property
    @abstractmethod
    def runs_user_code(self) -> bool:
        """Whether user code runs in each step: it may change the model."""

    def __exit__(self, *error: Any) -> None:
        """After any Exception, drops all graphs, and restores the loop's state if the host can start again."""
        if not isinstance(error[1], Exception):
            return
        if self.captures is not None:
            self.mode = EagerSteps()  # the host starts with a new cache
            self.captures.release(drops=True)
        facts = self.call.facts_of(self.model, self.checks.known_code)
        ran_user_code = bool(self.runs_user_code or self.is_streamed or facts.hooks or facts.user_code)
        fallback = self.call.fallback(LOOP, self.host, restore=self.rollback.restore, is_callers=ran_user_code)
        fallback.__exit__(*error)

    def run(self, tokens: Tensor) -> Any:
        """Returns the outputs of the next step for tokens `[rows, length]`; they are valid until the step after it."""
        self.steps += 1
        if self.steps == 1 and (outputs := self.prefill(tokens)) is not None:
            return outputs
        outputs = self.mode.outputs_of(self, tokens, 1, is_trial=False)
        self.mode.advance()  # the mode may be new, over a cache with the same positions
        return outputs

    def outputs_of(self, tokens: Tensor, size: int, is_trial: bool = False) -> Any:
        """Returns the outputs of a forward for the last `size` tokens of `[rows, length]`, all but one of them drafts.

        Its positions are in the cache, but count only after `mode.advance`. is_trial: whether the outputs are only
        compared with those of single steps, because it is not known yet that they are right.
        """
        return self.mode.outputs_of(self, tokens, size, is_trial)

    def change_to(self, steps: EagerSteps | StaticSteps) -> None:
        """Runs the next steps in another mode, or over another static cache."""
        if steps.cache is not None:
            self.use(steps.cache)
        elif self.mode.cache is not None:
            self.leave(self.mode.cache)
        self.mode = steps

    def leaves_if_changed(self) -> bool:
        """Makes the rest of the loop eager if user code has changed the model; returns whether it has."""
        if self.runs_user_code and not self._is_changed:
            change = self.call.change_of(self.model, between_steps=True)
            if change is not None:
                self._is_changed = True
                self.leave_captures(replace(MODEL_CHANGED, detail=change))
        return self._is_changed

    def leave_captures(self, reason: Reason = MODEL_CHANGED) -> None:
        """Makes the rest of the call eager, with the loop's own cache."""
        self.call.report.add_reasons(STEPS, [reason])
        if self.mode.cache is not None:  # eager steps may have positions that do not count
            self.change_to(EagerSteps())
        if self.captures is not None:
            self.captures.release()
        self.captures = None

    def compact(self, batch_index: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `batch_index`; row i becomes what row `rows[i]` was (int64 both).

        Each remaining input has the same number of rows, which are adjacent.
        """
        self.rows = rows.shape[0]
        self.rows_per_input = rows.shape[0] // batch_index.shape[0]
        if self.captures is not None:
            self.captures.restart()
        self.mode.compact(self, batch_index, rows)

    def end(self) -> None:
        """Ends the call's use of the graphs, so that other calls may use them."""
        if self.captures is not None:
            self.mode.end()
            self.captures.release()
            self.mode, self.captures = EagerSteps(), None  # releases the graph
