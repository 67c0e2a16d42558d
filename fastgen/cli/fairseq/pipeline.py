"""fairseq-generate's own loop; worker processes print its batches beside the model (section 4.3 of FastSeq).

    fairseq_cli.generate._main          sees `GenerateRun` where it has its modules `tasks` and `scoring`
      task = tasks.setup_task(…)        forks the workers: the dictionaries are read then, and the model is not
      task.get_batch_iterator(…)        takes this shard's batches, and says which sentences fairseq leaves out
      for sample in …:
        task.inference_step(…)          hands the batch to a worker; the loop has no sentence left to print
      scoring.build_scorer(…)           the scorer gets pairs of texts in the order of the sentences
      print(scorer.result_string())     waits for the last of them

In a worker the same loop prints one batch after the other: there it sees `Postprocessor`, which has no model. With
--workers N it sees `Generator`, which has one: the first loop hands batches out before it comes to them, has no model
once it knows how long sentences may be, and waits in `inference_step` for what a worker has printed.

Tests: tests/cli/fairseq/test_cli_fairseq_output.py
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from io import BytesIO, StringIO
from typing import Any, TextIO

import numpy as np
import torch
from fairseq import scoring, tasks
from fairseq.data.iterators import CountingIterator, EpochBatchIterator
from fairseq_cli import generate as upstream

from fastgen.batch.errors import InputError
from fastgen.batch.threads import cpus_of_workers
from fastgen.cli.fairseq.command import say
from fastgen.cli.fairseq.workers import OrderedPool

UNFINISHED_BATCHES_PER_WORKER = 4
BATCHES_AHEAD_PER_WORKER = 2  # one at work, one that waits for it
GROUPS = ("common", "common_eval", "dataset", "generation", "checkpoint", "distributed_training")  # of flags
Loop = Callable[[Any, Any], Any]
Hypotheses = list[list[dict[str, Any]]]
Pair = tuple[Any, Any]  # what the scorer gets of a sentence: two texts, or two lists of tokens


def generate(cfg: Any, workers: int, models: int = 0) -> None:
    """Runs fairseq-generate; everything is written afterwards, or the first error is raised.

    workers: processes that print. models: processes that generate and print instead of them; 0: this one generates.
    """
    run = GeneratedElsewhere(cfg, models, Generator) if models else GenerateRun(cfg, workers, Postprocessor)
    names = {"tasks": run, "scoring": run, "_main": partial(run.main, upstream._main)}
    before = {name: getattr(upstream, name) for name in names}
    vars(upstream).update(names)
    try:
        upstream.main(cfg)
    finally:
        vars(upstream).update(before)


class GenerateRun:
    """One run: what fairseq-generate's loop calls in it, and what it hands on."""

    def __init__(self, cfg: Any, workers: int, worker: type[Postprocessor]) -> None:
        self.cfg, self.workers, self.worker = cfg, workers, worker
        self.generation = Namespace(**cfg.generation)  # omegaconf takes its time

    def main(self, loop: Loop, cfg: Any, file: TextIO) -> None:
        """fairseq-generate's loop."""
        self.loop, self.file = loop, file
        with ExitStack() as self.stack:
            loop(cfg, file)

    def setup_task(self, cfg: Any) -> Any:
        """The task, whose batches and hypotheses come by here; and the workers."""
        self.task = task = tasks.setup_task(cfg)
        start = partial(self.worker, self.workers, self.loop, self.cfg, task)
        limit = UNFINISHED_BATCHES_PER_WORKER * self.workers
        self.pool = self.stack.enter_context(OrderedPool(start, self.write, workers=self.workers, limit=limit))
        for handler in logging.getLogger().handlers:
            handler.addFilter(self.in_order)
            self.stack.callback(handler.removeFilter, self.in_order)
        task.get_batch_iterator = partial(self.get_batch_iterator, task.get_batch_iterator)
        task.inference_step = partial(self.inference_step, task.inference_step)
        return task

    def get_batch_iterator(self, original: Callable, *, num_shards: int, shard_id: int, **options: Any) -> Any:
        """The batches of this shard: of --num-shards, every one from --shard-id on."""
        shards, shard = self.cfg.dataset.num_shards, self.cfg.dataset.shard_id
        epoch = original(num_shards=num_shards * shards, shard_id=shard_id * shards + shard, **options)
        if type(epoch) is EpochBatchIterator:
            self._say_what_is_left_out(len(epoch.dataset), sum(map(len, epoch.frozen_batches)))
        return epoch

    def _say_what_is_left_out(self, size: int, batched: int) -> None:
        """Sentences that are too long, and a last batch that fills no multiple of sentences."""
        skips = self.cfg.dataset.skip_invalid_size_inputs_valid_test
        multiple = self.cfg.dataset.required_batch_size_multiple
        reasons = ["those that are too long (--skip-invalid-size-inputs-valid-test)"] * skips
        last = f"a last batch that is no multiple of {multiple} (--required-batch-size-multiple 1 keeps them)"
        reasons += [last] * (multiple > 1)
        message = f"fairseq leaves out {size - batched} of {size} sentences, {' and '.join(reasons)}"
        if batched < size and (skips or (size - batched) % multiple):  # a batch that was dropped is no multiple
            if not batched:
                raise InputError(f"DATA {self.cfg.task.data}: {message}")
            say(message)

    def inference_step(
        self, original: Callable, generator: Any, models: Any, sample: dict[str, Any], **options: Any
    ) -> Hypotheses:
        """The hypotheses of a batch, whose sentences are left to a worker."""
        hypos = original(generator, models, sample, **options)
        self.pool.submit(pack(sample, hypos, generator, self.generation))
        self._leave_to_worker(sample)
        return hypos

    def _leave_to_worker(self, sample: dict[str, Any]) -> None:
        sample.setdefault("nsentences", sample["id"].numel())
        # The loop looks at a sentence to learn that there is no target, and so no score; what it finds is not printed.
        self.cfg.common_eval.quiet = True
        sample["id"] = sample["id"][: sample["target"] is None]

    def write(self, result: tuple[str, list[Pair]]) -> None:
        """Called by the pool for each batch in order."""
        text, pairs = result
        self.file.write(text)
        self.file.flush()  # it survives whatever happens next
        for pair in pairs:
            if hasattr(self.scorer, "add_string"):
                self.scorer.add_string(*pair)
            else:
                self.scorer.add(*map(torch.IntTensor, pair))

    def in_order(self, record: logging.LogRecord) -> bool:
        """Logs may go where the lines go: they come behind those of the batches before."""
        if threading.current_thread() is threading.main_thread():
            self.pool.wait()
        return True

    def build_scorer(self, choice: Any, dictionary: Any) -> Any:
        """What the loop takes for the scorer: it asks for nothing but the result."""
        self.scorer = scoring.build_scorer(choice, dictionary)
        return self

    def result_string(self) -> str:
        """The score of all sentences."""
        self.pool.wait()
        return self.scorer.result_string()


