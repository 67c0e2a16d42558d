"""Batches through generate, in smaller parts where the memory is too small for a whole one, or where it raises."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from fastgen.cli.errors import RunError
from fastgen.cli.transformers.files.records import reason
from fastgen.cli.transformers.model.loading import LoadedModel
from fastgen.cli.transformers.model.speaking import speaking
from fastgen.cli.transformers.stages.items import Batch, Generated, NotGenerated, Segment
from fastgen.optimizer.transformers.unread import SEQUENCES_SCORES, reading_only

NO_SEQUENCES = np.empty((0, 0), np.int64)
# What allocators say that raise a plain RuntimeError.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")

# Arguments of Whisper's generate for recordings that are longer than it hears at once.
LONG = {"return_timestamps": True, "return_segments": True}

logger = logging.getLogger(__name__)


class Model:
    """Calls generate with the settings of a run, and counts the seconds spent in it."""

    def __init__(self, loaded: LoadedModel, settings: dict[str, Any], device: torch.device) -> None:
        self.seconds = 0.0
        self._loaded = loaded
        self._settings = settings
        self.device = device

    def __call__(self, batch: Batch) -> Generated:
        """What is generated for a batch of at least one line; raises RunError where the device is of no more use."""
        begun = time.perf_counter()
        try:
            inputs = {name: tensor.to(self.device) for name, tensor in batch.inputs.items()}
            if self._loaded.speaks:
                return self._speak(batch, inputs)
            generated = self._generate(batch, inputs)
            scores, segments = generated.get("sequences_scores"), generated.get("segments")  # [B * R]
            sequences = generated["sequences"].long()  # without any segment they are floats
            if self._loaded.causal_lm:
                sequences = sequences[:, inputs["input_ids"].shape[1] :]  # [B * R, N + T] -> [B * R, T]
            if len(sequences) % len(batch):
                raise RuntimeError(f"generate returned {len(sequences)} sequences for {len(batch)} inputs")
            return Generated(
                batch.lines,
                batch.lengths,
                sequences.cpu().numpy(),
                None if scores is None else scores.tolist(),
                batch.not_generated,
                segments=None if segments is None else [list(map(_segment, output)) for output in segments],
            )
        except Exception as error:
            if not self._device_works_sync():
                numbers = [line.number for line in batch.lines]
                where = f"at lines {min(numbers)} to {max(numbers)}"
                raise RunError(f"{self.device} failed {where}: {reason(error)}") from error
            raise
        finally:
            self.seconds += time.perf_counter() - begun

    def _generate(self, batch: Batch, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        settings = self._settings | (LONG if batch.is_long else {})
        # Without scores for the command it may be Whisper's own generate that reads them.
        with reading_only(SEQUENCES_SCORES) if settings.get("output_scores") else nullcontext():
            generated = self._loaded.model.generate(**inputs, **settings)
        return {"sequences": generated} if isinstance(generated, torch.Tensor) else generated

    def _speak(self, batch: Batch, inputs: dict[str, torch.Tensor]) -> Generated:
        model = self._loaded.model
        waveforms, lengths = speaking(model).call(model, **inputs, **self._settings)
        waveforms = waveforms.reshape(len(batch), -1).float().cpu().numpy()
        sounds = [waveform[:length] for waveform, length in zip(waveforms, lengths.reshape(-1).tolist(), strict=True)]
        return Generated(batch.lines, batch.lengths, NO_SEQUENCES, None, batch.not_generated, sounds)

    def _device_works_sync(self) -> bool:
        """After some errors, such as an index out of range in a kernel, a GPU answers everything with that error."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True


class WithinMemory:
    """Gives batches to `model`; one that fails is halved, until the lines that fail stand alone.

    After one that does not fit into memory no later one is as large as that. What is remembered is `cells`, rows times
    their width, to which the memory of a batch is about proportional.
    left: whether text is padded on the left.
    say: gets one line for every time the limit becomes smaller.
    """

    def __init__(
        self, model: Callable[[Batch], Generated], left: bool, say: Callable[[str], None], cells: int | None = None
    ) -> None:
        self._model = model
        self._left = left
        self._say = say
        self.cells = cells

    def __call__(self, batch: Batch) -> Iterator[Generated]:
        """What is generated for the batch, in one part or in several; a line that fails alone says why."""
        if not batch.lines:
            yield Generated([], [], NO_SEQUENCES, None, batch.not_generated)
            return
        rows = len(batch)
        if self.cells is not None:
            rows = min(rows, max(1, self.cells // max(batch.lengths)))
        if rows == len(batch):
            generated = self._generate(batch)
            if isinstance(generated, Generated):
                yield generated
                return
            if rows == 1:
                failed = [*batch.not_generated, NotGenerated(batch.lines[0], generated)]
                yield Generated([], [], NO_SEQUENCES, None, failed)
                return
            rows = (rows + 1) // 2
        for start in range(0, len(batch), rows):
            yield from self(_part(batch, start, start + rows, self._left))

    def _generate(self, part: Batch) -> Generated | str:
        """Why nothing was generated is one line: the exception, and all that its traceback holds, is gone by then."""
        try:
            return self._model(part)
        except RunError:
            raise
        except Exception as error:  # a model may raise anything
            if not is_out_of_memory(error):
                logger.debug("generate raised for %d inputs", len(part), exc_info=True)
                return f"cannot be generated for ({reason(error)})"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._remember(part)
        return f"the memory is too small for this input of length {part.lengths[0]} alone"

    def _remember(self, part: Batch) -> None:
        cells = len(part) * max(part.lengths)
        self.cells = cells // 2 if len(part) > 1 else cells - 1
        if len(part) > 1:
            self._say(
                f"out of memory with {len(part)} inputs of length {max(part.lengths)}: "
                f"going on with at most {self.cells} tokens in a batch"
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left, however its allocator says so."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in OUT_OF_MEMORY)


def _part(batch: Batch, start: int, stop: int, left: bool) -> Batch:
    """Some rows of a batch, text and long recordings without the columns that are padding in all of them."""
    lengths = batch.lengths[start:stop]
    inputs = {name: tensor[start:stop] for name, tensor in batch.inputs.items()}
    if "input_ids" in inputs:
        width = max(lengths)
        columns = slice(-width, None) if left else slice(width)
        inputs = {name: tensor[:, columns] for name, tensor in inputs.items()}
    if batch.is_long:
        inputs = {name: tensor[..., : max(lengths)] for name, tensor in inputs.items()}
    not_generated = batch.not_generated if start == 0 else []
    return Batch(batch.lines[start:stop], lengths, inputs, not_generated, is_long=batch.is_long)


def _segment(segment: dict[str, Any]) -> Segment:
    """As Whisper's generate returns it: times are multiples of 10 ms, but for rounding."""
    start, end = (round(float(segment[name]), 2) for name in ("start", "end"))
    return Segment(start, end, segment["tokens"].tolist())
