"""--workers N: N actors of Ray, each a process with its own model, generate the batches.

    Prefetcher → batch → Workers ┬→ Worker: collate, generate, finish ┬→ batch, amounts → Pipeline → journal
                                 └→ Worker …                          ┘

Ray schedules the workers, restarts crashed ones, and retries the loading of a model. This module decides about the
batch with which a worker crashed: the next idle worker tries it again, because Ray may not be able to restart the same
one. If that crashes, too, the batch is halved.

Tests: tests/batch/test_workers.py
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError, RunError, Stop, reason
from fastgen.batch.planner import Batch, Item
from fastgen.batch.task import Task, task_for
from fastgen.batch.threads import keep_freed_memory, threads_per_worker, usable_cpus

if TYPE_CHECKING:
    from fastgen.batch.pipeline import Ahead

CPUS_PER_WORKER = 4  # --workers auto, on CPUs
MOST_RESTARTS = 10  # of a worker, which is left out afterwards
SECONDS_BETWEEN_LOOKS = 0.05  # for another batch, while a worker is idle
SECONDS_BETWEEN_CHECKS = 2.0  # whether Ray is alive
SECONDS_WITHOUT_RAY = 30.0  # its head may come back; after 60 seconds Ray ends the process
SECONDS_TO_CONNECT = 10.0


class Worker:
    """A process with a model. threads: the number of torch's threads; 0 leaves it to Ray."""

    def __init__(self, args: BatchConfig, threads: int) -> None:
        self._args = args
        if threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray has set it to 1; torch reads it at its import

    def load(self) -> BatchConfig:
        """Returns the flags with the sizes of batches. Raises InputError if MODEL does not support the settings."""
        if hasattr(self, "_task"):  # its device has failed, or Ray had lost the process
            os._exit(1)  # Ray starts another process, which tries again
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        keep_freed_memory()
        import fastgen
        from fastgen.batch.pipeline import SplitOnOOM

        fastgen.enable()
        fastgen.configure(repeatable=True)
        if self._args.without_fastgen_opt:
            fastgen.disable()
        task = task_for(self._args)
        task.load()
        self._messages: list[str] = []
        self._task, self._generate = task, SplitOnOOM(task, self._messages.append, self._args.seed)
        return task.args

    def generate(self, batch: Batch, start: int) -> tuple[list[tuple[Any, str | None]], float, list[str]]:
        """Returns outputs and error of each item, the amount generated, and lines for stderr: see SplitOnOOM."""
        self._messages.clear()
        batch.inputs = self._task.collate(batch.items)
        amount = sum(map(self._task.finish, self._generate(batch, start)))
        return [(item.outputs, item.error) for item in batch.items], amount, self._messages


@dataclass
class Job:
    """A batch that one worker at a time processes: the remaining ranges of its items, and the amounts generated."""

    batch: Batch
    ranges: list[tuple[int, int]]
    amounts: list[float] = field(default_factory=list)
    was_retried: bool = False

    @property
    def items(self) -> list[Item]:
        """The items of the first range."""
        return self.batch.items[slice(*self.ranges[0])]

    def retry(self, why: str) -> None:
        """Handles the first range, with which a worker crashed: the same again, two halves, or an error."""
        start, stop = self.ranges[0]
        if not self.was_retried:
            self.was_retried = True
        elif stop - start > 1:
            middle = (start + stop + 1) // 2
            self.ranges[:1] = [(start, middle), (middle, stop)]
        else:
            self.items[0].error = f"crashes every worker that generates for it ({why})"
            self.ranges.pop(0)


