"""Audio input and output: soundfile (libsndfile) reads files, soxr resamples, the feature extractor makes the inputs.

What is done here, because libsndfile reads as much as it can without an error:

    joined sounds    of an Ogg, FLAC or MP3 file libsndfile reads the first one only
    a lost end       libsndfile corrects a header that names more than the file holds, and says so in its log only
    lengths          an MP3 without a length in its header gets an estimate, a FLAC the largest number
    the window       recordings are never truncated, because a transcript of the first half looks like any other
    WAV files        equal samples become equal bytes: libsndfile writes the time into files of floats

A problem with a file is its line's error and does not stop other lines. Whisper's generate takes the features of a
recording longer than its window in one piece, and processes one window after the other (section 3.8 of its paper).

Tests: tests/batch/test_audio.py, tests/batch/test_sounds.py
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO, FileIO
from itertools import pairwise
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
MISSING_BYTES, MISSING_SECONDS = 64, 0.1  # how much more than the file holds a header may name
JUNK = "Junk after the last page"  # in libsndfile's log: a part of a page of an Ogg file
# What the sounds begin with that are joined in a file; those of MP3 have no such mark.
STARTS = {"OGG": re.compile(rb"OggS\0[\2\6]"), "FLAC": re.compile(rb"fLaC[\0\x80]\0\0\x22")}
FRAME_SYNC = re.compile(rb"\xff[\xe2-\xff]")  # the beginning of a frame of an MP3
LONGEST_FRAME = 1728  # bytes
MP3_TAGS = (b"TAG", b"APETAGEX", b"LYRICSBEGIN")  # after the last frame
BYTES_WITH_LENGTH = 200  # the part of an MP3's first frame that may contain the length

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
        longest = max(features["attention_mask"].size for features in arrays)

        def padded(array: np.ndarray) -> np.ndarray:
            return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, longest - array.shape[-1])])

        return {name: torch.from_numpy(np.stack([padded(features[name]) for features in arrays])) for name in arrays[0]}

    def _fill(self, item: Item, path: str) -> None:
        name = " ".join(path.splitlines())
        if item.line.cut:
            raise RecordError(f"has more than {len(item.line.raw)} bytes, and no path is that long")
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
        mask = item.arrays.get("attention_mask")
        features = next(iter(item.arrays.values()))
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

    Sounds that are joined in one file follow each other. most_samples: the most samples that the model accepts. Of
    longer files the rest is not read.
    """
    import soundfile  # from the audio extra, which other tasks do not need
    import soxr

    if not path.is_file():
        raise RecordError("is a folder (accepted: an audio file)" if path.is_dir() else "there is no such file")
    path.open("rb").close()  # without permission, libsndfile would only say "System error"
    most = math.inf if most_samples is None else most_samples / rate
    parts = []
    seconds = 0.0
    try:
        for source, has_length in _sources(path):
            samples, own_rate = _samples(path, source, has_length, seconds, most)
            seconds += len(samples) / own_rate
            parts.append(samples if own_rate == rate else soxr.resample(samples, own_rate, rate))
    except soundfile.LibsndfileError as error:
        raise RecordError(f"cannot be read ({type(error).__name__}: {error.error_string})") from error
    if not seconds:
        raise RecordError("has no sound in it")
    return np.concatenate(parts)


def _sources(path: Path) -> Iterator[tuple[Any, bool]]:
    """Yields what soundfile opens for each sound that is joined in a file, and whether its length is known.

    libsndfile itself reads the first sound only.
    """
    import soundfile

    name = os.fsencode(path)
    with soundfile.SoundFile(name) as sound:
        kind = sound.format
    if kind == "MP3":
        yield from _mp3_sources(path)
        return
    data = path.read_bytes() if kind in STARTS else b""
    starts = [match.start() for match in STARTS[kind].finditer(data)] if data else []
    if len(starts) < 2:
        # Not a file object: there libsndfile searches for the sound at byte 0 only, and cuts it off after a tag.
        yield name, True
        return
    for start, end in pairwise([*starts, len(data)]):
        yield BytesIO(data[start:end]), True


