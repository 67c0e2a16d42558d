"""The decode steps of one call of a host's `generate` as replays of a recording (Seamless, "CUDA Graph").

A step of each call runs as ever and tells what the recording has to give for the same tokens: that is compared in every
call, before a replay is trusted, and for a new recording at the next step once more, which has other tokens. What is
prepared on the host is prepared at each step; only the model's forward is recorded. Not yet run on a GPU. Knows no host
library: what differs between the two is what `RecordedSteps` leaves to be written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastgen.ops.cpu_graph.trace import Diverged, NotRepeatable
from fastgen.optimizer.decoding import recordable
from fastgen.optimizer.decoding.call import add_reasons, count, current_call
from fastgen.optimizer.decoding.fingerprint import fingerprint
from fastgen.optimizer.decoding.reasons import STEPS, Reason, with_code
from fastgen.optimizer.decoding.recorded_step import Recording, Recordings, differs_sync
from fastgen.optimizer.decoding.static_cache import Content, StaticCache, capacity_for, rounded
from fastgen.patching import warn

# Given a recording's `cache`: the arguments of the next forward.
Prepare = Callable[[Any], dict[str, Any]]

_known: WeakKeyDictionary[nn.Module, Recordings] = WeakKeyDictionary()


class RecordedSteps(ABC):
    """The steps of one call from some step on.

    model: whose state a recording depends on; decoder: the part of it that a step calls. variant: what else a recording
    is made for. recording: the one in use, None before the first. since: how many steps ago rows have left, if they
    have.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module, variant: Hashable) -> None:
        self.model, self.decoder, self.variant = model, decoder, variant
        self.recordings = recordings_of(model, decoder)
        self.most = 0  # the number of own positions that a row can reach
        self.key: Hashable = ()
        self.recording: Recording | None = None
        self.since = recordable.STEPS_BEFORE

    @abstractmethod
    def contents_or_reasons(self, left: int) -> tuple[list[Content], list[str]]:
        """What the call's cache holds, to which `left` positions may be added, as views: of the decoder, and of the
        encoder's output if there is one. And why its steps cannot be recorded; empty if they can be.
        """

    @abstractmethod
    def function_of(self, states: list[StaticCache]) -> tuple[Callable[[dict[str, Any]], Any], Any]:
        """The forward that works on these, and the host's cache that holds them. Does not keep the model alive."""

    @abstractmethod
    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the forward is given of prepared `inputs`, with the padding of `padded_part` hidden."""

    @abstractmethod
    def scores(self, outputs: Any) -> Tensor:
        """Of what the forward returns, that by which two are compared."""

    @abstractmethod
    def moved(self) -> None:
        """The call's positions lie in `recording` from now on."""

    @abstractmethod
    def ended(self) -> None:
        """The call is over, and `recording` is about to be given to others."""

    def can_hide(self, inputs: dict[str, Any]) -> bool:
        """Whether `given` can hide padding."""
        return True

    def start(self, rows: int, done: int, left: int, prepare: Prepare, expected: Tensor) -> bool:
        """Whether the steps from now on are recorded; the last one, prepared in this way, has just given `expected`.

        rows: how many there are. done, left: how many steps there were, and how many may come. Tells the report why
        not.
        """
        recordings = self.recordings
        is_new_wanted = recordable.is_new_wanted(self.decoder, rows, done, left + recordings.steps_without[rows])
        if done >= recordable.STEPS_BEFORE and not is_new_wanted:
            recordings.steps_without[rows] += left
        if not is_new_wanted and not len(recordings):
            if done >= recordable.STEPS_BEFORE:
                add_reasons(STEPS, [Reason("NOT_WORTH_CAPTURING", f"at most {left} steps are left to replay")])
            return False
        contents, reasons = self.contents_or_reasons(left)
        if not reasons and sum(content.nbytes for content in contents) > recordings.most_bytes:
            reasons = [f"keys and values of more than {recordings.most_bytes >> 20} MB"]
        if not reasons and not recordings.in_use.acquire(blocking=False):
            reasons = ["another call uses the model's recordings"]
        if reasons:
            add_reasons(STEPS, with_code("NOT_CAPTURABLE", reasons))
            return False
        current_call().recorded = self
        self.most = contents[0].length + left
        try:
            reasons = self._begin(contents, prepare, expected, is_new_wanted)
        except torch.cuda.OutOfMemoryError:  # the call's own cache is as it was
            self.recording = None
            recordings.forget()
            reasons = recordings.refused = ["out of memory while allocating static buffers"]
        add_reasons(STEPS, with_code("NOT_CAPTURABLE", reasons))
        if self.recording is None:
            self.end()
        return self.recording is not None

    def _begin(self, contents: list[Content], prepare: Prepare, expected: Tensor, is_new_wanted: bool) -> list[str]:
        """Takes or makes a recording and lets it repeat the step that has just given `expected`; returns why not.

        If there is none for such a step as yet, and a new one is not wanted, that needs no reason.
        """
        contents = [contents[0].without_last(), *contents[1:]]
        if not is_new_wanted and self._key(contents) not in self.recordings:
            return []
        self.recordings.expect(fingerprint(self.model))
        if not is_new_wanted and self._key(contents) not in self.recordings:
            return []
        self._use(contents)
        inputs = prepare(self.recording.cache)
        if self.padded_part.padding and not self.can_hide(inputs):
            self.recordings.has_exact_lengths = True
            self._use(contents)
            inputs = prepare(self.recording.cache)
        outputs = self._recorded(self.given(inputs))
        if outputs is not None and differs_sync(self.scores(outputs), expected):
            self._refuse("logits with static buffers differ from eager")
        if outputs is None or self.recordings.refused:
            self.recording = None
            return self.recordings.refused or ["the arguments of its forward are not those of earlier calls"]
        self.recording.caches[0].advance()
        self.moved()
        return []

    def cache_with_room(self) -> Any:
        """The host's cache for the next step: in another recording's buffers, if those of this one are full."""
        own = self.recording.caches[0]
        if own.length == own.limit:
            self._change_to(self.contents())
        return self.recording.cache

    def contents(self) -> list[Content]:
        """What there is, as views."""
        return [states.content() for states in self.recording.caches]

    def keep(self, places: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `places`; row i becomes what row `rows[i]` was (int64 both)."""
        self._change_to([content.of_rows(places, rows) for content in self.contents()])
        self.since = 0

    def run(self, inputs: dict[str, Any]) -> Any:
        """The forward's outputs for these inputs; their tensors hold until the next step."""
        given, self.since = self.given(inputs), self.since + 1
        outputs = self._recorded(given) if self._is_recorded_now() else None
        if outputs is None:
            outputs = self.recording.function(given)
        self.recording.caches[0].advance()
        return outputs

    def reorder(self, beam_idx: Tensor) -> None:
        """Row i goes on with what row `beam_idx[i]` has, a row of the same input."""
        self.recording.caches[0].reorder(beam_idx)

    def end(self) -> None:
        """The call is over, or goes on without: other calls may use the recording."""
        current_call().recorded = None
        try:
            self.ended()
            if self.recording is not None:
                self.recordings.give_back(self.key, self.recording)
        finally:
            self.recordings.in_use.release()

    def abandon(self) -> None:
        """The call has failed: the recordings give their memory back."""
        current_call().recorded = self.recording = None
        self.recordings.forget()
        self.recordings.in_use.release()

    @property
    def padded_part(self) -> StaticCache:
        """The one with hidden positions before its own, so that it serves other lengths as well."""
        return self.recording.caches[-1]

    def _change_to(self, contents: list[Content]) -> None:
        """Goes on with these contents, in a recording for them."""
        old_key, old = self.key, self.recording
        self._use(contents)
        self.recordings.give_back(old_key, old)
        self.moved()

    def _use(self, contents: list[Content]) -> None:
        """Moves the contents to the buffers of a recording with room for more."""
        key = self._key(contents)
        recording = self.recordings.take(key) or self._new(contents)
        self.key, self.recording = key, recording
        for states, content in zip(self.recording.caches, contents):
            states.fill(content)

    def _key(self, contents: list[Content]) -> Hashable:
        kinds = tuple(frozenset(content.kinds()) for content in contents)
        fan_outs = tuple(content.fan_out for content in contents)
        return self.variant, settings(), tuple(self._capacities(contents)), kinds, fan_outs

    def _capacities(self, contents: list[Content]) -> list[tuple[int, int]]:
        """Of each part of the cache: for what the rows have for themselves, and for what they share."""
        own = [capacity_for(content.length + 1, self.most) if content.own else 0 for content in contents]
        shared = [content.shared_length for content in contents]
        if not self.recordings.has_exact_lengths:
            shared[-1] = rounded(shared[-1])
        return list(zip(own, shared))

    def _is_recorded_now(self) -> bool:
        """Whether there is a recording for the next step, or a new one is worth to be made."""
        own = self.recording.caches[0]
        if self.recording.structure is not None:
            return True
        left = self.most - own.length
        return recordable.is_new_wanted(self.decoder, own.buffers[0].shape[1], self.since, left)

    def _new(self, contents: list[Content]) -> Recording:
        states = [StaticCache(content, *sizes) for content, sizes in zip(contents, self._capacities(contents))]
        function, cache = self.function_of(states)
        return Recording(function, states, cache)

    def _recorded(self, given: dict[str, Any]) -> Any:
        """The outputs of a replay, or of the forward from which one is made; None if they cannot be had or trusted."""
        recording = self.recording
        if self.recordings.refused or (recording.structure is not None and not recording.is_recorded):
            return None
        try:
            if recording.structure is None:
                return recording.record(given, self.recordings.capture)
            expected = None if recording.is_proven else self.scores(recording.function(given))
            recording.expect_again()
            outputs = recording.replay(given)
        except torch.cuda.OutOfMemoryError:
            raise
        except NotRepeatable as reason:
            self._refuse(str(reason), is_expected=True)
            return None
        except Diverged as reason:
            if not recording.is_proven:  # it does so at every step
                self._refuse(str(reason), is_expected=True)
            else:
                recording.forget()
            return None
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")
            return None
        if outputs is None:
            return None
        if expected is not None and differs_sync(self.scores(outputs), expected):
            self._refuse("a replay gave other logits than the forward")
            return None
        recording.is_proven = True
        count(self.recordings.capture.name)
        return outputs

    def _refuse(self, reason: str, is_expected: bool = False) -> None:
        """Records this model's steps no more; is_expected: nothing is wrong, and a report tells it."""
        self.recording.forget()
        self.recordings.forget()
        self.recordings.refused = [f"{type(self.model).__name__}: {reason}"]
        if not is_expected:
            warn(f"fastgen does not record the decode steps of a model: {self.recordings.refused[0]}")


def can_record(model: nn.Module, decoder: nn.Module, steps: int, reasons: Callable[[], list[str]]) -> bool:
    """Whether a loop of at most so many steps should try to; tells the report why not. reasons: of the host."""
    found = recordable.unwanted_reasons(next(decoder.parameters()).device, steps)
    found = found or with_code("NOT_CAPTURABLE", recordings_of(model, decoder).refused or reasons())
    add_reasons(STEPS, found)
    return not found


def recordings_of(model: nn.Module, decoder: nn.Module) -> Recordings:
    """Of a model as it is: those made for another type or device, and the weights that they hold, are let go."""
    weight = next(decoder.parameters())
    known = _known.get(model)
    if known is None or (known.device, known.dtype) != (weight.device, weight.dtype):
        known = _known[model] = Recordings(weight.device, weight.dtype)
    return known


def abandon() -> None:
    """After an error in the loop of the call that runs."""
    if (recorded := current_call().recorded) is not None:
        recorded.abandon()


def settings() -> tuple:
    """What of torch decides which kernels run, and whether tensors may be written outside of inference mode."""
    attention = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math")]
    precision = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    types = torch.get_default_dtype(), torch.get_num_threads()
    return torch.is_inference_mode_enabled(), *precision, *types, *attention
