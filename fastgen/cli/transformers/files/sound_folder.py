"""The folder OUTPUT.audio: a WAV file for each line of INPUT whose output is a sound.

While a run goes on it is OUTPUT.part.audio. It gets its name just before OUTPUT does, so that what an OUTPUT that is
there tells of stays as it is until another one is complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.files.whole_file import beside, named


class SoundFolder:
    """Mono sounds of one sampling rate; threads may write to it."""

    def __init__(self, output: Path, sampling_rate: int, records: int) -> None:
        """records: how many OUTPUT.part has; where there are some, the folder that belongs to them is gone on with."""
        self.sampling_rate = sampling_rate
        self.folder, self._part = _folders(output)
        if not records:
            shutil.rmtree(self._part, ignore_errors=True)
        elif not self._part.exists() and self.folder.exists():
            os.rename(self.folder, self._part)  # of a run that was killed between its two names
        self._part.mkdir(exist_ok=True)

    def write(self, number: int, samples: np.ndarray) -> str:
        """Writes the sound of a line, float32 [S] between -1 and 1, and returns the path that it will have.

        The file has its name as soon as it is whole. Samples are kept as they are, not rounded to 16 bits.
        """
        import soundfile  # of the audio extra

        name = f"{number:06}.wav"
        new = self._part / f"{name}.new"
        with named(new), new.open("wb") as file:
            soundfile.write(file, samples, self.sampling_rate, format="WAV", subtype="FLOAT")
        os.replace(new, self._part / name)
        return str(self.folder / name)

    def complete(self) -> None:
        """Gives the folder its name, in place of one that is there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.rename(self._part, self.folder)


def check_sound_folder(output: Path, overwrite: bool) -> None:
    """Raises InputError where there is something that may not be replaced."""
    folder, _ = _folders(output)
    if os.path.lexists(folder) and not output.exists() and not beside(output, ".part").exists() and not overwrite:
        raise InputError(f"OUTPUT {output}: {folder} is there already (accepted: another name, or --overwrite)")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"OUTPUT {output}: {folder} is not a folder (accepted: another name)")


def _folders(output: Path) -> tuple[Path, Path]:
    return beside(output, ".audio"), beside(output, ".part.audio")