class GeneratedElsewhere(GenerateRun):
    """A run whose workers have a model each. It has all batches, whatever --distributed-world-size says."""

    def setup_task(self, cfg: Any) -> Any:
        task = super().setup_task(cfg)
        task.build_generator = self.build_generator
        self.ahead: deque[dict[str, Any]] = deque()  # batches that workers have, and the loop has not
        self.tokens: deque[int] = deque()  # of the batches that are written, and the loop has not come to
        return task

    def get_batch_iterator(self, original: Callable, **options: Any) -> Any:
        epoch = super().get_batch_iterator(original, **options | {"num_shards": 1, "shard_id": 0})
        epoch.next_epoch_itr = partial(self.next_epoch_itr, epoch.next_epoch_itr)
        return epoch

    def next_epoch_itr(self, original: Callable, **options: Any) -> CountingIterator:
        """The batches, of which so many are ahead that no worker waits."""
        batches = original(**options)
        return CountingIterator(self._handed_out(batches), start=0, total=len(batches))

    def _handed_out(self, batches: Any) -> Iterator[dict[str, Any]]:
        for number, sample in enumerate(batches):
            if "net_input" in sample:
                self.pool.submit(_pickled((number, sample)))
            self.ahead.append(sample)
            if len(self.ahead) > BATCHES_AHEAD_PER_WORKER * self.workers:
                yield self.ahead.popleft()
        while self.ahead:
            yield self.ahead.popleft()

    def build_generator(self, models: list[Any], *unused: Any, **options: Any) -> Namespace:
        """What the loop asks for the symbols to strip; from here on it needs no model."""
        models.clear()
        return Namespace(eos=self.task.target_dictionary.eos())

    def inference_step(self, original: Callable, *args: Any, **options: Any) -> Hypotheses:
        sample = args[2]
        self.pool.wait(sum("net_input" in each for each in self.ahead))
        self._leave_to_worker(sample)
        return [
            [{"tokens": torch.full((self.tokens.popleft(),), self.task.target_dictionary.eos()), "alignment": None}]
        ]

    def write(self, result: tuple[Any, ...]) -> None:
        super().write(result[:2])
        self.tokens.append(result[2])


