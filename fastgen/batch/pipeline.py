"""The pipeline of a run's stages: read → tokenize → batch → generate → detokenize → write (§4.3 of the paper).

    main thread     the model, and nothing else
    ahead of it     one thread reads, workers prepare, one thread plans and collates batches
    after it        workers finish what was generated, and write it batch by batch

Each stage waits while enough is ready for the next. `Prefetcher` yields the planned batches, a `Runner` runs them, each
independently of earlier ones, and `Pipeline` passes the results to the journal, in the order in which they arrive.

Tests: tests/batch/test_pipeline.py, tests/batch/test_memory.py, tests/batch/test_stage_threads.py
"""

from __future__ import annotations

import gc
import hashlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from fastgen.batch.errors import RunError, Stop, reason
from fastgen.batch.files import Line
from fastgen.batch.part import Entry
from fastgen.batch.planner import Batch, GeneratedBatch, Item, Plan
from fastgen.batch.records import outputs_of
from fastgen.batch.task import Task

BATCHES_AHEAD = 4
CHUNKS_PER_WORKER = 4
RESULTS_PER_WORKER = 8
SECONDS_TO_END = 0.5
# Consecutive batches, and at least a window of them: adjacent lines have one length, and may all fail because of it.
MOST_FAILED_BATCHES = 3
# Messages of allocators that raise a plain RuntimeError.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Ahead(Generic[T]):
    """Reads ahead: a thread takes up to `limit` items from an iterator before they are needed, and holds another one.

    The thread is a daemon, so that waiting for standard input does not keep the program from ending.
    """

    def __init__(self, items: Iterator[T], limit: int, name: str) -> None:
        self._taken: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(limit)
        self._stopped = False
        threading.Thread(target=self._run, args=(items,), name=name, daemon=True).start()

    def __iter__(self) -> Iterator[T]:
        """Yields the items; raises the iterator's error after the items before it."""
        while (item := self._taken.get()) is not None and not self._stopped:
            if isinstance(item, BaseException):
                raise item
            yield item[0]

    @property
    def is_waiting(self) -> bool:
        """Whether the next item is not ready."""
        return self._taken.empty()

    def stop(self) -> None:
        """Ends the thread after the present item, and the iteration that waits for an item."""
        self._stopped = True
        with suppress(queue.Empty):
            while True:
                self._taken.get_nowait()  # makes room for a thread that waits in put
        with suppress(queue.Full):
            self._taken.put_nowait(None)

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._taken.put((item,))
                if self._stopped:
                    return
            self._taken.put(None)
        except BaseException as error:
            self._taken.put(error)


class Prefetcher(Ahead[Batch]):
    """The batches of a run that are not written yet, in the order for the model.

    chunks: the lines of INPUT. plan: cuts their items into batches. written: returns the entry of a line that an
    earlier run has written. collates: whether to make the batches' tensors; otherwise the process that generates does.
    """

    def __init__(
        self,
        chunks: Iterator[list[Line]],
        task: Task,
        plan: Plan,
        written: Callable[[int], Entry | None] = lambda number: None,
        collates: bool = True,
    ) -> None:
        self._task, self._written, self._collates = task, written, collates
        workers = task.args.preprocess_workers
        self._workers = ThreadPoolExecutor(workers, "fastgen-tokenize")
        self._prepared = Ahead(self._submitted(chunks), CHUNKS_PER_WORKER * workers, "fastgen-reader")
        super().__init__(self._collated(plan), BATCHES_AHEAD, "fastgen-planner")

    def stop(self) -> None:
        """Discards what the model has not taken."""
        self._prepared.stop()
        super().stop()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _submitted(self, chunks: Iterator[list[Line]]) -> Iterator[tuple[list[Item], Future[list[Item]]]]:
        """Yields the written items of each chunk, and its prepared ones: the rest, or all if planning needs them."""
        for lines in chunks:
            entries = [(line, self._written(line.number)) for line in lines]
            written = [self._written_item(entry) for _, entry in entries if entry]
            fresh = [line for line, entry in entries if entry is None or self._task.args.reads == "decoder"]
            yield written, self._workers.submit(self._task.prepare, fresh)

    def _written_item(self, entry: Entry) -> Item:
        """Returns the item of a record, without its input; with outputs if later items may equal it."""
        item = Item(Line(entry.number), None, entry.length, entry.group, is_written=True, key=entry.key)
        if entry.key is not None:
            item.outputs, item.error = outputs_of(entry.data, self._task.args)
            if entry.failed and item.error is None:
                item.error = f"equals line {entry.number}, which failed"
        return item

    def _items(self) -> Iterator[Item]:
        for written, prepared in self._prepared:
            items = {item.line.number: item for item in prepared.result()}
            for item in written:
                if (again := items.get(item.line.number)) is not None:
                    item.arrays = again.arrays
                items[item.line.number] = item
            yield from (item for _, item in sorted(items.items()))

    def _collated(self, plan: Plan) -> Iterator[Batch]:
        for batch in plan(self._items()):
            written = {item.is_written for item in batch.items}
            if len(written) == 2:
                raise RunError(f"OUTPUT.part has a part of batch {batch.number} only (remove it to start again)")
            if False in written and self._collates:
                batch.inputs = self._task.collate(batch.items)
            if False in written:
                yield batch
            elif batch.skipped:
                yield Batch([], batch.skipped, batch.number)


