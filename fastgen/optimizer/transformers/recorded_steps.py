"""The decode steps of one loop of transformers as replays of a recording (Seamless, "CUDA Graph").

The first step of a call runs as ever and tells what the recording has to give for the same tokens: that is compared in
every call, before its first replay is trusted. Arguments and masks are prepared by the library at each step; only the
model's forward is recorded. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer

from fastgen.config import CONFIG
from fastgen.optimizer.decoding.fingerprint import fingerprint
from fastgen.optimizer.decoding.generation import count, current, fell_back
from fastgen.optimizer.decoding.recorded_step import Recording, Recordings, differs_sync
from fastgen.optimizer.decoding.static_cache import Content, StaticCache, capacity_for
from fastgen.optimizer.transformers import eligibility, model_state
from fastgen.optimizer.transformers.static_layers import (
    contents_or_reasons,
    layer_reasons,
    make_plain,
    take_over,
    with_fixed_layers,
)
from fastgen.optimizer.transformers.verification import TOLERANCES
from fastgen.patching import warn

NAME = "past_key_values"

# To look at the model and to record take the time of some steps (not yet measured on a GPU).
MIN_STEPS = 16

# Static layers have the length that `FixedLayer` gives: a tensor without a dimension, as in transformers 5.17.
_LAYERS_ARE_KNOWN = getattr(StaticLayer(1), "cumulative_length", torch.ones(1)).dim() == 0

# Given a cache: the library's arguments of the model's forward with it.
Prepare = Callable[[Cache], dict[str, Any]]

_known: WeakKeyDictionary[nn.Module, Recordings] = WeakKeyDictionary()


def are_wanted(device: torch.device) -> bool:
    """Whether FASTGEN_CUDA_GRAPHS asks for recorded steps on this device."""
    return device.type in {"auto": ("cuda",), "on": ("cuda", "cpu"), "off": ()}[CONFIG.cuda_graphs]


def _unsupported_reasons(
    model: Any, generation_config: Any, prompt_length: int, arguments: dict[str, Any]
) -> list[str]:
    """Why the steps of a call are not recorded, as far as that is known before its prefill; empty if they can be."""
    reasons = []
    if not _LAYERS_ARE_KNOWN:
        reasons.append("this version of transformers has other static caches")
    if not arguments.get("use_cache") or (generation_config.max_length or 0) - prompt_length < MIN_STEPS:
        reasons.append(f"no cache, or fewer than {MIN_STEPS} steps")
    if not getattr(model, "_can_compile_fullgraph", False):
        reasons.append(f"the forward of {type(model).__name__} may read the device")
    if (attention := getattr(model.config, "_attn_implementation", None)) not in ("sdpa", "eager"):
        reasons.append(f"attention {attention} (supported: sdpa, eager)")
    if torch.is_autocast_enabled(model.device.type):
        reasons.append("autocast keeps copies of weights that a recording would outlive")
    if getattr(model, "hf_quantizer", None) is not None:
        reasons.append("the model is quantized")
    if model.device.type == "cuda" and torch.cuda.current_stream(model.device).cuda_stream:
        reasons.append("the program computes on a stream of its own")
    if (cache := arguments.get(NAME)) is not None:
        reasons += layer_reasons(cache)
    if hasattr(model, "_reorder_cache"):
        reasons.append("the model moves its cache itself")
    if model in _known:
        reasons += _known[model].refused
    if reasons:
        return reasons
    if len({tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}) > 1:
        reasons.append("the model is on several devices")
    return reasons + eligibility.model_reasons(model)


class RecordedSteps:
    """The steps of one call from the second one on.

    cache: the call's own. most: the number of own positions that a row can reach.
    """

    def __init__(self, model: Any, recordings: Recordings, cache: Cache, arguments: dict[str, Any], most: int) -> None:
        self.model, self.recordings, self.most = model, recordings, most
        self.original = ref(cache)
        self.given = frozenset(name for name, value in arguments.items() if value is not None)
        self.key: tuple = ()
        self.recording: Recording | None = None

    def begin(self, contents: list[Content], prepare: Prepare, expected: Tensor) -> list[str]:
        """Takes or makes a recording and lets it repeat the step that has just given `expected`; returns why not."""
        cache = self.original()
        self.recordings.expect(fingerprint(self.model))
        self._use([contents[0].without_last(), *contents[1:]], cache)
        if self._replayed(prepare(self.recording.cache), expected) is None:
            self.recording = None
            return self.recordings.refused or ["the arguments of its forward are not those of earlier calls"]
        self.recording.caches[0].advance()
        take_over(cache, self.recording.cache)
        return []

    def cache_with_room(self) -> Cache:
        """The cache for the next step: in another recording's buffers, if those of this one are full."""
        own = self.recording.caches[0]
        if own.length == own.limit:
            old_key, old = self.key, self.recording
            self._use([states.content() for states in old.caches], old.cache)
            self.recordings.give_back(old_key, old)
            if (original := self.original()) is not None:
                take_over(original, self.recording.cache)
        return self.recording.cache

    def run(self, inputs: dict[str, Any]) -> Any:
        """The model's outputs for these arguments; their tensors hold until the next step."""
        outputs = self._replayed(inputs)
        if outputs is None:
            outputs = self.recording.function(_without_cache(inputs))
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

    def _use(self, contents: list[Content], cache: Cache) -> None:
        """Moves the contents to the buffers of a recording with room for more."""
        capacity = capacity_for(contents[0].length + 1, self.most)
        kinds = tuple(frozenset(content.kinds()) for content in contents)
        self.key = (self.given, _settings(), capacity, kinds, tuple(content.fan_out for content in contents))
        self.recording = self.recordings.take(self.key) or self._new(contents, capacity, cache)
        for states, content in zip(self.recording.caches, contents):
            states.fill(content)

    def _new(self, contents: list[Content], capacity: int, cache: Cache) -> Recording:
        states = [StaticCache(content, capacity if content is contents[0] else 0) for content in contents]
        fixed, model = with_fixed_layers(cache, states), ref(self.model)
        return Recording(lambda inputs: model()(**inputs, **{NAME: fixed}, return_dict=True), states, fixed)

    def _replayed(self, inputs: dict[str, Any], expected: Tensor | None = None) -> Any:
        """The outputs of a replay, which is recorded first where there is none; None if they cannot be had or trusted.

        expected: logits to compare with; for a new recording, those of the forward from which it is made.
        """
        recording, given = self.recording, _without_cache(inputs)
        if self.recordings.refused:
            return None
        try:
            if recording.structure is None:
                outputs = recording.record(given, self.recordings.capture)
                expected = outputs.logits if expected is None else expected
            outputs = recording.replay(given)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")
            return None
        if outputs is None:
            return None
        if expected is not None and differs_sync(outputs.logits, expected, _tolerance(expected)):
            self._refuse("a replay gave other logits than the forward")
            return None
        count(self.recordings.capture.name)
        return outputs

    def _refuse(self, reason: str) -> None:
        self.recording.forget()
        self.recordings.forget()
        self.recordings.refused = [f"{type(self.model).__name__}: {reason}"]
        warn(f"fastgen does not record the decode steps of a model: {self.recordings.refused[0]}")


