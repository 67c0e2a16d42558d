"""The folder OUTPUT.audio: a WAV file for each line of INPUT whose output is a sound.

While a run goes on it is OUTPUT.part.audio. It gets its name just before OUTPUT does. A folder that it replaces has the
name OUTPUT.old.audio until then, so that what an OUTPUT that is there tells of stays until another one is complete.
"""

from __future__ import annotations

import os
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.files.whole_file import beside, named, resolved, write_all

# Where the chunk of a WAV file that tells its loudest sample has the time of writing.
PEAK, PEAK_TIME = b"PEAK", 12


class SoundFolder:
    """Mono sounds of one sampling rate; threads may write to it."""

    def __init__(self, output: Path, sampling_rate: int, records: int, overwrite: bool) -> None:
        """records: how many OUTPUT.part has; where there are some, the folder that belongs to them is gone on with."""
        self.sampling_rate = sampling_rate
        self._output, self._overwrite = output, overwrite
        self.folder, self._part, self._old = _folders(output)
        if not records:
            for left in self._part.glob("[0-9]*.wav*"):
                left.unlink()
        elif not self._part.exists() and self.folder.exists():  # of a run that was killed between its names
            os.rename(self.folder, self._part)
            if self._old.exists():
                os.rename(self._old, self.folder)

    def write(self, number: int, samples: np.ndarray) -> str:
        """Writes the sound of a line, float32 [S] between -1 and 1, and returns the path that it will have.

        The file has its name as soon as it is whole. Samples are kept as they are, not rounded to 16 bits, and the same
        samples give the same bytes.
        """
        import soundfile  # of the audio extra

        buffer = BytesIO()
        soundfile.write(buffer, samples, self.sampling_rate, format="WAV", subtype="FLOAT")
        data = bytearray(buffer.getvalue())
        if (peak := data.find(PEAK, 0, 100)) >= 0:
            data[peak + PEAK_TIME : peak + PEAK_TIME + 4] = bytes(4)
        name = f"{number:06}.wav"
        new = self._part / f"{name}.new"
        self._part.mkdir(exist_ok=True)
        with named(new), new.open("wb", buffering=0) as file:
            write_all(file.fileno(), bytes(data))
        os.replace(new, self._part / name)
        return str(self.folder / name)

    def complete(self) -> None:
        """Gives the folder its name; raises InputError where there is something that it may not replace."""
        if not self._overwrite and (os.path.lexists(self.folder) or os.path.lexists(resolved(self._output))):
            raise InputError(f"OUTPUT {self._output}: is there already (accepted: --overwrite, with --resume)")
        self._part.mkdir(exist_ok=True)
        if self.folder.exists():
            shutil.rmtree(self._old, ignore_errors=True)
            os.rename(self.folder, self._old)
        os.rename(self._part, self.folder)

    def remove_replaced(self) -> None:
        """Removes the folder of the OUTPUT before, when this one has its name."""
        shutil.rmtree(self._old, ignore_errors=True)


def check_sound_folder(output: Path, overwrite: bool) -> None:
    """Raises InputError where there is something that may not be replaced."""
    for folder in _folders(output):
        if os.path.lexists(folder) and not folder.is_dir():
            raise InputError(f"OUTPUT {output}: {folder} is not a folder (accepted: another name)")
    folder, target = _folders(output)[0], resolved(output)
    known = os.path.lexists(target) or os.path.lexists(beside(target, ".part"))
    if folder.exists() and not known and not overwrite:
        raise InputError(f"OUTPUT {output}: {folder} is there already (accepted: another name, or --overwrite)")


def check_sounds_are_there(output: Path) -> None:
    """Raises InputError where an OUTPUT that is complete tells of sounds that are gone."""
    folder, *_ = _folders(output)
    if not folder.is_dir():
        raise InputError(f"OUTPUT {output}: is there, but its sounds in {folder} are gone (accepted: --overwrite)")


def _folders(output: Path) -> tuple[Path, Path, Path]:
    """Beside what OUTPUT points to, where it is a link."""
    target = resolved(output) if output.is_symlink() else output
    return beside(target, ".audio"), beside(target, ".part.audio"), beside(target, ".old.audio")
