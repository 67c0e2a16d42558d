"""What happens before the model, ahead of it: read, tokenise, batch, copy to the device.

One thread reads INPUT and gives lines to workers; another takes what they return, in order, plans batches and puts
them into a queue of a few. Every stage waits when the next one is full.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

from fastgen.cli.transformers.stages.batches import Planner
from fastgen.cli.transformers.stages.choice import Workers
from fastgen.cli.transformers.stages.items import Batch, Line, Prepared
from fastgen.cli.transformers.stages.transfer import Transfer

BATCHES_AHEAD = 4
CHUNKS_PER_WORKER = 4
SECONDS_BETWEEN_LOOKS = 0.1
_END = None

# Makes, in a worker, the function that prepares lines there.
MakePrepare = Callable[[], Callable[[list[Line]], list[Prepared]]]


class Prefetcher:
    """The batches of a run, in the order in which the model is to take them.

    chunks: the lines of INPUT. make_prepare: what workers do with a chunk; `kind` says where they run.
    """

    def __init__(
        self,
        chunks: Iterator[list[Line]],
        make_prepare: MakePrepare,
        kind: type[Workers],
        workers: int,
        planner: Planner,
        transfer: Transfer,
    ) -> None:
        self.reading_seconds = 0.0
        self._chunks = chunks
        self._planner = planner
        self._transfer = transfer
        self._batches: queue.Queue[Batch | BaseException | None] = queue.Queue(BATCHES_AHEAD)
        self._stopped = threading.Event()
        self._pool = kind(make_prepare, self._plan, workers=workers, limit=CHUNKS_PER_WORKER * workers)

    @property
    def preparing_seconds(self) -> float:
        """Of all workers together."""
        return self._pool.busy_seconds

    def start(self) -> None:
        """Begins to read; processes have to be forked before."""
        threading.Thread(target=self._read, name="fastgen-reader", daemon=True).start()

    def __iter__(self) -> Iterator[Batch]:
        """Raises what stopped the stages ahead after the batches that came before it."""
        while (batch := self._batches.get()) is not _END:
            if isinstance(batch, BaseException):
                raise batch
            yield batch

    def stop(self) -> None:
        """Gives up what the model has not taken."""
        self._stopped.set()
        self._pool.kill()

    def _read(self) -> None:
        try:
            begun = time.perf_counter()
            for chunk in self._chunks:
                self.reading_seconds += time.perf_counter() - begun
                self._pool.submit(chunk)
                begun = time.perf_counter()
            self._pool.close()
            self._offer_all(self._planner.rest())
            self._offer(_END)
        except BaseException as error:
            self._offer(error)

    def _plan(self, chunk: list[Line], prepared: list[Prepared]) -> None:
        """Called with the workers' results, in order."""
        self._offer_all(self._planner.add(chunk, prepared))

    def _offer_all(self, batches: Iterator[Batch]) -> None:
        for batch in batches:
            batch.inputs, batch.sent = self._transfer.send(batch.inputs)
            self._offer(batch)

    def _offer(self, item: Batch | BaseException | None) -> None:
        """Waits for room, unless nobody wants it any more."""
        while not self._stopped.is_set():
            try:
                self._batches.put(item, timeout=SECONDS_BETWEEN_LOOKS)
                return
            except queue.Full:
                continue
