"""When the steps of a loop are captured, and which captures of earlier calls are used.

    Captures          of one loop: begins to capture, and holds the graphs meanwhile
      └─ GraphCache       of the model: its captured steps between two calls, and what calls have found out

Each call runs one forward eagerly, and compares its logits with the first graph's for the same tokens before it trusts
a replay. If that was a forward of several tokens, the first replay of a single step is compared as well. Graphs that
the call takes later, over larger caches or with fewer rows, are as trusted as earlier calls have left them. This module
knows no host library.

Tests: tests/optimizer/decoding/test_graphs.py, tests/optimizer/transformers/test_captured_steps.py,
tests/optimizer/transformers/test_repeatable.py
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fastgen.config import CONFIG
from fastgen.ops.shared_attention import can_follow_ancestors
from fastgen.ops.tracing import NotRepeatable, is_transformed, is_watched
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.cost_model import CostModel, ModelSize, first_weight, size_of
from fastgen.optimizer.decoding.graph_cache import graphs_of
from fastgen.optimizer.decoding.graphs import (
    EXPECTED,
    CapturedGraph,
    CapturedStep,
    StepState,
    differs_sync,
    reason_of,
)
from fastgen.optimizer.decoding.report import MODES, STEPS, LeaveAlone, Reason, check, leave_alone_for, that_hold
from fastgen.optimizer.decoding.static_kv_cache import KVContent, StaticKVCache
from fastgen.patching import warn
from fastgen.reasons import counted


class CannotPad(Exception):
    """No mask among the inputs can hide the padding of a cache."""


class Captures:
    """The captures of one loop, a `DecodeStep`: begins them, and holds the model's graphs until the loop ends.

    The path of a step (the loop's cache or a static one, the forward or a replay) determines its last bits. So with
    FASTGEN_REPEATABLE=1 a call takes the path that it would take as the first one, and captures of earlier calls only
    save it making them. Otherwise it remembers: it uses them at once, captures what many short calls would have used,
    and trusts what earlier calls have proven.

    forwards: their number since the prefill or the last compaction. most: the most positions that a row can generate.
    remembers: whether what earlier calls have found out shows in this one.
    """

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.call: GenerateCall = loop.call
        self.remembers = not CONFIG.repeatable
        self.graphs = graphs_of(loop.model, first_weight(loop.checks.decoder))
        self.most = 0
        self._is_held = False  # True: this call alone may use the graphs
        self._has_exact_lengths = False  # True: this call's inputs cannot be padded
        self._variant: Hashable = None  # what else the key of a graph contains
        self.restart()

    def restart(self) -> None:
        """Counts forwards anew: the rows have changed."""
        self.forwards, self._next_attempt = 0, 1.0

    def refuse(self, cause: Exception | str, warns: bool = True) -> None:
        """Stops capturing this model's steps; warns unless the cause is expected, or user code's."""
        loop = self.loop
        self.graphs.entries.clear()
        loop.mode.drop_captures()
        refused = self.graphs.refused = [reason_of(cause, loop.model)]
        if not (self.remembers or isinstance(cause, NotRepeatable)):  # the model's code causes NotRepeatable
            self.call.on_exit.callback(refused.clear)
        is_unchanged = self.call.facts_of(loop.model, loop.checks.known_code).guards.check() is None
        if warns and not isinstance(cause, EXPECTED) and is_unchanged:
            warn(f"fastgen does not capture the decode steps of a model: {refused[0]}")

    # When captures begin.

    @property
    def begins_next(self) -> bool:
        """Whether `begin` may look for a graph, or create one, after the next forward."""
        forwards = self.forwards + 1
        return forwards >= self._next_attempt and (self._is_late(forwards) or self._may_reuse)

    @property
    def _may_reuse(self) -> bool:
        """Whether the call may use graphs before it would have captured them itself."""
        return self.remembers and bool(self.graphs.entries)

    def wants_new(self, left: int) -> bool:
        """Whether a new graph is worthwhile for at most `left` further steps: not early, since many calls end early."""
        if not self._is_late(self.forwards):
            return False
        size = size_of(self.loop.checks.decoder, self.loop.checks.known_code)
        rows: int = self.loop.rows
        return is_worth_capturing(self.call.costs, size, rows, left, is_captured=False, device=self.graphs.device)

    def _is_late(self, forwards: int) -> bool:
        return forwards >= self.call.costs.captures(self.graphs.device).eager_forwards

    def begin(self, tokens: Tensor, outputs: Any, size: int) -> CapturedGraph | None:
        """Returns a graph that has repeated the last forward, if steps are captured from the next one on.

        The loop's own cache is left as it is. This is tried twice, and again after a compaction: after the first
        forward, for graphs of earlier calls, and once enough forwards have run for a new one. outputs, size: of the
        last forward, and the number of its tokens per row.
        """
        if self.forwards < self._next_attempt:
            return None
        is_late, loop, graphs = self._is_late(self.forwards), self.loop, self.graphs
        self._next_attempt = math.inf if is_late else self.call.costs.captures(graphs.device).eager_forwards
        left = loop.max_length - tokens.shape[1]
        graph = None
        reasons = graphs.refused or ([] if self.call.change_of(loop.model) is None else loop.checks.rows)
        if reasons:
            loop.captures = None
        elif (wants_new := self._wants_first(left)) or self._may_reuse:
            try:
                graph = self._first_graph(tokens, loop.logits_of(outputs), size, left, wants_new)
            except LeaveAlone as left_alone:
                reasons = [*left_alone.reasons]
            except Exception as error:  # the loop's own cache is unchanged
                self.refuse(error, warns=False)
                reasons = graphs.refused
            if graph is None:
                self.release()
        elif is_late:
            reasons = [Reason("NOT_WORTH_CAPTURING", f"at most {counted(left, 'step')} left to replay")]
        self.call.report.add_reasons(STEPS, reasons)
        return graph

    def _wants_first(self, left: int) -> bool:
        """Whether a new graph is worthwhile for `left` steps and those of earlier calls.

        If not, `left` is added to these, for later calls.
        """
        without, rows = self.graphs.steps_without, self.loop.rows
        wants_new = self.wants_new(left + without[rows] * self.remembers)
        if self._is_late(self.forwards) and not wants_new:
            without[rows] += left
        return wants_new

    @check(STEPS)
    def _first_graph(
        self, tokens: Tensor, expected: Tensor, size: int, left: int, wants_new: bool
    ) -> CapturedGraph | None:
        """Takes or creates a graph and repeats the forward that gave the logits `expected`. Raises LeaveAlone.

        Returns None if there is no graph and a new one is not wanted, or if it was just dropped.
        """
        loop, graphs = self.loop, self.graphs
        content, self._variant = loop.content(left)
        self._is_held = self._is_held or graphs.in_use.acquire(blocking=False)
        if not self._is_held:
            raise LeaveAlone([Reason("GRAPHS_IN_USE", "another call uses the model's captured steps")])
        graphs.make_room(content.nbytes)
        if content.nbytes > (most_bytes := graphs.most_bytes_of_call):
            raise LeaveAlone([Reason("KV_CACHE_TOO_LARGE", f"keys and values of more than {most_bytes >> 20} MB")])
        self.most = content.generated_length + left - 1  # the last token needs no keys
        content = content.without_last(size)
        key = self._key_of(content)
        if wants_new or key in graphs.entries:  # otherwise the model need not be checked
            graphs.set_state(self.call.facts_of(loop.model, loop.checks.known_code))  # may drop all entries
        if not wants_new and key not in graphs.entries:
            return None
        graph = self.graph_of(content, key)
        try:
            inputs = loop.inputs(tokens, graph, size)
        except CannotPad:
            self._has_exact_lengths = True
            graphs.has_exact_lengths |= self.remembers
            graphs.put(graph)
            graph = self.graph_of(content)
            inputs = loop.inputs(tokens, graph, size)
        step = self.step_to_run(graph, size)
        if step is None and size == 1 and wants_new:  # for steps of earlier calls, which `step_to_run` does not count
            step = graph.step(size)
        outputs = graph.function(inputs) if step is None else step.attempt(inputs, self)
        if outputs is not None and differs_sync(loop.logits_of(outputs), expected):
            self.refuse("logits with static buffers differ from eager")
        leave_alone_for(graphs.refused)
        if outputs is None:
            return None
        if size > 1 and graph.step(1).state is StepState.PROVEN:  # this call has compared no single step yet
            graph.step(1).state = StepState.CAPTURED
        return graph

    def step_to_run(self, graph: CapturedGraph, size: int) -> CapturedStep | None:
        """Returns the step of `size` tokens per row if its next run is a replay or, if that pays, a capture."""
        step = graph.step(size)
        if self.graphs.refused or step.state is StepState.DROPPED:
            return None
        if step.replay is not None and (self.remembers or step.is_used):
            return step
        left = (self.most - graph.cache.generated_length) // size
        return step if self.wants_new(left + graph.wanted[size] * self.remembers) else None

    def should_leave(self, leaving: int, steps_left: int) -> bool:
        """Whether `leaving` rows should leave the batch, if at most `steps_left` steps follow.

        Fewer rows have a graph of their own; the steps that earlier calls would have run with it count. Always true
        with FASTGEN_CUDA_GRAPHS=on, and before a capture.
        """
        loop, device = self.loop, self.graphs.device
        if CONFIG.cuda_graphs == "on" or (cache := loop.mode.cache) is None:
            return True
        unused = 1 - cache.generated_length / cache.capacity
        nbytes = cache.nbytes - unused * sum(buffer.nbytes for buffer in cache.buffers)
        rows = loop.rows - leaving
        graphs = self.graphs.entries.values() if self.remembers else ()
        is_captured = any(graph.cache.rows == rows and _lengths(graph.cache) == _lengths(cache) for graph in graphs)
        steps = min(steps_left, max(loop.steps, self.call.costs.min_steps_expected))
        if not is_captured:
            steps += self.graphs.steps_without[rows] * self.remembers
        size = size_of(loop.checks.decoder, loop.checks.known_code)
        is_worth = is_worth_leaving(self.call.costs, size, loop.rows, rows, nbytes, steps, is_captured, device)
        self.graphs.steps_without[rows] += not is_worth
        return is_worth

    # The graphs of the loop.

    def graph_of(self, content: KVContent, key: tuple[Any, ...] | None = None) -> CapturedGraph:
        """Returns a graph whose static cache has this content and room for more. key: of the graph, if it is known."""
        loop = self.loop
        key = self._key_of(content) if key is None else key
        graph = self.graphs.entries.pop(key, None)
        if graph is None:
            static = StaticKVCache(key[-1], loop.rows_per_input > 1 and loop.attends_in_segments)
            view = loop.view_of(static)
            model = ref(loop.model)
            forward = type(loop).forward
            graph = CapturedGraph(lambda inputs: forward(model(), inputs, view), static, view, key)
        elif not self.remembers:
            graph.forget_drafts()
        graph.begin(content)
        return graph

    def _key_of(self, content: KVContent) -> tuple[Any, ...]:
        """Returns the key of a step over a cache for all positions of the call, if its capacity costs only memory."""
        settings = content, self.most, self._has_exact_lengths, self._variant
        if self.loop.attends_in_segments and can_follow_ancestors(*content.generated[0]):
            key = self.graphs.key_of(*settings, for_all=True)
            if key in self.graphs.entries or self._has_memory_for_all(content):
                return key
        return self.graphs.key_of(*settings, for_all=False)

    def _has_memory_for_all(self, content: KVContent) -> bool:
        numbers = sum(states.shape[1] * states.shape[3] for states in content.generated[0])  # of a row's position
        positions = len(content.generated) * content.rows * (self.most - content.generated_length)
        added = positions * numbers * content.generated[0][0].itemsize
        return bool(content.nbytes + added <= self.graphs.most_bytes_of_call)

    def release(self, drops: bool = False) -> None:
        """Ends the call's use of the graphs, so that other calls may use them. drops: whether their memory is freed."""
        if self._is_held:
            if drops:
                self.graphs.entries.clear()
            self.graphs.in_use.release()
            self._is_held = False


def _lengths(cache: StaticKVCache) -> list[int]:
    """Returns the lengths of the prompts of a static cache, which its steps depend on."""
    return [keys.shape[2] for prompt in cache.prompts for keys, _ in prompt]


def is_worth_leaving(
    costs: CostModel,
    size: ModelSize,
    rows: int,
    remaining: int,
    nbytes: float,
    steps: int,
    is_captured: bool,
    device: torch.device,
) -> bool:
    """Whether `steps` replays with `remaining` of `rows` rows save what their graph takes, see `is_worth_capturing`.

    They read fewer keys, of `nbytes` bytes for all rows, and may compute less.
    """

    def replay(count: int) -> float:
        work = size.step(count, device).without_modules
        return costs.seconds(work._replace(bytes=work.bytes + nbytes * count / rows), device)

    captures = costs.captures(device)
    added = costs.seconds(size.step(remaining, device), device)
    added *= captures.existing if is_captured else captures.new
    return (replay(rows) - replay(remaining)) * steps >= added


def is_worth_capturing(
    costs: CostModel, size: ModelSize, rows: int, steps: int, is_captured: bool, device: torch.device
) -> bool:
    """Whether `steps` replays of a model's step, for `rows` rows, save twice what the capture takes.

    A replay saves what the host takes beyond the device. is_captured: whether a graph exists. Always true with
    FASTGEN_CUDA_GRAPHS=on.
    """
    if CONFIG.cuda_graphs == "on":
        return True
    work = size.step(rows, device)
    step, replay = costs.seconds(work, device), costs.seconds(work.without_modules, device)
    captures = costs.captures(device)
    return (step - replay) * steps >= 2 * step * (captures.existing if is_captured else captures.new)


@check(STEPS)
def unwanted_reasons(call: GenerateCall, device: torch.device, steps: int) -> list[Reason]:
    """Returns why `steps` steps are not captured, whatever the model; empty if they may be."""
    if CONFIG.cuda_graphs == "off":
        return [Reason("CAPTURE_OFF", "FASTGEN_CUDA_GRAPHS=off")]
    if device.type not in ("cuda", "cpu"):
        return [Reason("DEVICE", f"the model is on {device.type} (supported: cuda, cpu)")]
    least = call.costs.captures(device).least
    if steps < least:
        return [Reason("FEW_STEPS", f"the call has fewer than {least} steps", f"at most {max(steps, 0)}")]
    if torch.is_autocast_enabled(device.type):
        return [Reason("AUTOCAST", "autocast keeps copies of weights that a capture would outlive")]
    if is_transformed() or is_watched():
        return [Reason("TORCH_MODE", MODES)]
    if device.type == "cuda" and torch.cuda.current_stream(device).cuda_stream:
        return [Reason("CUDA_STREAM", "user code computes on a stream other than the default")]
    return []


@check(STEPS)
def can_capture(checks: Any, rows: int, steps: int) -> bool:
    """Whether to try capturing a loop of at most `steps` steps of `rows` rows; adds to the report why not.

    Sets `will_capture` of the call. checks: the host's `CallChecks`. Cheap checks come first, those that look at all
    modules last: `checks.capture` looks at the call's arguments, `checks.rows` at the model's code.
    """
    call, decoder = checks.call, checks.decoder
    if (weight := first_weight(decoder)) is None:  # it computes nothing
        return False
    device = weight.device
    size = size_of(decoder, checks.known_code)
    reasons = unwanted_reasons(call, device, steps) or graphs_of(checks.model, weight).refused or checks.capture
    if not reasons and not is_worth_capturing(call.costs, size, rows, steps, is_captured=True, device=device):
        text = f"{steps} steps of {rows} rows would save less than the capture costs"
        reasons = [Reason("NOT_WORTH_CAPTURING", text)]
    if not (reasons := reasons or checks.rows):
        facts = call.facts_of(checks.model, checks.known_code)
        is_split = len(facts.devices) > 1 and not facts.is_sharded
        reasons = that_hold(
            ("SHARDED", "parts of the model are sharded, and gathered in each step", facts.is_sharded),
            ("SEVERAL_DEVICES", "the model is on several devices", is_split),
        )
    call.report.add_reasons(STEPS, reasons)
    call.will_capture = not reasons
    return not reasons