class Workers:
    """The driver's side, a `Runner`. threads, gpus: of each worker; 0 threads lets Ray choose. say: prints problems."""

    collates = False
    finish = float  # a part is the amount that a worker has generated and finished

    def __init__(self, args: BatchConfig, count: int, threads: int, gpus: int, say: Callable[[str], None]) -> None:
        self.args = args  # after a worker's first answer, with the sizes of batches that it has chosen
        self._say = say
        self._inputs = [0] * count  # finished inputs of each worker
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": MOST_RESTARTS, "max_task_retries": -1}
        actor: Any = ray.remote(**options)(Worker)
        self._workers = [actor.remote(args, threads) for _ in range(count)]
        self._idle: deque[int] = deque()  # indices into _workers
        self._loading = {worker.load.remote(): index for index, worker in enumerate(self._workers)}
        self._generating: dict[Any, tuple[int, Job]] = {}
        self._jobs: deque[Job] = deque()  # for the next idle workers
        self._ray_was_alive = time.monotonic()

    def load(self, task: Task) -> None:
        """Loads the task without weights, and waits until a worker has its model and has chosen batch sizes."""
        task.load(has_weights=False)
        while not self._idle:
            self._receive(SECONDS_BETWEEN_CHECKS)
        args = replace(task.args, bs=self.args.bs, batch_tokens=self.args.batch_tokens)
        task.args = task.loaded.args = args

    def run(self, batches: Ahead[Batch], stop: Stop) -> Iterator[tuple[Batch, list[float]]]:
        """Yields each batch with the amounts generated for it, in any order; after a stop, batches in flight finish."""
        self._begun = time.perf_counter()
        planned = iter(batches)
        more = True
        while more or self._jobs or self._generating:
            if self._idle and self._jobs:
                index, job = self._idle.popleft(), self._jobs.popleft()
                part = Batch(job.items, [], job.batch.number, head=job.batch.head)
                generate = self._workers[index].generate.options(max_task_retries=0)
                self._generating[generate.remote(part, job.ranges[0][0])] = index, job
            elif self._idle and more and not (self._generating and batches.is_waiting):
                stop.finishing = bool(self._generating)
                batch = next(planned, None)
                stop.finishing = True
                if batch is None:
                    more = False
                elif batch.items:
                    self._jobs.append(Job(batch, [(0, len(batch.items))]))
                else:
                    yield batch, []
            else:
                answered = self._receive(SECONDS_BETWEEN_LOOKS if more and self._idle else SECONDS_BETWEEN_CHECKS)
                if answered is not None and answered.ranges:
                    self._jobs.appendleft(answered)
                elif answered is not None:
                    yield answered.batch, answered.amounts
            if stop.requests:
                more = False
                self._jobs.clear()  # incomplete batches are not written

    def rates(self) -> str:
        """Returns each worker's inputs per second."""
        seconds = time.perf_counter() - self._begun
        return "".join(f", worker {index} {inputs / seconds:.1f}" for index, inputs in enumerate(self._inputs))

    def _receive(self, seconds: float) -> Job | None:
        """Waits `seconds` for the next answer of a worker, and returns its job, or None if it was loading."""
        answers, _ = ray.wait([*self._loading, *self._generating], timeout=seconds)
        if not answers:
            self._check_ray()
        elif answers[0] in self._generating:
            return self._generated(answers[0])
        else:
            self._loaded(answers[0])
        return None

    def _check_ray(self) -> None:
        """Raises RunError if Ray's head does not come back, or all nodes are dead, for which Ray would wait."""
        now = time.monotonic()
        if now < self._ray_was_alive + SECONDS_BETWEEN_CHECKS:
            return
        if _no_answer(ray.get_runtime_context().gcs_address):
            has_ended = now > self._ray_was_alive + SECONDS_WITHOUT_RAY
        else:
            has_ended = not any(node["Alive"] for node in ray.nodes())
            self._ray_was_alive = now
        if has_ended:
            raise RunError("Ray's processes have ended")

    def _loaded(self, answer: Any) -> None:
        """Leaves out a worker without a model; raises its error if there is no other worker."""
        index = self._loading.pop(answer)
        try:
            self.args = ray.get(answer)
            self._idle.append(index)
        except RayError as error:
            cause = _cause(error)
            ray.kill(self._workers[index])
            if not (self._idle or self._loading or self._generating):
                raise cause if isinstance(cause, InputError) else RunError(f"no worker is left: {cause}") from None
            self._say(f"worker {index} is left out: {cause}")

    def _generated(self, answer: Any) -> Job:
        """Handles a worker's outputs, or its crash."""
        index, job = self._generating.pop(answer)
        try:
            outputs, amount, messages = ray.get(answer)
        except RayError as error:
            cause = _cause(error)
            if not isinstance(cause, RunError):
                raise cause from None
            self._loading[self._workers[index].load.remote()] = index
            numbers = [item.line.number for item in job.items]
            self._say(f"worker {index} crashed at lines {min(numbers)} to {max(numbers)} ({cause})")
            job.retry(str(cause))
            return job
        for message in messages:
            self._say(f"worker {index}: {message}")
        for item, (texts, why) in zip(job.items, outputs, strict=True):
            item.outputs, item.error = texts, why
        job.ranges.pop(0)
        job.amounts.append(amount)
        self._inputs[index] += len(outputs)
        self._idle.append(index)
        return job


