"""The decode steps of one loop of transformers as replays of a recording (Seamless, "CUDA Graph").

A step of each call runs as ever and tells what the recording has to give for the same tokens: that is compared in every
call, before a replay is trusted, and for a new recording at the next step once more, which has other tokens. Arguments
and masks are prepared by the library at each step; only the model's forward is recorded. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fastgen.ops.cpu_graph.trace import Diverged, NotRepeatable
from fastgen.optimizer.decoding.fingerprint import fingerprint
from fastgen.optimizer.decoding.generation import count, current, fell_back
from fastgen.optimizer.decoding.recorded_step import Recording, Recordings, differs_sync
from fastgen.optimizer.decoding.static_cache import Content, StaticCache, capacity_for, rounded
from fastgen.optimizer.transformers import model_state, recordable
from fastgen.optimizer.transformers.padded_inputs import Padding, can_be_padded
from fastgen.optimizer.transformers.static_layers import (
    contents_or_reasons,
    make_plain,
    take_over,
    with_fixed_layers,
)
from fastgen.optimizer.transformers.verification import TOLERANCES
from fastgen.patching import warn

NAME = "past_key_values"

# Given a cache: the library's arguments of the model's forward with it.
Prepare = Callable[[Cache], dict[str, Any]]

_known: WeakKeyDictionary[nn.Module, Recordings] = WeakKeyDictionary()


class RecordedSteps:
    """The steps of one call from some step on.

    cache: the call's own. most: the number of own positions that a row can reach.
    """

    def __init__(self, model: Any, recordings: Recordings, cache: Cache, arguments: dict[str, Any], most: int) -> None:
        self.model, self.recordings, self.most = model, recordings, most
        self.original = ref(cache)
        self.given = frozenset(name for name, value in arguments.items() if value is not None)
        self.key: tuple = ()
        self.recording: Recording | None = None
        self.padding = Padding(model.config.is_encoder_decoder)
        self.since = recordable.STEPS_BEFORE  # how many steps ago rows have left, if they have

    def begin(
        self, contents: list[Content], prepare: Prepare, expected: Tensor, is_new_wanted: bool
    ) -> list[str] | None:
        """Takes or makes a recording and lets it repeat the step that has just given `expected`; returns why not.

        None: there is no recording for such a step as yet, and a new one is not wanted.
        """
        cache = self.original()
        self.recordings.expect(fingerprint(self.model))
        contents = [contents[0].without_last(), *contents[1:]]
        if not is_new_wanted and self._key(contents) not in self.recordings:
            return None
        self._use(contents, cache)
        inputs = prepare(self.recording.cache)
        if self._padded_part.padding and not can_be_padded(inputs, self.padding.is_cross):
            self.recordings.has_exact_lengths = True
            self._use(contents, cache)
            inputs = prepare(self.recording.cache)
        outputs = self._recorded(self._given(inputs))
        if outputs is not None and _differs(outputs.logits, expected):
            self._refuse("a step at fixed addresses gave other logits")
        if outputs is None or self.recordings.refused:
            self.recording = None
            return self.recordings.refused or ["the arguments of its forward are not those of earlier calls"]
        self.recording.caches[0].advance()
        take_over(cache, self.recording.cache)
        return []

    def cache_with_room(self) -> Cache:
        """The cache for the next step: in another recording's buffers, if those of this one are full."""
        own = self.recording.caches[0]
        if own.length == own.limit:
            self._change_to([states.content() for states in self.recording.caches])
        return self.recording.cache

    def keep(self, places: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `places`; row i becomes what row `rows[i]` was (int64 both)."""
        self._change_to([states.content().of_rows(places, rows) for states in self.recording.caches])
        self.since = 0

    def run(self, inputs: dict[str, Any]) -> Any:
        """The model's outputs for these arguments; their tensors hold until the next step."""
        given, self.since = self._given(inputs), self.since + 1
        outputs = self._recorded(given) if self._is_recorded_now() else None
        if outputs is None:
            outputs = self.recording.function(given)
        self.recording.caches[0].advance()
        return outputs

    def reorder(self, beam_idx: Tensor) -> None:
        """As `cache_layers.reorder`."""
        self.recording.caches[0].reorder(beam_idx)

    def end(self) -> None:
        """The call is over: its cache, if anybody has kept it, becomes plain, and other calls may use the recording."""
        try:
            if (original := self.original()) is not None:
                make_plain(original)
            if self.recording is not None:
                self.recordings.give_back(self.key, self.recording)
        finally:
            self.recordings.in_use.release()

    def abandon(self) -> None:
        """The call has failed: the recordings give their memory back."""
        self.recording = None
        self.recordings.forget()
        self.recordings.in_use.release()

    def _change_to(self, contents: list[Content]) -> None:
        """Goes on with these contents, in a recording for them."""
        old_key, old = self.key, self.recording
        self._use(contents, old.cache)
        self.recordings.give_back(old_key, old)
        if (original := self.original()) is not None:
            take_over(original, self.recording.cache)

    def _use(self, contents: list[Content], cache: Cache) -> None:
        """Moves the contents to the buffers of a recording with room for more."""
        self.key = self._key(contents)
        self.recording = self.recordings.take(self.key) or self._new(contents, cache)
        for states, content in zip(self.recording.caches, contents):
            states.fill(content)

    def _key(self, contents: list[Content]) -> tuple:
        kinds = tuple(frozenset(content.kinds()) for content in contents)
        fan_outs = tuple(content.fan_out for content in contents)
        return self.given, _settings(), tuple(self._capacities(contents)), kinds, fan_outs

    def _capacities(self, contents: list[Content]) -> list[tuple[int, int]]:
        """Of each part of the cache: for what the rows have for themselves, and for what they share."""
        own = [capacity_for(content.length + 1, self.most) if content.own else 0 for content in contents]
        shared = [content.shared_length for content in contents]
        if not self.recordings.has_exact_lengths:
            shared[-1] = rounded(shared[-1])
        return list(zip(own, shared))

    @property
    def _padded_part(self) -> StaticCache:
        return self.recording.caches[-1]

    def _given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the recorded function."""
        without_cache = {name: value for name, value in inputs.items() if name != NAME}
        return self.padding.of(without_cache, self._padded_part.padding)

    def _is_recorded_now(self) -> bool:
        """Whether there is a recording for the next step, or a new one is worth to be made."""
        own = self.recording.caches[0]
        if self.recording.structure is not None:
            return True
        left = self.most - own.length
        return recordable.is_new_wanted(self.model, own.buffers[0].shape[1], self.since, left)

    def _new(self, contents: list[Content], cache: Cache) -> Recording:
        states = [StaticCache(content, *sizes) for content, sizes in zip(contents, self._capacities(contents))]
        fixed, model = with_fixed_layers(cache, states), ref(self.model)
        return Recording(lambda inputs: model()(**inputs, **{NAME: fixed}, return_dict=True), states, fixed)

    def _recorded(self, given: dict[str, Any]) -> Any:
        """The outputs of a replay, or of the forward from which one is made; None if they cannot be had or trusted."""
        recording = self.recording
        if self.recordings.refused:
            return None
        try:
            if recording.structure is None:
                return recording.record(given, self.recordings.capture)
            expected = None if recording.is_proven else recording.function(given).logits
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
        if expected is not None and _differs(outputs.logits, expected):
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


def can_record(model: Any, generation_config: Any, input_ids: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether a loop that begins with these `model_kwargs` should try to; tells the report why not."""
    if not recordable.are_wanted(generation_config, input_ids):
        return False
    reasons = _known[model].refused if model in _known else []
    reasons = reasons or recordable.unsupported_reasons(model, generation_config, input_ids, arguments)
    _tell(reasons)
    return not reasons


def begin(
    model: Any,
    arguments: dict[str, Any],
    rows: int,
    steps: tuple[int, int],
    prepare: Prepare,
    expected: Tensor,
) -> RecordedSteps | None:
    """The recorded steps of a call of which a step with these arguments has just given the logits `expected`.

    steps: how many there were, and how many may come. They are the generation's as well, which ends them.
    """
    generation, cache, recordings = current(), arguments.get(NAME), _recordings_of(model)
    done, left = steps
    is_new_wanted = recordable.is_new_wanted(model, rows, done, left + recordings.steps_without[rows])
    if done >= recordable.STEPS_BEFORE and not is_new_wanted:
        recordings.steps_without[rows] += left
    if not is_new_wanted and not len(recordings):
        return None
    contents, reasons = [], ["there is no cache"]
    if cache is not None:
        contents, reasons = contents_or_reasons(cache, cache.get_seq_length() + left)
    if not reasons and sum(content.nbytes for content in contents) > recordings.most_bytes:
        reasons = [f"keys and values of more than {recordings.most_bytes >> 20} MB"]
    reasons = reasons or model_state.rows_reasons(model, {rows, generation.inputs})
    if not reasons and not recordings.in_use.acquire(blocking=False):
        reasons = ["another call uses the model's recordings"]
    if not reasons:
        recorded = RecordedSteps(model, recordings, cache, arguments, contents[0].length + left)
        generation.recorded = recorded
        try:
            reasons = recorded.begin(contents, prepare, expected, is_new_wanted)
        except torch.cuda.OutOfMemoryError:  # the call's own cache is as it was
            abandon()
            reasons = recordings.refused = ["its buffers found no memory"]
        if reasons is None:
            recorded.end()
            generation.recorded = None
            return None
    _tell(reasons)
    return None if reasons else recorded


def abandon() -> None:
    """After an error in the loop of the call that runs."""
    generation = current()
    if generation.recorded is not None:
        generation.recorded.abandon()
        generation.recorded = None


def _tell(reasons: list[str]) -> None:
    fell_back([f"decode steps are not recorded: {reason}" for reason in reasons])


def _recordings_of(model: Any) -> Recordings:
    if model not in _known or _known[model].device != model.device:
        _known[model] = Recordings(model.device)
    return _known[model]


def _settings() -> tuple:
    """What of torch decides which kernels run, and whether tensors may be written outside of inference mode."""
    attention = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math")]
    precision = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    types = torch.get_default_dtype(), torch.get_num_threads()
    return torch.is_inference_mode_enabled(), *precision, *types, *attention


def _differs(found: Tensor, expected: Tensor) -> bool:
    return differs_sync(found, expected, TOLERANCES.get(expected.dtype, TOLERANCES[torch.float32]))