class _Pickler(pickle.Pickler):
    """Copies tensors of any dtype, which torch would put into shared memory, one file for each."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        data = value.detach().cpu().flatten().view(torch.uint8).numpy()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def pack(sample: dict[str, Any], hypos: Hypotheses, generator: Any, generation: Namespace) -> bytes:
    """What a worker needs of a batch. generation: the flags of that name."""
    source = sample["net_input"].get("src_tokens")
    inputs = {"src_tokens": source} if source is not None and source.dim() == 2 else {}  # no features of speech
    printed = [[_printed_fields(hypo, generation) for hypo in sentence[: generation.nbest]] for sentence in hypos]
    batch = {"id": sample["id"], "target": sample["target"], "net_input": inputs}
    return _pickled((batch, printed, set(upstream.get_symbols_to_strip_from_output(generator))))


def _printed_fields(hypo: dict[str, Any], generation: Namespace) -> dict[str, Any]:
    """The fields that the loop prints under these flags: others may be large, and a task's own cannot be pickled."""
    names = {"tokens", "score", "positional_scores", *["steps"] * generation.print_step}
    fields = {name: hypo[name] for name in names if name in hypo}
    if "alignment" in hypo:  # which the loop looks up in any case
        is_read = generation.print_alignment or generation.replace_unk is not None
        fields["alignment"] = hypo["alignment"] if is_read else None
    if generation.retain_iter_history and "history" in hypo:
        fields["history"] = [{"tokens": step["tokens"]} for step in hypo["history"]]
    return fields


def _pickled(value: Any) -> bytes:
    _Pickler(packed := BytesIO()).dump(value)
    return packed.getvalue()


class _Done(Exception):
    """There is no further batch: the loop ends, without what it prints behind the last one."""


