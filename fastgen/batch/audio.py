"""Audio input and output: audio files through the feature extractor, and waveforms to WAV files.

A problem with a file is its line's error and does not stop other lines. Recordings are never truncated to the model's
window, because a transcript of the first half looks like any other. Whisper's generate takes the features of a longer
recording in one piece, and processes one window after the other (section 3.8 of its paper).

Tests: tests/batch/test_audio.py, tests/batch/test_sounds.py
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError, reason
from fastgen.batch.files import Line
from fastgen.batch.planner import GeneratedBatch, Item
from fastgen.batch.records import LONGEST_RECORD, RecordError, items_of

LONG = "long"  # the group of recordings that the model processes in several windows
UNKNOWN_FRAMES = (1 << 63) - 1  # libsndfile's number for a FLAC without a length
# The size of the samples in bytes in the header and in the file, from libsndfile's log.
CORRECTED_SIZE = re.compile(r"^ *(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
SIZE_OF_STREAMS = 0x7FFF0000  # and more: 0x7FFFFFFF, 0xFFFFFFFF, …
BYTES_WITH_LENGTH = 200  # the part of an MP3's first frame that may contain the length
MP3_GRANULE = 576  # samples; an MP3 frame has one or two granules

logger = logging.getLogger(__name__)


class AudioInput:
    """Turns lines, each the path of an audio file, into the feature extractor's arrays.

    is_long_form: whether recordings may be longer than the model's window.
    """

    def __init__(self, feature_extractor: Any, args: BatchConfig, is_long_form: bool = False) -> None:
        self._extractor, self._args, self._is_long_form = feature_extractor, args, is_long_form
        self.line_bytes = LONGEST_RECORD

    def prepare(self, lines: list[Line]) -> list[Item]:
        """Returns an item for each line; paths are relative to the current folder."""
        return items_of(lines, self._args, self._fill)

    def collate(self, items: list[Item]) -> dict[str, torch.Tensor]:
        """Returns several inputs as one batch, padded to the longest, with the extractor's attention_mask if any.

        Whisper's inputs [M, 3000] all have one length; long recordings [M, F] become [B, M, longest F], padded with
        zeros; Speech2Text's [N, M] become [B, longest N, M] with int32 attention_mask [B, longest N].
        """
        arrays = [item.arrays for item in items if item.arrays is not None]
        if items[0].group != LONG:
            return dict(self._extractor.pad(arrays, padding=True, return_tensors="pt"))
        longest = max(each["attention_mask"].size for each in arrays)

        def padded(array: np.ndarray) -> np.ndarray:
            return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, longest - array.shape[-1])])

        return {name: torch.from_numpy(np.stack([padded(each[name]) for each in arrays])) for name in arrays[0]}

    def _fill(self, item: Item, path: str) -> None:
        name = " ".join(path.splitlines())
        if item.line.cut:
            raise RecordError(f"has more than {len(item.line.raw)} bytes, and no path has so many")
        extractor = self._extractor
        most = None if self._is_long_form else getattr(extractor, "n_samples", None)
        try:
            samples = _read(Path(path), extractor.sampling_rate, most)
            if self._is_long_form and len(samples) > extractor.n_samples:
                item.group = LONG
                item.arrays = _extract(extractor, samples, truncation=False, padding="longest")
                item.arrays["attention_mask"] = np.ones(item.arrays["input_features"].shape[-1], np.int64)
            else:
                item.arrays = _extract(extractor, samples)
        except RecordError as error:
            raise RecordError(f"{name}: {error}") from error
        except Exception as error:  # untrusted files, read by libraries that raise anything
            raise RecordError(f"{name}: cannot be read ({reason(error)})") from error
        # The number of frames; an attention mask counts those that are not padding.
        mask, features = item.arrays.get("attention_mask"), next(iter(item.arrays.values()))
        item.length = max(features.shape) if mask is None else int(mask.sum())


def _extract(feature_extractor: Any, samples: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
    """Returns the features of float32 samples [S] at the model's rate. Raises RecordError if they are unusable."""
    rate = feature_extractor.sampling_rate
    with np.errstate(all="ignore"):  # the result is checked below
        features = feature_extractor(samples, sampling_rate=rate, return_tensors="np", **options)
    arrays = {name: value[0] for name, value in features.items()}
    if any(array.size == 0 for array in arrays.values()):
        raise RecordError(f"is too short ({len(samples) / rate:g} s)")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise RecordError("gives features that are not finite numbers (is it silent, or are its samples not finite?)")
    return arrays