class Runner(Protocol):
    """Runs batches: `SplitOnOOM` in this process, `workers.Workers` in other processes.

    collates: whether batches need their tensors. load: loads the task, and fills its `args` with the sizes of batches.
    run: yields each batch with the parts generated for it, in any order; after a request to stop, only batches in
    flight. finish: fills outputs of a part, and returns its amount. rates: text for lines about the speed.
    """

    collates: bool

    def load(self, task: Task) -> None: ...
    def run(self, batches: Ahead[Batch], stop: Stop) -> Iterator[tuple[Batch, list[Any]]]: ...
    def finish(self, part: Any) -> float: ...
    def rates(self) -> str: ...


class SplitOnOOM:
    """Runs the task's model on batches; a batch that fails is halved until the failing items are alone.

    A size that did not fit is not tried again: later parts as large are halved immediately. So the parts depend on the
    batch and the memory, not on earlier batches. seed: the run's, from which each part gets its own, so that it always
    gives the same samples; None does not set torch's. say: prints a line for every smaller limit.
    """

    collates = True

    def __init__(self, task: Task, say: Callable[[str], None], seed: int | None) -> None:
        self._task, self._say, self._seed = task, say, seed
        self.too_large: int | None = None  # rows times width, to which the memory of a batch is proportional

    def load(self, task: Task) -> None:
        """Loads the task's model."""
        task.load()

    def run(self, batches: Iterable[Batch], stop: Stop) -> Iterator[tuple[Batch, list[GeneratedBatch]]]:
        """Yields each batch with its outputs, in order."""
        for batch in batches:
            stop.finishing = True
            yield batch, self(batch)
            stop.finishing = False
            if stop.requests:
                return

    def finish(self, part: GeneratedBatch) -> float:
        """Fills outputs of a part, and returns its amount."""
        return self._task.finish(part)

    def rates(self) -> str:
        """Returns nothing: there is one process, whose speed is the run's."""
        return ""

    def __call__(self, batch: Batch, start: int = 0) -> list[GeneratedBatch]:
        """Returns the outputs of a batch, or of its part from `start` on; an item that fails alone gets the error."""
        return self._parts(batch, start) if batch.inputs else []

    def _parts(self, batch: Batch, start: int) -> list[GeneratedBatch]:
        items = batch.items
        rows = len(batch.items)
        if rows == 1 or self.too_large is None or rows * max(item.length for item in items) < self.too_large:
            generated = self._generate(batch, start)
            if isinstance(generated, GeneratedBatch):
                return [generated]
            if rows == 1:
                items[0].error = generated
                return []
        half = (rows + 1) // 2
        parts = []
        for first, some in ((0, items[:half]), (half, items[half:])):
            part = Batch(some, [], batch.number, inputs=self._task.collate(some), head=batch.head)
            parts += self._parts(part, start + first)
        return parts

    def _generate(self, part: Batch, start: int) -> GeneratedBatch | str:
        """Returns outputs, or the error in one line, so that the exception and what its traceback holds are freed."""
        if self._seed is not None:
            torch.manual_seed(batch_seed(self._seed, part.number, start))
        try:
            return self._task.generate(part)
        except Exception as error:  # a model may raise anything
            if not _device_works_sync():
                numbers = [item.line.number for item in part.items]
                lines = f"{min(numbers)} to {max(numbers)}"
                raise RunError(f"the device failed at lines {lines}: {reason(error)}") from error
            if not is_out_of_memory(error):
                logger.debug("generate raised for %d inputs", len(part.items), exc_info=True)
                return f"cannot be generated for ({reason(error)})"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows = len(part.items)
        longest = max(item.length for item in part.items)
        if rows > 1:
            self.too_large = min(rows * longest, self.too_large or rows * longest)
            many = f"{rows} inputs of length {longest}"
            self._say(f"out of memory with {many}: batches as large as that are split from here on")
        return f"out of memory even for this input alone (length {longest})"