def _cause(error: RayError) -> Exception:
    """Returns the error that a worker raised, or Ray's own, such as ActorUnavailableError or OutOfMemoryError."""
    return error.cause if isinstance(error, RayTaskError) else RunError(type(error).__name__)


@contextmanager
def started(args: BatchConfig, stop: Stop, say: Callable[[str], None]) -> Iterator[Workers]:
    """Yields workers that load their models, in a Ray for this run only or in the cluster of --ray."""
    if args.device not in (None, "cpu", "cuda"):
        accepted = "accepted: cuda, a GPU for each, or cpu"
        raise InputError(f"{args.setting('device')} does not go with {args.named('workers')} ({accepted})")
    options: dict[str, Any] = {"address": args.ray, "logging_level": logging.ERROR, "log_to_driver": False}
    if args.ray is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's default, 15, a model waits for everything else
        cpus = usable_cpus() if args.workers == "auto" else args.workers
        options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    elif why := _no_answer(args.ray):
        raise RunError(f"{args.setting('ray')}: nothing answers there ({why})")
    stop.is_patient = True  # ending Ray takes seconds if its start is interrupted
    # In another thread Ray does not replace Python's signal handlers. Its processes end with that thread.
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(ray.init, **options)
        try:
            import_module("transformers.generation.utils")
            try:
                starting.result()
            except Exception as error:  # also a plain Exception, if its processes do not answer in time
                raise RunError(f"Ray does not start ({reason(error)})") from error
            finally:
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # replaces the handler of Ray's core
            gpus = int(ray.cluster_resources().get("GPU", 0)) if args.device in (None, "cuda") else 0
            count = count_workers(args, gpus)
            threads = threads_per_worker(count) if args.ray is None else 0
            args = replace(args, output=os.path.abspath(args.output), quiet=True)  # workers write sounds
            stop.is_patient = False
            yield Workers(args, count, threads, int(gpus > 0), say)
        finally:
            wait([starting])
            ray.shutdown()


def count_workers(args: BatchConfig, gpus: int) -> int:
    """Returns N of --workers; `auto` is one per GPU, or one per CPUS_PER_WORKER CPUs of this machine."""
    if args.workers != "auto":
        return int(args.workers)
    if args.ray is not None and not gpus:
        accepted = f"accepted with {args.named('ray')}: a number"
        raise InputError(f"{args.setting('workers')} counts the GPUs of a cluster, and it has none ({accepted})")
    return gpus or max(1, usable_cpus() // CPUS_PER_WORKER)


def _no_answer(address: str) -> str:
    """Returns why nothing answers at HOST:PORT, for which Ray would wait minutes; empty if something does."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_CONNECT).close()
        except (OSError, OverflowError) as error:
            return reason(error)
    return ""
