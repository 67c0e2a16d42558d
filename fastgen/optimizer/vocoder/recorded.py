"""Recordings of a generator's forward, each for all numbers of frames of one bucket (Seamless, "Vocoder").

On a GPU a CUDA graph (not yet run on a GPU). On a CPU the padding costs more than the Python between the kernels, of
which a vocoder has few that are small; there recordings are made with FASTGEN_CUDA_GRAPHS=on only.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastgen.config import CONFIG
from fastgen.ops.cpu_graph.trace import Diverged, NotRepeatable
from fastgen.optimizer.decoding.call import add_reasons, count
from fastgen.optimizer.decoding.reasons import VOCODER, with_code
from fastgen.optimizer.decoding.recorded_step import Recording, Recordings
from fastgen.optimizer.decoding.recorded_steps import recordings_of, settings
from fastgen.optimizer.decoding.static_cache import rounded
from fastgen.optimizer.vocoder.convolutions import Torch
from fastgen.optimizer.vocoder.hifi_gan import HifiGan, plain_weights, waveform
from fastgen.patching import warn

# Of waveforms between -1 and 1.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
TOLERANCE = 0.05  # of half precision


def are_wanted(states: Tensor) -> bool:
    """Whether forwards of such states are recorded; on a GPU unless the program computes on a stream of its own."""
    if CONFIG.cuda_graphs != "on":
        return False
    return states.is_cpu or (states.is_cuda and not torch.cuda.current_stream(states.device).cuda_stream)


def recorded_waveform(owner: nn.Module, gan: HifiGan, states: Tensor, voice: Tensor | None) -> Tensor | None:
    """As `waveform`, of a recording of this module's forward; None, with a reason in the report, if there is none.

    A new recording is compared with the forward at its first replay.
    """
    recordings = recordings_of(owner, owner)
    if recordings.refused or not recordings.in_use.acquire(blocking=False):
        found = recordings.refused or ["another call uses the captured graph"]
        add_reasons(VOCODER, with_code("NOT_CAPTURABLE", found))
        return None
    try:
        weights = plain_weights(gan)
        recordings.expect(_state(gan, weights))
        return _of_bucket(recordings, gan, weights, states, voice)
    except (NotRepeatable, Diverged) as reason:
        _refuse(recordings, str(reason))
    except torch.cuda.OutOfMemoryError:
        _refuse(recordings, "out of memory while allocating static buffers")
    finally:
        recordings.in_use.release()
    return None


def _of_bucket(
    recordings: Recordings, gan: HifiGan, weights: dict[nn.Module, Tensor], states: Tensor, voice: Tensor | None
) -> Tensor | None:
    frames = states.shape[-1]
    padded = functional.pad(states, (0, rounded(frames) - frames))
    inputs = {"states": padded, "lengths": torch.full((1,), frames, device=states.device), "voice": voice}
    key = _key(inputs)
    recording = recordings.take(key)
    if recording is None:
        recording = Recording(lambda given: waveform(gan, weights, way=Torch, **given), [], None)
        found = recording.record(inputs, recordings.capture)
    else:
        found = recording.replay(inputs)
    samples = gan.samples(frames)
    if not recording.is_proven and recording.is_recorded:
        expected = waveform(gan, weights, states, Torch, voice)
        found = recording.replay(inputs)
        if not torch.allclose(found[..., :samples], expected, rtol=0, atol=tolerance(states), equal_nan=True):
            _refuse(recordings, "a replay gave another waveform than the forward", is_expected=False)
            return expected
        recording.is_proven = True
    recordings.give_back(key, recording)
    count(recordings.capture.name.replace("decode step", "vocoder"))
    return found[..., :samples].clone(memory_format=torch.contiguous_format)


def _refuse(recordings: Recordings, reason: str, is_expected: bool = True) -> None:
    recordings.forget()
    recordings.refused = [reason]
    add_reasons(VOCODER, with_code("NOT_CAPTURABLE", [reason]))
    if not is_expected:
        warn(f"fastgen does not record a vocoder: {reason}")


def tolerance(states: Tensor) -> float:
    """How far two waveforms of one type may be from each other where rounding is all that differs."""
    return TOLERANCES.get(states.dtype, TOLERANCE)


def _state(gan: HifiGan, weights: dict[nn.Module, Tensor]) -> Any:
    """Equal as long as a recording reads the right tensors, which it keeps: what is written in place, it reads."""
    tensors = [tensor for layer in gan.layers() for tensor in (weights[layer], layer.bias) if tensor is not None]
    slopes = [gan.slope, *(slope for stage in gan.stages for slope in stage.slopes)]
    return slopes, [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors]


def _key(inputs: dict[str, Tensor | None]) -> Hashable:
    """A recording's shapes, and what of torch decides which kernels run."""
    shapes = tuple(None if tensor is None else tensor.shape for tensor in inputs.values())
    cudnn = torch.backends.cudnn
    return shapes, settings(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