def batch_seed(seed: int, batch: int, start: int = 0) -> int:
    """Returns the seed of a batch, from the run's seed and its number; start: the index of a part's first item."""
    digest = hashlib.sha256(f"{seed} {batch} {start}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host was out of memory, for any form of its allocator's error."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in OUT_OF_MEMORY)


def _device_works_sync() -> bool:
    """Whether the device still works: after some errors, such as an invalid index in a kernel, a GPU repeats them."""
    try:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class Pipeline:
    """Passes batches to a runner. Threads after it finish what was generated and call `write`, batch by batch.

    write: takes the items to write after a batch, and the amount generated for it. threads: their number. gives_up:
    whether to stop after several batches in which every item fails.
    """

    def __init__(
        self,
        runner: Runner,
        write: Callable[[list[Item], float], None],
        stop: Stop,
        threads: int = 1,
        gives_up: bool = True,
    ) -> None:
        self._runner, self._write, self._stop, self._gives_up = runner, write, stop, gives_up
        self._workers = ThreadPoolExecutor(threads, "fastgen-detokenize")
        self._most_unfinished = RESULTS_PER_WORKER * threads
        self._unfinished: deque[Future[None]] = deque()

    def run(self, batches: Ahead[Batch]) -> Iterator[None]:
        """Yields after each batch; after a request to stop, finishes the batch in flight and ends.

        Batches in which every item fails are held back until another one succeeds, because the cause may not be their
        lines. Raises RunError if there are several, which a resumed run generates again.
        """
        held: list[tuple[Batch, list[Any]]] = []
        failed: list[Item] = []  # the first item of each consecutive batch in which every line failed
        for batch, parts in self._runner.run(batches, self._stop):
            held.append((batch, parts))
            if any(item.error is None for item in batch.items) or not self._gives_up:
                failed.clear()
            else:
                failed += batch.items[:1]
            if batch.items and len(failed) >= MOST_FAILED_BATCHES and batch.ends_window:
                what = f"line {failed[0].line.number}: {failed[0].error}"
                raise RunError(f"every line of {len(failed)} batches failed; {what}")
            if not failed:
                self._submit(held)
            yield
        if not self._stop.requests:
            self._submit(held)

    def drain(self, prefetcher: Prefetcher) -> None:
        """Runs all batches; after an early end, raises KeyboardInterrupt once everything generated is written."""
        complete = False
        self._stop.is_patient = True
        try:
            for _ in self.run(prefetcher):
                pass
            complete = not self._stop.requests
        except KeyboardInterrupt:
            if self._stop.requests > 1:
                self.kill()
                raise
        except Exception:
            # Earlier outputs are complete, and must be written; this error is raised.
            with suppress(Exception):
                self.close()
            raise
        finally:
            prefetcher.stop()
        self.close()
        if not complete:
            raise KeyboardInterrupt

    def wait(self, most: int = 0) -> None:
        """Waits until at most `most` batches are unwritten; raises the first error in the order of batches."""
        while len(self._unfinished) > most:
            self._unfinished.popleft().result()

    def close(self) -> None:
        """Waits until everything is written; raises the first error."""
        self._stop.finishing = True
        try:
            self.wait()
        finally:
            self._stop.finishing = self._stop.is_patient = False
            self.kill()

    def kill(self) -> None:
        """Discards what is not written, without waiting."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        wait(self._unfinished, SECONDS_TO_END)

    def _submit(self, held: list[tuple[Batch, list[Any]]]) -> None:
        for batch, parts in held:
            previous = self._unfinished[-1] if self._unfinished else None
            self._unfinished.append(self._workers.submit(self._finish, batch, parts, previous))
            self.wait(self._most_unfinished)
        held.clear()

    def _finish(self, batch: Batch, parts: list[Any], previous: Future[None] | None) -> None:
        """Finishes and writes a batch after `previous`; writes nothing if that failed."""
        amount = sum(map(self._runner.finish, parts))
        if previous is not None:
            previous.result()
        self._write(_ready(batch), amount)
        for item in batch.items:  # copies may still need the outputs
            item.line = Line(item.line.number)
            item.arrays = None
            item.copies = []


def _ready(batch: Batch) -> list[Item]:
    """Returns the items to write after a batch: items that equal an unwritten one wait for that."""
    ready = []
    for item in (*batch.items, *batch.skipped):
        if item.first is not None and not item.first.is_written:
            item.first.copies.append(item)
        else:
            item.is_written = True
            ready += [item, *item.copies]
    for item in ready:
        if item.first is not None:
            item.outputs, item.error = item.first.outputs, item.first.error
    return ready