def can_record(model: Any, generation_config: Any, input_ids: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether a loop that begins with these `model_kwargs` should try to; tells the report why not."""
    if not are_wanted(input_ids.device):
        return False
    reasons = _unsupported_reasons(model, generation_config, input_ids.shape[1], arguments)
    _tell(reasons)
    return not reasons


def begin(
    model: Any, arguments: dict[str, Any], rows: int, steps_left: int, prepare: Prepare, expected: Tensor
) -> RecordedSteps | None:
    """The recorded steps of a call of which the first one, with these arguments, has given the logits `expected`.

    They are the generation's as well, which ends them.
    """
    generation, cache, recordings = current(), arguments.get(NAME), _recordings_of(model)
    contents, reasons = ([], ["there is no cache"]) if cache is None else contents_or_reasons(cache)
    reasons = reasons or model_state.rows_reasons(model, {rows, generation.inputs})
    if not reasons and not recordings.in_use.acquire(blocking=False):
        reasons = ["another call uses the model's recordings"]
    if not reasons:
        steps = RecordedSteps(model, recordings, cache, arguments, contents[0].length + steps_left)
        generation.recorded = steps
        try:
            reasons = steps.begin(contents, prepare, expected)
        except torch.cuda.OutOfMemoryError:  # the call's own cache is as it was
            abandon()
            reasons = recordings.refused = ["its buffers found no memory"]
    _tell(reasons)
    return None if reasons else steps


def abandon() -> None:
    """After an error in the loop of the call that runs."""
    generation = current()
    if generation.recorded is not None:
        generation.recorded.abandon()
        generation.recorded = None


def _tell(reasons: list[str]) -> None:
    fell_back([f"decode steps are not recorded: {reason}" for reason in reasons])


def _without_cache(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != NAME}


def _recordings_of(model: Any) -> Recordings:
    if model not in _known or _known[model].device != model.device:
        _known[model] = Recordings(model.device)
    return _known[model]


def _settings() -> tuple:
    """What of torch decides which kernels run, and whether tensors may be written outside of inference mode."""
    attention = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math")]
    precision = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    return torch.is_inference_mode_enabled(), *precision, *attention


def _tolerance(logits: Tensor) -> float:
    return TOLERANCES.get(logits.dtype, TOLERANCES[torch.float32])
