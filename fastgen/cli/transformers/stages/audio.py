"""Lines of INPUT that are paths of audio files to what a speech model takes: sound through the feature extractor.

What is wrong with a file is its line's error and stops no other. Nothing is cut to what a model hears: a transcript
of the first half of a recording looks like any other. Whisper's generate takes the features of a longer recording in
one piece, and hears one window of them after the other (section 3.8 of its paper).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers

from fastgen.cli.transformers.files.records import RecordError, reason
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.stages.items import Line, Prepared
from fastgen.cli.transformers.stages.preprocess import read_input

FeatureExtractor: TypeAlias = transformers.SequenceFeatureExtractor


def prepare_audio(
    feature_extractor: FeatureExtractor, args: RunConfig, hears_windows: bool = False
) -> Callable[[list[Line]], list[Prepared]]:
    """A function that makes of lines what the feature extractor makes of their sounds, without the batch dimension.

    A line, or its record's text field, is a path, relative to the current folder. hears_windows: sounds may be longer
    than the model hears at once.
    """
    return partial(_prepare, feature_extractor, args, hears_windows)


def collate_audio(feature_extractor: FeatureExtractor, arrays: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Several inputs as one batch: padded to the longest, with an attention_mask for extractors that give one.

    Whisper's inputs [M, 3000] have one length already; Speech2Text's [N, M] become [B, longest N, M] with int32
    attention_mask [B, longest N].
    """
    return dict(feature_extractor.pad(arrays, padding=True, return_tensors="pt"))


def collate_long(arrays: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Features [M, F] of long recordings as [B, M, longest F], zeros behind each, and their int64 attention_mask.

    Whisper's generate looks at no frame that is masked, so that a transcript does not depend on the others.
    """
    longest = max(each["attention_mask"].shape[-1] for each in arrays)

    def padded(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, longest - array.shape[-1])])

    return {name: torch.from_numpy(np.stack([padded(each[name]) for each in arrays])) for name in arrays[0]}


def _prepare(
    feature_extractor: FeatureExtractor, args: RunConfig, hears_windows: bool, lines: list[Line]
) -> list[Prepared]:
    return [_prepare_line(feature_extractor, args, hears_windows, line) for line in lines]


def _prepare_line(feature_extractor: FeatureExtractor, args: RunConfig, hears_windows: bool, line: Line) -> Prepared:
    try:
        path = read_input(line, args)
    except RecordError as error:
        return Prepared(error=str(error))
    if not isinstance(path, str):  # an empty line, since no chat is read here
        return Prepared()
    if line.cut:
        return Prepared(error=f"has more than {len(line.raw)} bytes, and no path has so many")
    try:
        return _features(feature_extractor, Path(path), hears_windows)
    except RecordError as error:
        why = str(error)
    except Exception as error:  # files of strangers, read by libraries that raise what they like
        why = f"cannot be read ({reason(error)})"
    return Prepared(error=f"{' '.join(path.splitlines())}: {why}")


def _features(feature_extractor: FeatureExtractor, path: Path, hears_windows: bool) -> Prepared:
    at_once = getattr(feature_extractor, "n_samples", None)
    samples = _read(path, feature_extractor.sampling_rate, None if hears_windows else at_once)
    if not hears_windows or len(samples) <= at_once:
        return Prepared(extract(feature_extractor, samples))
    arrays = extract(feature_extractor, samples, truncation=False, padding="longest")
    arrays["attention_mask"] = np.ones(arrays["input_features"].shape[-1], np.int64)
    return Prepared(arrays, is_long=True)


def extract(feature_extractor: FeatureExtractor, samples: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
    """What the model hears of float32 samples [S] at its own rate; raises RecordError where that is nothing.

    options: of the feature extractor's call.
    """
    rate = feature_extractor.sampling_rate
    with np.errstate(all="ignore"):  # what comes of it is looked at below
        features = feature_extractor(samples, sampling_rate=rate, return_tensors="np", **options)
    arrays = {name: value[0] for name, value in features.items()}
    if any(array.size == 0 for array in arrays.values()):
        raise RecordError(f"is too short ({len(samples) / rate:g} s)")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise RecordError("gives features that are not finite numbers (is it silent, or are its samples not finite?)")
    return arrays


def _read(path: Path, rate: int, most_samples: int | None) -> np.ndarray:
    """The sound of a file at a sampling rate, float32 [S], its channels averaged; raises RecordError.

    most_samples: how many of them the model hears. A file that has more is not read further.
    """
    import soundfile  # of the audio extra, which other tasks do without
    import soxr

    if not path.is_file():
        raise RecordError("is not a file" if path.exists() else "there is no such file")
    try:
        # Opened here: of a file that it cannot open, soundfile says no more than "System error".
        with path.open("rb") as opened, soundfile.SoundFile(opened) as file:
            most = None if most_samples is None else int(most_samples / rate * file.samplerate)
            sound = file.read(-1 if most is None else most + 1, dtype="float32", always_2d=True)  # [S, channels]
            own_rate, frames = file.samplerate, file.frames
    except OSError as error:
        raise RecordError(f"cannot be read ({error.strerror})") from error
    except soundfile.LibsndfileError as error:
        raise RecordError(f"cannot be read ({error.error_string.strip(' .')})") from error
    if len(sound) == 0:
        raise RecordError("has no sound in it")
    if most is not None and len(sound) > most:
        heard = f"{most_samples / rate:g} s"
        raise RecordError(f"lasts {frames / own_rate:g} s, and MODEL hears {heard} (accepted: up to {heard})")
    if len(sound) < frames:
        raise RecordError(f"ends after {len(sound) / own_rate:g} s of {frames / own_rate:g} s: it is not complete")
    samples = sound.mean(axis=1)
    return samples if own_rate == rate else soxr.resample(samples, own_rate, rate)