def _read(path: Path, rate: int, most_samples: int | None) -> np.ndarray:
    """Returns the sound of a file at a sampling rate, float32 [S], with channels averaged. Raises RecordError.

    most_samples: the most samples that the model accepts. Longer files are not read.
    """
    import soundfile  # from the audio extra, which other tasks do not need
    import soxr

    if not path.is_file():
        raise RecordError("is a folder (accepted: an audio file)" if path.is_dir() else "there is no such file")
    path.open("rb").close()  # without permission, libsndfile would only say "System error"
    try:
        # Not a file object: there libsndfile searches for the sound at byte 0 only, and cuts it off after a tag.
        with soundfile.SoundFile(os.fsencode(path)) as file:
            own_rate, frames = file.samplerate, file.frames
            if frames == UNKNOWN_FRAMES:
                raise RecordError("has no length in its header (accepted: a file rewritten by ffmpeg)")
            if most_samples is not None and frames > int(most_samples / rate * own_rate):
                heard = f"{most_samples / rate:g} s"
                raise RecordError(f"lasts {frames / own_rate:g} s, and MODEL hears {heard} (accepted: up to {heard})")
            sound = file.read(dtype="float32", always_2d=True)  # [S, channels]
            is_mp3, log = file.format == "MP3", file.extra_info
    except soundfile.LibsndfileError as error:
        raise RecordError(f"cannot be read ({type(error).__name__}: {error.error_string})") from error
    if len(sound) == 0:
        raise RecordError("has no sound in it")
    if is_mp3 and not _mp3_has_length(path):
        _warn_of_estimate(path, len(sound), frames, own_rate)
    elif len(sound) < (frames := _frames_of_header(frames, log)):
        raise RecordError(f"ends after {len(sound) / own_rate:g} s of {frames / own_rate:g} s: it is not complete")
    samples = sound.mean(axis=1)
    return samples if own_rate == rate else soxr.resample(samples, own_rate, rate)


def _frames_of_header(frames: int, log: str) -> int:
    """Returns the header's number of frames. frames: libsndfile's number; log: libsndfile's log of opening the file.

    libsndfile corrects a header by the size of the file, and logs that. Programs that write to a pipe put an impossible
    size into the header.
    """
    if (corrected := CORRECTED_SIZE.search(log)) is None or int(corrected[1]) >= SIZE_OF_STREAMS:
        return frames
    return round(frames * int(corrected[1]) / max(1, int(corrected[2])))


def _mp3_has_length(path: Path) -> bool:
    """Whether the first frame of an MP3 has the number of frames; otherwise libsndfile estimates it from the size."""
    with path.open("rb") as file:
        start = file.read(10)
        has_tag = start.startswith(b"ID3")
        # Seven bits of each of the last four bytes are its size.
        file.seek(10 + sum(byte << shift for byte, shift in zip(start[6:], (21, 14, 7, 0))) if has_tag else 0)
        frame = file.read(BYTES_WITH_LENGTH)
    return frame.startswith(b"\xff") and any(mark in frame for mark in (b"Xing", b"Info", b"VBRI"))


def _warn_of_estimate(path: Path, frames_read: int, estimated: int, rate: int) -> None:
    """Warns if an MP3's length differs from the estimate; reading stops at an estimate that is too short."""
    is_cut = frames_read == estimated and frames_read % MP3_GRANULE > 0
    if is_cut or frames_read < estimated:
        logger.warning(
            "%s: its header has no length; libsndfile estimates %g s, and reads %g s%s",
            *(path, estimated / rate, frames_read / rate, "; the sound continues after that" if is_cut else ""),
        )


class SoundFolder:
    """The folder OUTPUT.audio: mono WAV files with one sampling rate, one for each line; threads may write to it.

    During a run it is OUTPUT.part.audio. It is renamed just before OUTPUT is.
    """

    def __init__(self, args: BatchConfig, sampling_rate: int) -> None:
        target = os.path.realpath(args.output)  # the target, if OUTPUT is a link
        self._accepted = f"accepted: {args.named('overwrite', True)}, with {args.named('resume', True)}"
        self.folder, self._part = Path(target + ".audio"), Path(target + ".part.audio")
        self.sampling_rate = sampling_rate

    def begin(self, resumes: bool) -> None:
        """Removes the files of an earlier run, or resumes it."""
        if resumes and not self._part.exists() and self.folder.exists():  # killed after the folder was renamed
            os.rename(self.folder, self._part)
        elif not resumes:
            shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir(exist_ok=True)

    def finish(self, generated: GeneratedBatch) -> float:
        """Writes the items' sounds, fills their outputs, and returns the seconds of sound."""
        total = 0.0
        for item, samples in zip(generated.items, generated.sounds or (), strict=True):
            if not len(samples):
                item.error = "became a sound of no length"
                continue
            seconds = len(samples) / self.sampling_rate
            path = self.write(item.line.number, samples)
            item.outputs.append({"path": path, "seconds": seconds, "sampling_rate": self.sampling_rate})
            total += seconds
        return total

    def write(self, number: int, samples: np.ndarray) -> str:
        """Writes the sound of a line, float32 [S] between -1 and 1, and returns its final path.

        Samples are not rounded to 16 bits, and the same samples give the same bytes. An incomplete file of a killed run
        is written again, because its line is not in the journal.
        """
        data = samples.astype("<f4").tobytes()
        form = struct.pack("<4sIHHIIHHH", b"fmt ", 18, 3, 1, self.sampling_rate, 4 * self.sampling_rate, 4, 32, 0)
        head = b"WAVE" + form + struct.pack("<4sII4sI", b"fact", 4, len(samples), b"data", len(data))
        name = f"{number:06}.wav"
        (self._part / name).write_bytes(struct.pack("<4sI", b"RIFF", len(head) + len(data)) + head + data)
        return str(self.folder / name)

    def complete(self, overwrite: bool) -> None:
        """Gives the folder its final name. Raises InputError if that would replace something without permission."""
        if self.folder.exists():
            if not overwrite:
                raise InputError(f"OUTPUT: {self.folder} already exists ({self._accepted})")
            shutil.rmtree(self.folder)
        os.rename(self._part, self.folder)

    def discard(self) -> None:
        """Removes the files of a run that has written no record."""
        shutil.rmtree(self._part, ignore_errors=True)