def _mp3_sources(path: Path) -> Iterator[tuple[int, bool]]:
    """Yields the descriptor of an MP3, moved to each position where libsndfile has stopped; see `_sources`.

    libsndfile stops after the number of frames in the first header, or else after an estimate from the size, or where
    the rate changes.
    """
    data = path.read_bytes()
    end = len(data.rstrip(b"\0"))
    with path.open("rb", buffering=0) as file:
        while (start := file.tell()) == 0 or (end - start > LONGEST_FRAME and not data.startswith(MP3_TAGS, start)):
            syncs = FRAME_SYNC.finditer(data, start + 1, start + 2 * LONGEST_FRAME)
            positions = (
                position for position in (start, *(match.start() for match in syncs)) if _opens(file, position)
            )
            if (position := next(positions, None)) is None:
                rewritten = "accepted: a file rewritten by ffmpeg"
                raise RecordError(f"holds no sound that can be read from byte {start} of {len(data)} on ({rewritten})")
            file.seek(position)
            yield file.fileno(), _mp3_has_length(data, position)


def _opens(file: FileIO, position: int) -> bool:
    """Whether libsndfile recognizes a sound at a position in a file; an MP3 may begin in the middle of a frame."""
    import soundfile

    file.seek(position)
    with suppress(soundfile.LibsndfileError), soundfile.SoundFile(file.fileno(), closefd=False):
        return True
    return False


def _mp3_has_length(data: bytes, start: int) -> bool:
    """Whether the first frame of an MP3 has the number of frames; otherwise libsndfile estimates it from the size."""
    if data.startswith(b"ID3", start):
        # Seven bits of each of the last four bytes are the tag's size.
        start += 10 + sum(byte << shift for byte, shift in zip(data[start + 6 :], (21, 14, 7, 0)))
    frame = data[start : start + BYTES_WITH_LENGTH]
    return frame.startswith(b"\xff") and any(mark in frame for mark in (b"Xing", b"Info", b"VBRI"))


def _samples(path: Path, source: Any, has_length: bool, heard: float, most: float) -> tuple[np.ndarray, int]:
    """Returns the samples [S] of one sound, and their rate. Raises RecordError for a sound that is not complete.

    `heard`: seconds of the sounds before it in the file. most: seconds that the model accepts.
    """
    import soundfile

    with soundfile.SoundFile(source, closefd=False) as file:
        rate, frames, log = file.samplerate, file.frames, file.extra_info
        if frames == UNKNOWN_FRAMES:
            raise RecordError("has no length in its header (accepted: a file rewritten by ffmpeg)")
        limit = frames if most == math.inf else int((most - heard) * rate)
        # soundfile seeks after reading, which some formats cannot (GSM), and which moves an MP3 back by some frames.
        file.seekable = lambda: False
        sound = file.read(min(frames, limit + 1), dtype="float32", always_2d=True)  # [S, channels]
    if len(sound) > limit:
        lasts = heard + frames / rate
        accepted = f"accepted: up to {most:g} s"
        raise RecordError(f"lasts {lasts:g} s, and MODEL transcribes {most:g} s ({accepted})")
    if has_length:
        _check_complete(path, len(sound), frames, rate, log)
    return sound.mean(axis=1), rate


def _check_complete(path: Path, frames_read: int, frames: int, rate: int, log: str) -> None:
    """Raises RecordError if a sound is shorter than its header says; warns if only a few bytes are missing.

    frames: libsndfile's number; log: libsndfile's log of opening the file. libsndfile corrects a header by the size of
    the file, and logs that. Programs that write to a pipe put an impossible size into the header; other programs put
    the size of the whole file there.
    """
    corrected = CORRECTED_SIZE.search(log)
    if corrected is not None and int(corrected[1]) < SIZE_OF_STREAMS:
        claimed = int(corrected[1])
        size = max(1, int(corrected[2]))
        frames = round(frames * claimed / size)
        if 0 < claimed - size <= min(MISSING_BYTES, MISSING_SECONDS * rate * size / max(1, frames_read)):
            logger.warning("%s: its header names %d bytes more than the file holds", path, claimed - size)
            return
    if frames_read < frames:
        raise RecordError(f"ends after {frames_read / rate:g} s of {frames / rate:g} s: it is not complete")
    if JUNK in log:
        raise RecordError("does not end with a whole page: it is not complete")


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
