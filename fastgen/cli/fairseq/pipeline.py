"""fairseq-generate's own loop, with the text made in worker processes while the model runs (§4.3 of FastSeq).

    fairseq_cli.generate._main          sees `Run` where it has its modules `tasks` and `scoring`
      task = tasks.setup_task(…)        forks the workers: the dictionaries are read then, and the model is not
      task.get_batch_iterator(…)        takes this shard's batches, and says which sentences fairseq leaves out
      for sample in …:
        task.inference_step(…)          hands the batch to a worker; the loop has no sentence left to print
      scoring.build_scorer(…)           the scorer gets pairs of texts in the order of the sentences
      print(scorer.result_string())     waits for the last of them

Tests: tests/cli/fairseq/test_cli_fairseq_output.py
"""

from __future__ import annotations

import contextlib
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TextIO

import torch
from fairseq import scoring, tasks
from fairseq.data.iterators import EpochBatchIterator
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq_cli import generate as upstream

from fastgen.cli.errors import InputError
from fastgen.cli.fairseq.command import say
from fastgen.cli.fairseq.postprocess import Postprocessor, to_host
from fastgen.cli.fairseq.workers import OrderedPool

UNFINISHED_BATCHES_PER_WORKER = 4
Hypotheses = list[list[dict[str, Any]]]


def generate(cfg: Any, workers: int) -> None:
    """Runs fairseq-generate; everything is written afterwards, or the first error is raised."""
    run = Run(cfg, workers)
    names = {"tasks": run, "scoring": run, "_main": partial(run.main, upstream._main)}
    before = {name: getattr(upstream, name) for name in names}
    vars(upstream).update(names)
    try:
        upstream.main(cfg)
    finally:
        vars(upstream).update(before)


class OrderedOutput:
    """A text stream over `file` whose writes take their place behind the tasks of a pool, as long as it has one."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self._pool: OrderedPool | None = None

    def write(self, text: str) -> int:
        """Writes `text` when everything that was submitted before it has been written."""
        if self._pool is None or self._pool.is_writing_here():
            return self.file.write(text)
        self._pool.put(text)
        return len(text)

    def flush(self) -> None:
        """Whatever waits for its turn is flushed when it is written."""
        if self._pool is None or self._pool.is_writing_here():
            self.file.flush()

    def __getattr__(self, name: str) -> object:
        """Everything else (isatty, encoding, fileno, …) is the file's."""
        return getattr(self.file, name)

    @contextmanager
    def behind(self, pool: OrderedPool) -> Iterator[None]:
        """Writes go behind the pool's tasks; so do prints and logs, where these go to the same file."""
        handlers = [each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler)]
        handlers = [handler for handler in handlers if handler.stream is self.file]
        stdout: Any = self if sys.stdout is self.file else sys.stdout
        self._pool = pool
        for handler in handlers:
            handler.setStream(self)
        try:
            with contextlib.redirect_stdout(stdout):
                yield
        finally:
            self._pool = None
            for handler in handlers:
                handler.setStream(self.file)


class Run:
    """One run: what fairseq-generate's loop calls in it, and what it hands on."""

    def __init__(self, cfg: Any, workers: int) -> None:
        self.cfg, self.workers = cfg, workers
        self.flags = Namespace(**cfg.generation, printed=not cfg.common_eval.quiet)  # omegaconf takes its time

    def main(self, original: Callable, cfg: Any, file: TextIO) -> None:
        """fairseq-generate's loop."""
        self.output = OrderedOutput(file)
        with ExitStack() as self.stack:
            original(cfg, self.output)

    def setup_task(self, cfg: Any) -> Any:
        """The task, whose batches and hypotheses come by here; and the workers."""
        self.task = task = tasks.setup_task(cfg)
        start, limit = partial(Postprocessor, self.cfg, task), UNFINISHED_BATCHES_PER_WORKER * self.workers
        self.pool = self.stack.enter_context(OrderedPool(start, self.write, workers=self.workers, limit=limit))
        self.stack.enter_context(self.output.behind(self.pool))
        task.get_batch_iterator = partial(self.get_batch_iterator, task.get_batch_iterator)
        task.inference_step = partial(self.inference_step, task.inference_step)
        # The workers have their own; a task that logs what it builds does it here, too, where logs have their order.
        for name in ("build_tokenizer", "build_bpe"):
            if getattr(type(task), name) is getattr(FairseqTask, name):
                setattr(task, name, lambda cfg: None)
        return task

    def get_batch_iterator(self, original: Callable, *, num_shards: int, shard_id: int, **options: Any) -> Any:
        """The batches of this shard: of --num-shards, every one from --shard-id on."""
        shards, shard = self.cfg.dataset.num_shards, self.cfg.dataset.shard_id
        epoch = original(num_shards=num_shards * shards, shard_id=shard_id * shards + shard, **options)
        if type(epoch) is EpochBatchIterator:
            self._look_for_left_out(epoch)
        return epoch

    def _look_for_left_out(self, epoch: EpochBatchIterator) -> None:
        """Says which sentences are missing: too long ones, and a last batch that fills no multiple of sentences."""
        dataset, size = self.cfg.dataset, len(epoch.dataset)
        left_out = size - sum(map(len, epoch.frozen_batches))
        skips, multiple = dataset.skip_invalid_size_inputs_valid_test, dataset.required_batch_size_multiple
        if not left_out or not (skips or left_out % multiple):  # a batch that was dropped is no multiple
            return
        reasons = ["those that are too long (--skip-invalid-size-inputs-valid-test)"] * skips
        last = f"a last batch that is no multiple of {multiple} (--required-batch-size-multiple 1 keeps them)"
        reasons += [last] * (multiple > 1)
        message = f"fairseq leaves out {left_out} of {size} sentences, {' and '.join(reasons)}"
        if left_out == size:
            raise InputError(f"DATA {self.cfg.task.data}: {message}")
        say(message)

    def inference_step(
        self, original: Callable, generator: Any, models: Any, sample: dict[str, Any], **options: Any
    ) -> Hypotheses:
        """The hypotheses of a batch, whose sentences are left to a worker."""
        hypos = original(generator, models, sample, **options)
        ignored = set(upstream.get_symbols_to_strip_from_output(generator))
        dataset = self.task.dataset(self.cfg.dataset.gen_subset)
        self.pool.submit(to_host(sample, hypos, self.flags, ignored, dataset))
        sample.setdefault("nsentences", sample["id"].numel())
        # The loop looks at a sentence to learn that there is no target, and so no score; what it finds is not printed.
        self.cfg.common_eval.quiet = True
        sample["id"] = sample["id"][: sample["target"] is None]
        return hypos

    def write(self, result: tuple[str, list[tuple[Any, Any]]] | str) -> None:
        """Called by the pool for each result in order: a worker's, or what was written by this process."""
        text, pairs = (result, []) if isinstance(result, str) else result
        self.output.file.write(text)
        self.output.file.flush()  # it survives whatever happens next
        for pair in pairs:
            if hasattr(self.scorer, "add_string"):
                self.scorer.add_string(*pair)
            else:
                self.scorer.add(*map(torch.IntTensor, pair))

    def build_scorer(self, choice: Any, dictionary: Any) -> Any:
        """What the loop takes for the scorer: it asks for nothing but the result."""
        self.scorer = scoring.build_scorer(choice, dictionary)
        return self

    def result_string(self) -> str:
        """The score of all sentences."""
        self.pool.wait()
        return self.scorer.result_string()
