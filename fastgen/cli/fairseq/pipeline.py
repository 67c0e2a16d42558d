"""fairseq-generate's own loop; worker processes print its batches beside the model (section 4.3 of FastSeq).

    fairseq_cli.generate._main          sees `Run` where it has its modules `tasks` and `scoring`
      task = tasks.setup_task(…)        forks the workers: the dictionaries are read then, and the model is not
      task.get_batch_iterator(…)        takes this shard's batches, and says which sentences fairseq leaves out
      for sample in …:
        task.inference_step(…)          hands the batch to a worker; the loop has no sentence left to print
      scoring.build_scorer(…)           the scorer gets pairs of texts in the order of the sentences
      print(scorer.result_string())     waits for the last of them

In a worker the same loop prints one batch after the other: there it sees `Postprocessor`, which has no model.

Tests: tests/cli/fairseq/test_cli_fairseq_output.py
"""

from __future__ import annotations

import logging
import pickle
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from io import BytesIO, StringIO
from typing import Any, TextIO

import torch
from fairseq import scoring, tasks
from fairseq.data.iterators import EpochBatchIterator
from fairseq_cli import generate as upstream

from fastgen.cli.errors import InputError
from fastgen.cli.fairseq.command import say
from fastgen.cli.fairseq.workers import OrderedPool

UNFINISHED_BATCHES_PER_WORKER = 4
GROUPS = ("common", "common_eval", "dataset", "generation", "checkpoint", "distributed_training")  # of flags
Loop = Callable[[Any, Any], Any]
Hypotheses = list[list[dict[str, Any]]]
Pair = tuple[Any, Any]  # what the scorer gets of a sentence: two texts, or two lists of tokens


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


class Run:
    """One run: what fairseq-generate's loop calls in it, and what it hands on."""

    def __init__(self, cfg: Any, workers: int) -> None:
        self.cfg, self.workers = cfg, workers
        self.generation = Namespace(**cfg.generation)  # omegaconf takes its time

    def main(self, loop: Loop, cfg: Any, file: TextIO) -> None:
        """fairseq-generate's loop."""
        self.loop, self.file = loop, file
        with ExitStack() as self.stack:
            loop(cfg, file)

    def setup_task(self, cfg: Any) -> Any:
        """The task, whose batches and hypotheses come by here; and the workers."""
        self.task = task = tasks.setup_task(cfg)
        start = partial(Postprocessor, self.loop, self.cfg, task)
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
        sample.setdefault("nsentences", sample["id"].numel())
        # The loop looks at a sentence to learn that there is no target, and so no score; what it finds is not printed.
        self.cfg.common_eval.quiet = True
        sample["id"] = sample["id"][: sample["target"] is None]
        return hypos

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


class _Pickler(pickle.Pickler):
    """Copies tensors, which torch would put into shared memory, one file for each."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.cpu().numpy(),)) if isinstance(value, torch.Tensor) else NotImplemented


def pack(sample: dict[str, Any], hypos: Hypotheses, generator: Any, generation: Namespace) -> bytes:
    """What a worker needs of a batch. generation: the flags of that name."""
    source = sample["net_input"].get("src_tokens")
    inputs = {"src_tokens": source} if source is not None and source.dim() == 2 else {}  # no features of speech
    unread = {"attention"} if generation.retain_iter_history else {"attention", "history"}  # which are large
    found = [
        [{name: hypo[name] for name in hypo if name not in unread} for hypo in sentence[: generation.nbest]]
        for sentence in hypos
    ]
    batch = {"id": sample["id"], "target": sample["target"], "net_input": inputs}
    _Pickler(packed := BytesIO()).dump((batch, found, set(upstream.get_symbols_to_strip_from_output(generator))))
    return packed.getvalue()


class _Done(Exception):
    """There is no further batch: the loop ends, without what it prints behind the last one."""


class Postprocessor:
    """Turns a packed batch into the lines that `loop`, fairseq-generate's, prints of it, and into pairs for the scorer.

    The loop finds this object in the place of its task, models, batches, generator and scorer. Dictionaries grow by the
    words of the texts that are scored, as they do in fairseq-generate: a pair is compared within itself.
    """

    def __init__(self, loop: Loop, cfg: Any, task: Any) -> None:
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
