"""The decode steps of a loop: a state machine that is the same for all hosts.

    prefill ──> eager ──> capture ──> replay ─┐
                 │ ^         ^        │ ^     │  spare capacity used up: grow; inputs leave: compact
                 │ └─────────┼────────┘ └─────┴─ a `StaticKVCache` of another spec, with its `CapturedGraph`
                 │           │  `leave_captures`: the rest of the call is eager
                 └───────────┴─ forwards 1 and `CaptureCosts.before` after the prefill, or after a compaction

    DecodeStep ──> CapturedGraph (function, static buffers of the inputs) ──> StaticKVCache
        │               ^
        └─> GraphCache ─┘  of the model, between calls

Each call runs one forward eagerly, and compares its logits with the graph's for the same tokens before it trusts a
replay. If that was a forward of several tokens, the first replay of a single step is compared as well.
A new graph is compared once more at the next step, with other tokens (Seamless, "CUDA Graph"). The host prepares the
inputs of each step; only the model's forward is captured. This module knows no host library.

A host implements, in addition to `runs_user_code`, which must be cheap:

    the forward   prefill, inputs, forward, logits_of
    the cache     content, view_of, use, leave

Tests: tests/optimizer/transformers/test_captured_steps.py tests/optimizer/fairseq/test_fairseq_captured_steps.py
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fastgen.ops.tracing import Diverged, NotRepeatable
from fastgen.optimizer.decoding.call import GenerateCall, Rollback
from fastgen.optimizer.decoding.cost_model import first_weight, size_of
from fastgen.optimizer.decoding.graphs import CapturedGraph, GraphCache, GraphState, differs_sync, graphs_of, reason_of
from fastgen.optimizer.decoding.report import LOOP, MODEL_CHANGED, STEPS, LeaveAlone, Reason, check, leave_alone_for
from fastgen.optimizer.decoding.static_kv_cache import KVContent, StaticKVCache
from fastgen.patching import warn
from fastgen.reasons import counted

EXPECTED = NotRepeatable, Diverged, torch.cuda.OutOfMemoryError  # expected errors of a capture: no warning


class CannotPad(Exception):
    """No mask among the inputs can hide the padding of a cache."""


class DecodeStep(AbstractContextManager["DecodeStep"]):
    """Runs the model for a loop of `rows` rows, `rows_per_input` of them for each input.

    checks: the host's `CallChecks`. decoder: the part of the model that a step calls. max_length: the most tokens that
    a row can have. captures: whether steps may be captured; only then the model's `graphs` are set. steps: the number
    of steps so far. since: the number of forwards since the prefill or the last compaction. graph: the graph in use,
    whose static cache holds the loop's keys and values; None while steps are eager. most: the most positions that a row
    can generate. variant: what else the key of a graph contains. rollback: restores what the loop has changed, so that
    the host can start again.

    The path of a step (the loop's cache or a static one, the forward or a replay) determines its last bits. If the cost
    model's `looks_back` is off, it never depends on earlier calls.
    """

    host: str  # the package

    def __init__(self, checks: Any, rows: int, rows_per_input: int, max_length: int, captures: bool) -> None:
        self.checks: Any = checks
        self.call: GenerateCall = checks.call
        self.model, self.decoder, self.known_code = checks.model, checks.decoder, checks.known_code
        self.rows, self.rows_per_input, self.max_length = rows, rows_per_input, max_length
        self.captures, self.rollback = captures, Rollback()
        self.steps = self.since = self.most = 0
        self._stage = 0  # 1: captures were tried after the first forward; 2: again, when `_is_late`
        self.graph: CapturedGraph | None = None
        self._holds_graphs = False  # True: this call alone may use them
        self._key: tuple[Any, ...] = ()
        self.variant: Hashable = None
        self._has_exact_lengths = False  # True: this call's inputs cannot be padded
        self._is_changed = False  # True: user code has changed the model
        self._used: set[CapturedGraph] = set()  # those captured or replayed since the cache was filled
        if captures:
            self.graphs: GraphCache = graphs_of(self.model, first_weight(self.decoder))
            self.call.on_exit.callback(self.end)  # called last: caches are returned first

    def prefill(self, tokens: Tensor) -> Any:
        """Returns the outputs of the first step, which adds all tokens to the cache; None if it is like the others."""
        return None

    @abstractmethod
    def inputs(self, tokens: Tensor, view: Any, size: int = 1) -> dict[str, Any]:
        """Returns the inputs of `forward` for the last `size` tokens of `[rows, length]`, which are not in the cache.

        view: the view of a static cache, which the inputs do not contain; None for the loop's own cache. Raises
        CannotPad if no mask can hide the padding.
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
    def content(self, left: int) -> KVContent:
        """Returns the content of the loop's cache, which may grow by `left`; LeaveAlone if it cannot be static."""

    @abstractmethod
    def view_of(self, static: StaticKVCache) -> Any:
        """Returns the model's view of a static cache, which must not keep the model alive."""

    @abstractmethod
    def use(self, static: StaticKVCache) -> None:
        """Makes the loop read and write its keys and values in this cache."""

    @abstractmethod
    def leave(self, static: StaticKVCache) -> None:
        """Makes eager steps continue with the keys and values in this cache, which no graph uses any more."""

    @property
    def attends_in_segments(self) -> bool:
        """Whether the model is known to attend with torch's function or `shared_attention`, not with products."""
        return True

    @cached_property
    @abstractmethod
    def runs_user_code(self) -> bool:
        """Whether user code runs in each step: it may change the model."""

    @property
    def is_streamed(self) -> bool:
        """Whether tokens leave the loop before it ends, so that it cannot be run again."""
        return False

    def __exit__(self, *error: Any) -> None:
        """Restores the loop's state after an error of fastgen, so that the host can start again."""
        if not isinstance(error[1], Exception):
            return
        if self._holds_graphs:  # releases their memory
            self.graphs.entries.clear()
            self.graph = None
            self.end()
        facts = self.call.facts_of(self.model, self.known_code)
        ran_user_code = bool(self.runs_user_code or self.is_streamed or facts.hooks or facts.user_code)
        fallback = self.call.fallback(LOOP, self.host, restore=self.rollback.restore, is_callers=ran_user_code)
        fallback.__exit__(*error)

    def run(self, tokens: Tensor) -> Any:
        """Returns the outputs of the next step for tokens `[rows, length]`; they are valid until the step after it."""
        self.steps += 1
        if self.steps == 1 and (outputs := self.prefill(tokens)) is not None:
            return outputs
        if self.graph is not None:
            self.has_changed()
        if self.graph is not None:
            return self._static_step(self.graph, tokens)
        outputs = self.forward(self.model, self.inputs(tokens, None), None)
        self.since += 1
        self._start_captures(tokens, self.logits_of(outputs))
        return outputs

    @property
    def _is_late(self) -> bool:
        """Whether so many forwards have run that a new graph may be worthwhile, because many calls end earlier."""
        return self.since >= self.call.costs.captures(self.graphs.device).before

    def has_changed(self) -> bool:
        """Whether user code has changed the model during the loop; steps are eager from then on."""
        if self.runs_user_code and not self._is_changed:
            change = self.call.change_of(self.model, between_steps=True)
            if change is not None:
                self._is_changed = True
                self.leave_captures(replace(MODEL_CHANGED, detail=change))
        return self._is_changed

    def run_ahead(self, tokens: Tensor, size: int, is_trial: bool = False) -> Any:
        """Returns the outputs of a forward for the last `size` tokens of `[rows, length]`, all but one of them drafts.

        A static cache counts none of these positions; the loop's own cache holds all. is_trial: whether the outputs may
        be wrong.
        """
        self.since += 1
        if (graph := self.graph) is None:
            outputs = self.forward(self.model, self.inputs(tokens, None, size), None)
            if not is_trial:
                self._start_captures(tokens, self.logits_of(outputs), size)
            return outputs
        inputs, outputs = self.inputs(tokens, graph.view, size), None
        if self.replays_ahead(size):
            outputs = self._attempt(graph.of_size(size), inputs)
        return graph.function(inputs) if outputs is None else outputs

    def replays_ahead(self, size: int) -> bool:
        """Whether the next forward of so many tokens is a replay, or captured because its uses are worth it."""
        graph, costs = self.graph, self.call.costs
        if graph is None or graph.of_size(size).state is not GraphState.NEW:
            return graph is not None
        uses = (self.most - graph.cache.generated_length) // size
        return self._wants_new_graph(uses + (graph.wanted[size] if costs.looks_back else 0))

    def compact(self, batch_index: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `batch_index`; row i becomes what row `rows[i]` was (int64 both).

        Each remaining input has the same number of rows, which are adjacent.
        """
        self.rows, self.since, self._stage = rows.shape[0], 0, 0
        self.rows_per_input = rows.shape[0] // batch_index.shape[0]
        if self.graph is not None:
            try:
                self._change_to(self.graph.cache.content().of_rows(batch_index, rows))
                return
            except torch.cuda.OutOfMemoryError as error:
                self.leave_captures(reason_of(error, self.model))
        self.compact_cache(batch_index, rows)

    @abstractmethod
    def compact_cache(self, batch_index: Tensor, rows: Tensor) -> None:
        """Compacts the loop's own cache; takes the arguments of `compact`."""

    def end(self) -> None:
        """Ends the call's use of the graphs, so that other calls may use them."""
        if self._holds_graphs:
            if self.graph is not None:
                self.graphs.put(self._key, self.graph)
            self.graphs.in_use.release()
            self._holds_graphs, self.graph = False, None

    def _start_captures(self, tokens: Tensor, expected: Tensor, size: int = 1) -> None:
        """Begins to capture steps with the next one, if that is worthwhile.

        expected: the logits of the last forward. size: the number of its tokens per row.
        """
        if not self.captures or self._stage == (stage := 1 + self._is_late):
            return
        self._stage = stage
        costs, graphs, left = self.call.costs, self.graphs, self.max_length - tokens.shape[1]
        if reasons := () if self.call.change_of(self.model) is None else self.checks.rows:
            self.captures = False
            self.call.report.add_reasons(STEPS, reasons)
            return
        wants_new = self._wants_new_graph(left + (graphs.steps_without[self.rows] if costs.looks_back else 0))
        if self._is_late and not wants_new:
            graphs.steps_without[self.rows] += left
        if wants_new or (costs.looks_back and graphs.entries):
            is_static = False
            try:
                is_static = self._first_capture(left, tokens, expected, wants_new, size)
            except LeaveAlone as left_alone:
                reasons = left_alone.reasons
            except Exception as error:  # the loop's own cache is unchanged
                self.graph = None
                self._refuse(error, warns=False)
                reasons = graphs.refused
            if not is_static:
                self.graph = None
                self.end()
        elif self._is_late:
            reasons = [Reason("NOT_WORTH_CAPTURING", f"at most {counted(left, 'step')} left to replay")]
        self.call.report.add_reasons(STEPS, reasons)

    @check(STEPS)
    def _first_capture(self, left: int, tokens: Tensor, expected: Tensor, wants_new: bool, size: int) -> bool:
        """Takes or creates a graph and repeats the forward that gave `expected` with it. Raises LeaveAlone.

        Returns whether it is used from now on: not if it would be a new one that is not wanted, or was just dropped.
        """
        graphs, content = self.graphs, self.content(left)
        if content.nbytes > (most_bytes := graphs.most_bytes_of_call):
            raise LeaveAlone([Reason("KV_CACHE_TOO_LARGE", f"keys and values of more than {most_bytes >> 20} MB")])
        self._holds_graphs = self._holds_graphs or graphs.in_use.acquire(blocking=False)
        if not self._holds_graphs:
            raise LeaveAlone([Reason("GRAPHS_IN_USE", "another call uses the model's captured steps")])
        self.most = content.generated_length + left - 1  # the last token needs no keys
        content = content.without_last(size)
        key = graphs.key_of(content, self.most, self._has_exact_lengths, self.variant)
        if wants_new or key in graphs.entries:  # otherwise the model need not be checked
            graphs.set_state(self.call.facts_of(self.model, self.known_code))
        if not wants_new and key not in graphs.entries:
            return False
        graph = self._fill(content)
        try:
            inputs = self.inputs(tokens, graph.view, size)
        except CannotPad:
            self._has_exact_lengths = True
            graphs.has_exact_lengths |= self.call.costs.looks_back
            graph = self._fill(content)
            inputs = self.inputs(tokens, graph.view, size)
        step, is_single = graph.of_size(size), size == 1
        replays = wants_new or step.state is not GraphState.NEW if is_single else self.replays_ahead(size)
        outputs = self._attempt(step, inputs) if replays else graph.function(inputs)
        if outputs is not None and differs_sync(self.logits_of(outputs), expected):
            self._refuse("logits with static buffers differ from eager")
        leave_alone_for(graphs.refused)
        if outputs is None:
            return False
        if not is_single and graph.state is GraphState.PROVEN:  # not in this call
            graph.state = GraphState.CAPTURED
        graph.cache.advance(int(is_single))
        self.use(graph.cache)
        return True

    def leave_captures(self, reason: Reason = MODEL_CHANGED) -> None:
        """Makes the rest of the call eager, with the host's own cache."""
        self.call.report.add_reasons(STEPS, [reason])
        self.captures = False
        if self.graph is not None:
            self.leave(self.graph.cache)
            self.graph = None
        self.end()

    def _static_step(self, graph: CapturedGraph, tokens: Tensor) -> Any:
        try:
            if graph.cache.generated_length == graph.cache.capacity:
                graph = self._change_to(graph.cache.content())
            inputs = self.inputs(tokens, graph.view)
        except Exception as error:
            self.leave_captures(reason_of(error, self.model))
            return self.forward(self.model, self.inputs(tokens, None), None)
        self.since += 1
        outputs = None
        in_use = graph.state is not GraphState.NEW and (self.call.costs.looks_back or graph in self._used)
        if in_use or self._wants_new_graph(self.most - graph.cache.generated_length):
            outputs = self._attempt(graph, inputs)
        if outputs is None:
            outputs = graph.function(inputs)
        graph.cache.advance()
        return outputs

    def _wants_new_graph(self, left: int) -> bool:
        """Whether a new graph is worthwhile for at most `left` further steps."""
        costs, device, size = self.call.costs, self.graphs.device, size_of(self.decoder, self.known_code)
        return self._is_late and costs.should_capture(size, self.rows, left, False, device)

    def _attempt(self, graph: CapturedGraph, inputs: dict[str, Any]) -> Any:
        """Returns the outputs of a capture, a replay or, if that failed, the forward; None: the caller must run it."""
        graphs, state = self.graphs, graph.state
        is_earlier = state is not GraphState.NEW and graph not in self._used
        self._used.add(graph)
        if graphs.refused or state is GraphState.DROPPED:
            return None
        try:
            if state is GraphState.NEW or (is_earlier and graph.fitting_leaves(inputs) is None):
                return graph.capture(inputs, graphs.capture)
            try:
                outputs = self._prove(graph, inputs) if state is GraphState.CAPTURED else graph.replay(inputs)
            except Diverged:
                if not is_earlier:
                    raise
                graph.drop()
                return graph.capture(inputs, graphs.capture)  # the earlier call took another branch
            if outputs is not None:
                self.call.report.kernels[graphs.capture.name] += 1
            return outputs
        except Exception as error:
            graph.drop()
            # If the function raises as well, the caller gets the error.
            outputs = None if isinstance(error, EXPECTED) else graph.function(inputs)
            # A graph that diverges before it is proven does so at every step. With `looks_back` off, proof by an
            # earlier call does not count.
            is_proven = state is GraphState.PROVEN and self.call.costs.looks_back
            if not (is_proven and isinstance(error, (NotRepeatable, Diverged))):
                self._refuse(error)
            return outputs

    def _prove(self, graph: CapturedGraph, inputs: dict[str, Any]) -> Any:
        """Returns the outputs of the first replay if the function gives the same logits, otherwise None."""
        expected = self.logits_of(graph.function(inputs))
        graph.cache.advance(0)
        outputs = graph.replay(inputs)
        if outputs is not None and differs_sync(self.logits_of(outputs), expected):
            self._refuse("a replay gave other logits than the forward")
            return None
        if outputs is not None:
            graph.state = GraphState.PROVEN
        return outputs

    def _refuse(self, cause: Exception | str, warns: bool = True) -> None:
        """Drops the graph, and stops capturing this model's steps; warns unless the cause is expected, or user code's.

        If `looks_back` is off, this applies to this call only, except for NotRepeatable, which the model's code causes.
        """
        if self.graph is not None:
            self.graph.drop()
        self.graphs.entries.clear()
        refused = self.graphs.refused = [reason_of(cause, self.model)]
        if not (self.call.costs.looks_back or isinstance(cause, NotRepeatable)):
            self.call.on_exit.callback(refused.clear)
        is_unchanged = self.call.facts_of(self.model, self.known_code).guards.check() is None
        if warns and not isinstance(cause, EXPECTED) and is_unchanged:
            warn(f"fastgen does not capture the decode steps of a model: {refused[0]}")

    def _change_to(self, content: KVContent) -> CapturedGraph:
        """Continues with this content in another static cache, a larger one or one with fewer rows."""
        graph = self._fill(content)
        self.use(graph.cache)
        return graph

    def _fill(self, content: KVContent) -> CapturedGraph:
        """Copies the content into the larger static cache of a graph, which the loop uses from now on."""
        key = self.graphs.key_of(content, self.most, self._has_exact_lengths, self.variant)
        graph = self.graphs.entries.pop(key, None)
        if graph is None:
            static = StaticKVCache(key[-1], self.rows_per_input > 1 and self.attends_in_segments)
            view, model, forward = self.view_of(static), ref(self.model), type(self).forward
            graph = CapturedGraph(lambda inputs: forward(model(), inputs, view), static, view)
        elif not self.call.costs.looks_back:
            graph.forget_sizes()
        graph.cache.load(content)
        self._used.clear()
        if self.graph is not None:
            self.graphs.put(self._key, self.graph)
        self._key, self.graph = key, graph
        return graph