class Postprocessor:
    """Turns a packed batch into the lines that `loop`, fairseq-generate's, prints of it, and into pairs for the scorer.

    The loop finds this object in the place of its task, models, batches, generator and scorer. Dictionaries grow by the
    words of the texts that are scored, as they do in fairseq-generate: a pair is compared within itself.
    """

    def __init__(self, count: int, loop: Loop, cfg: Any, task: Any, place: int) -> None:
        torch.set_num_threads(1)  # the cores belong to the model
        self._loop, self._task = loop, task
        groups = {name: Namespace(**cfg[name]) for name in GROUPS}
        groups["common"].cpu, groups["common"].seed, groups["common"].log_format = True, None, "none"
        groups["generation"].lm_path = None
        self._cfg = Namespace(**groups, task=None, tokenizer=None, bpe=None, scoring=None)
        self._tokenizer, self._bpe = task.build_tokenizer(cfg.tokenizer), task.build_bpe(cfg.bpe)
        if hasattr(scoring.build_scorer(cfg.scoring, task.target_dictionary), "add_string"):
            self.add_string = self.add
        if cfg.generation.replace_unk is not None:  # the loop prints texts as they were read
            task.load_dataset(cfg.dataset.gen_subset, task_cfg=cfg.task)
        vars(upstream).update(tasks=self, checkpoint_utils=self, scoring=self)

    def __call__(self, packed: bytes) -> tuple[str, list[Pair]]:
        """The lines, and a pair for each sentence with a target."""
        self._sample, self._hypos, self.symbols_to_strip_from_output = pickle.loads(packed)
        return self._printed()

    def _printed(self) -> tuple[str, list[Pair]]:
        self._pairs: list[Pair] = []
        with suppress(_Done):
            self._loop(self._cfg, lines := StringIO())
        return lines.getvalue(), self._pairs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield self._sample
        raise _Done

    def add(self, target: Any, hypothesis: Any) -> None:
        """Keeps a pair for the scorer."""
        self._pairs.append((target, hypothesis) if isinstance(target, str) else (target.tolist(), hypothesis.tolist()))

    def setup_task(self, *unused: Any, **options: Any) -> Any:
        """Itself, for whatever the loop sets up."""
        return self

    get_batch_iterator = next_epoch_itr = build_generator = build_scorer = setup_task

    def __getattr__(self, name: str) -> Any:  # what the loop asks the task for besides
        answers = {
            "load_model_ensemble": ([], self._cfg),
            "load_dataset": None,
            "dataset": self._task.datasets.get(self._cfg.dataset.gen_subset),
            "inference_step": self._hypos,
            "build_tokenizer": self._tokenizer,
            "build_bpe": self._bpe,
        }
        return (lambda *unused, **options: answers[name]) if name in answers else getattr(self._task, name)


class Generator(Postprocessor):
    """A Postprocessor with models of its own, on the CPUs of its place among `count`. Each batch has its seed."""

    def __init__(self, count: int, loop: Loop, cfg: Any, task: Any, place: int) -> None:
        cpus = cpus_of_workers(count)[place]
        if cpus:
            os.sched_setaffinity(0, cpus)
        threads = min(len(cpus) or 1, torch.get_num_threads())
        vars(upstream)["tasks"], before = Namespace(setup_task=lambda cfg: task), task.build_generator
        none = Namespace(next_epoch_itr=lambda **options: [])
        task.get_batch_iterator = lambda **options: none
        task.build_generator = partial(self._build_generator, before)
        with suppress(_Done):
            loop(cfg, StringIO())
        super().__init__(count, loop, cfg, task, place)
        torch.set_num_threads(threads)
        self.symbols_to_strip_from_output = set(upstream.get_symbols_to_strip_from_output(self._generator))
        self._hypos: Hypotheses = []  # are made where the loop asks for them
        self._seed = None if cfg.generation.no_seed_provided else cfg.common.seed

    def _build_generator(self, original: Callable, models: list[Any], *args: Any, **options: Any) -> Any:
        """The last that is needed of the loop that loads the models and prepares them."""
        self._models, self._generator = models, original(models, *args, **options)
        raise _Done

    def __call__(self, packed: bytes) -> tuple[Any, ...]:
        """The lines, a pair for each sentence with a target, and how many tokens there are."""
        number, self._sample = pickle.loads(packed)
        if self._seed is not None:
            torch.manual_seed(self._seed + number)
        return (*self._printed(), self._tokens)

    def inference_step(self, generator: Any, models: Any, sample: dict[str, Any], **options: Any) -> Hypotheses:
        """The hypotheses of a batch."""
        hypos = self._task.inference_step(self._generator, self._models, sample, **options)
        self._tokens = sum(len(sentence[0]["tokens"]) for sentence in hypos)
        return hypos
