"""Sound in and sound out: audio files through the feature extractor, and waveforms to WAV files.

What is wrong with a file is its line's error and stops no other. Nothing is cut to what a model hears: a transcript
of the first half of a recording looks like any other. Whisper's generate takes the features of a longer recording in
one piece, and hears one window of them after the other (section 3.8 of its paper).

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

LONG = "long"  # the group of recordings that the model hears in several windows
UNKNOWN_FRAMES = (1 << 63) - 1  # libsndfile's number for a FLAC that does not say it
# Sizes of the samples in bytes, as the header has them and as the file has them, in libsndfile's notes.
CORRECTED_SIZE = re.compile(r"^ *(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
SIZE_OF_STREAMS = 0x7FFF0000  # and more: 0x7FFFFFFF, 0xFFFFFFFF, …
BYTES_WITH_LENGTH = 200  # of an MP3's first frame
MP3_GRANULE = 576  # samples, of which a whole MP3 frame has one or two

logger = logging.getLogger(__name__)


class AudioInput:
    """Makes of lines, each the path of an audio file, what the feature extractor makes of their sounds.

    is_long_form: sounds may be longer than the model hears at once.
    """

    def __init__(self, feature_extractor: Any, args: BatchConfig, is_long_form: bool = False) -> None:
        self._extractor, self._args, self._is_long_form = feature_extractor, args, is_long_form
        self.line_bytes = LONGEST_RECORD

    def prepare(self, lines: list[Line]) -> list[Item]:
        """An item for each line; paths are relative to the current folder."""
        return items_of(lines, self._args, self._fill)

    def collate(self, items: list[Item]) -> dict[str, torch.Tensor]:
        """Several inputs as one batch: padded to the longest, with an attention_mask for extractors that give one.

        Whisper's inputs [M, 3000] have one length already, long recordings [M, F] become [B, M, longest F] with zeros
        behind each; Speech2Text's [N, M] become [B, longest N, M] with int32 attention_mask [B, longest N].
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
        except Exception as error:  # files of strangers, read by libraries that raise what they like
            raise RecordError(f"{name}: cannot be read ({reason(error)})") from error
        # Frames, of which an attention mask counts those that are not padding.
        mask, features = item.arrays.get("attention_mask"), next(iter(item.arrays.values()))
        item.length = max(features.shape) if mask is None else int(mask.sum())


def _extract(feature_extractor: Any, samples: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
    """What the model hears of float32 samples [S] at its own rate; raises RecordError where that is nothing."""
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

    most_samples: how many of them the model hears. A file that has more is not read.
    """
    import soundfile  # of the audio extra, which other tasks do without
    import soxr

    if not path.is_file():
        raise RecordError("is a folder (accepted: an audio file)" if path.is_dir() else "there is no such file")
    path.open("rb").close()  # of a file that it may not open, libsndfile says no more than "System error"
    try:
        # Not a file object, in which libsndfile looks for the sound at byte 0 only, and cuts what is behind a tag.
        with soundfile.SoundFile(os.fsencode(path)) as file:
            own_rate, frames = file.samplerate, file.frames
            if frames == UNKNOWN_FRAMES:
                raise RecordError("does not say in its header how long it is (accepted: a file written anew by ffmpeg)")
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
    """Returns the header's number of frames. frames: libsndfile's number; log: libsndfile's notes on opening the file.

    libsndfile corrects a header by the size of the file, and notes it. Programs that write to a pipe say a size that
    no file has.
    """
    if (corrected := CORRECTED_SIZE.search(log)) is None or int(corrected[1]) >= SIZE_OF_STREAMS:
        return frames
    return round(frames * int(corrected[1]) / max(1, int(corrected[2])))


def _mp3_has_length(path: Path) -> bool:
    """Whether the first frame of an MP3 says how many there are; of others libsndfile estimates it by their size."""
    with path.open("rb") as file:
        start = file.read(10)
        has_tag = start.startswith(b"ID3")
        # Seven bits of each of the last four bytes are its size.
        file.seek(10 + sum(byte << shift for byte, shift in zip(start[6:], (21, 14, 7, 0))) if has_tag else 0)
        frame = file.read(BYTES_WITH_LENGTH)
    return frame.startswith(b"\xff") and any(mark in frame for mark in (b"Xing", b"Info", b"VBRI"))


def _warn_of_estimate(path: Path, frames_read: int, estimated: int, rate: int) -> None:
    """Says where an MP3 is not as long as it was taken for; an estimate that is too short ends the reading there."""
    is_cut = frames_read == estimated and frames_read % MP3_GRANULE > 0
    if is_cut or frames_read < estimated:
        logger.warning(
            "%s: its header has no length; libsndfile estimates %g s, and reads %g s%s",
            *(path, estimated / rate, frames_read / rate, "; the sound goes on after that" if is_cut else ""),
        )


class SoundFolder:
    """The folder OUTPUT.audio: mono WAV files of one sampling rate, one for each line; threads may write to it.

    During a run it is OUTPUT.part.audio. It gets its name just before OUTPUT does.
    """

    def __init__(self, args: BatchConfig, sampling_rate: int) -> None:
        target = os.path.realpath(args.output)  # if OUTPUT is a link, what it points to
        self._accepted = f"accepted: {args.named('overwrite', True)}, with {args.named('resume', True)}"
        self.folder, self._part = Path(target + ".audio"), Path(target + ".part.audio")
        self.sampling_rate = sampling_rate

    def begin(self, resumes: bool) -> None:
        """Clears what an earlier run has left, or takes it up."""
        if resumes and not self._part.exists() and self.folder.exists():  # killed between its names
            os.rename(self.folder, self._part)
        elif not resumes:
            shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir(exist_ok=True)

    def finish(self, generated: GeneratedBatch) -> float:
        """Writes the items' sounds and fills their outputs; returns how many seconds there are."""
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
        """Writes the sound of a line, float32 [S] between -1 and 1, and returns the path that it will have.

        Samples are kept as they are, not rounded to 16 bits, and the same samples give the same bytes. A file that a
        kill has left half is written again: its line is not in the journal.
        """
        data = samples.astype("<f4").tobytes()
        form = struct.pack("<4sIHHIIHHH", b"fmt ", 18, 3, 1, self.sampling_rate, 4 * self.sampling_rate, 4, 32, 0)
        head = b"WAVE" + form + struct.pack("<4sII4sI", b"fact", 4, len(samples), b"data", len(data))
        name = f"{number:06}.wav"
        (self._part / name).write_bytes(struct.pack("<4sI", b"RIFF", len(head) + len(data)) + head + data)
        return str(self.folder / name)

    def complete(self, overwrite: bool) -> None:
        """Gives the folder its name; raises InputError where there is something that it may not replace."""
        if self.folder.exists():
            if not overwrite:
                raise InputError(f"OUTPUT: {self.folder} already exists ({self._accepted})")
            shutil.rmtree(self.folder)
        os.rename(self._part, self.folder)

    def discard(self) -> None:
        """Removes the files of a run that has written no record."""
        shutil.rmtree(self._part, ignore_errors=True)
