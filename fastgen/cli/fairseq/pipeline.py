"""Generation by a task of fairseq: this process runs the model, worker processes write lines (section 4.3 of FastSeq).

    Generation.run
      task.inference_step(…)     the hypotheses of a batch
      Printer.sentences(…)       the same without tensors, for a worker
        Workers.submit(…)        hands them to a process
          Printer.lines(…)       there: the lines of the batch, and pairs of a target and a hypothesis
      Generation.write(…)        here, in the order of the batches: lines to the file, pairs to the scorer

The workers are forked after everything is loaded, and so inherit the dictionaries.

Tests: tests/cli/fairseq/test_cli_fairseq_output.py, tests/cli/fairseq/test_cli_fairseq_ends.py,
tests/cli/fairseq/test_cli_fairseq_workers.py
"""

from __future__ import annotations

import ast
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, suppress
from multiprocessing import get_all_start_methods, get_context
from typing import Any, TextIO

import numpy as np
import torch
from fairseq import checkpoint_utils, scoring, tasks, utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.logging.meters import TimeMeter
from fairseq.logging.progress_bar import progress_bar
from fairseq.scoring.bleu import Scorer

from fastgen.batch.errors import InputError, RunError, reason
from fastgen.cli.fairseq.command import say
from fastgen.cli.fairseq.printer import Pair, Printer, Sentence

DEFAULT_MAX_TOKENS = 12000
UNFINISHED_BATCHES_PER_WORKER = 4
SECONDS_BETWEEN_LOOKS = 1.0

# The same name and texts as in fairseq-generate's logs, for programs that read these.
logger = logging.getLogger("fairseq_cli.generate")
SCORED_PIECES = (
    "If you are using BPE on the target side, the BLEU score is computed on BPE tokens, not on proper words.  "
    "Use --sacrebleu for standard 13a BLEU tokenization"
)
SCORED_WORDS = (
    "BLEU score is being computed by splitting detokenized string on spaces, this is probably not what you want. "
    "Use --sacrebleu for standard 13a BLEU tokenization"
)


def generate(cfg: Any, workers: int) -> None:
    """Writes what fairseq-generate writes; `workers` processes create the lines, or this one if that is 0."""
    folder = cfg.common_eval.results_path
    if folder is None:
        Generation(cfg, sys.stdout).run(workers)
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"generate-{cfg.dataset.gen_subset}.txt"), "w", encoding="utf-8") as file:
        Generation(cfg, file).run(workers)


class Generation:
    """One run: the objects that fairseq creates from the flags, and the file for the lines."""

    def __init__(self, cfg: Any, file: TextIO) -> None:
        self.cfg, self.file = cfg, file
        utils.import_user_module(cfg.common)
        if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
            cfg.dataset.max_tokens = DEFAULT_MAX_TOKENS
        logger.info(cfg)
        if cfg.common.seed is not None and not cfg.generation.no_seed_provided:
            np.random.seed(cfg.common.seed)
            utils.set_torch_seed(cfg.common.seed)
        self.has_gpu = torch.cuda.is_available() and not cfg.common.cpu
        self.task = tasks.setup_task(cfg.task)
        self.models, language_model = self._load()
        self.batches = self._batches()
        options = {"lm_model": language_model, "lm_weight": cfg.generation.lm_weight}
        self.generator = self.task.build_generator(self.models, cfg.generation, extra_gen_cls_kwargs=options)
        self.scorer = scoring.build_scorer(cfg.scoring, self.task.target_dictionary)
        self.printer = Printer(cfg, self.task, self.generator, self.scorer)

    def _load(self) -> tuple[list[Any], Any]:
        """Returns the models of --path, and --lm-path's or None; loads the data with the checkpoint's settings."""
        cfg = self.cfg
        language_model = None
        overrides = ast.literal_eval(cfg.common_eval.model_overrides)
        logger.info(f"loading model(s) from {cfg.common_eval.path}")
        models, saved = checkpoint_utils.load_model_ensemble(
            utils.split_paths(cfg.common_eval.path),
            arg_overrides=overrides,
            task=self.task,
            suffix=cfg.checkpoint.checkpoint_suffix,
            strict=cfg.checkpoint.checkpoint_shard_count == 1,
            num_shards=cfg.checkpoint.checkpoint_shard_count,
        )
        self.task.load_dataset(cfg.dataset.gen_subset, task_cfg=saved.task)
        if path := cfg.generation.lm_path:
            overrides |= {"data": cfg.task.data}
            (language_model,), _ = checkpoint_utils.load_model_ensemble([path], arg_overrides=overrides)
        for model in models if language_model is None else [*models, language_model]:
            if cfg.common.fp16:
                model.half()
            if self.has_gpu and not cfg.distributed_training.pipeline_model_parallel:
                model.cuda()
            model.prepare_for_inference_(cfg)
        return models, language_model

    def _batches(self) -> Any:
        """Returns a progress bar over the batches of this shard, `--shard-id` of `--num-shards`."""
        common, data, ranks = self.cfg.common, self.cfg.dataset, self.cfg.distributed_training
        positions = [self.task.max_positions(), *(model.max_positions() for model in self.models)]
        epoch = self.task.get_batch_iterator(
            dataset=self.task.dataset(data.gen_subset),
            max_tokens=data.max_tokens,
            max_sentences=data.batch_size,
            max_positions=utils.resolve_max_positions(*positions),
            ignore_invalid_inputs=data.skip_invalid_size_inputs_valid_test,
            required_batch_size_multiple=data.required_batch_size_multiple,
            seed=common.seed,
            num_shards=ranks.distributed_world_size * data.num_shards,
            shard_id=ranks.distributed_rank * data.num_shards + data.shard_id,
            num_workers=data.num_workers,
            data_buffer_size=data.data_buffer_size,
        )
        if type(epoch) is EpochBatchIterator:
            self._say_what_is_left_out(len(epoch.dataset), sum(map(len, epoch.frozen_batches)))
        return progress_bar(
            epoch.next_epoch_itr(shuffle=False),
            log_format=common.log_format,
            log_interval=common.log_interval,
            default_log_format="simple" if common.no_progress_bar else "tqdm",
        )

    def _say_what_is_left_out(self, size: int, batched: int) -> None:
        """Reports how many sentences fairseq leaves out: too long ones, and those of an incomplete last batch."""
        skips = self.cfg.dataset.skip_invalid_size_inputs_valid_test
        multiple = self.cfg.dataset.required_batch_size_multiple
        reasons = ["those that are too long (--skip-invalid-size-inputs-valid-test)"] * skips
        last = f"a last batch that is not a multiple of {multiple} (--required-batch-size-multiple 1 keeps them)"
        reasons += [last] * (multiple > 1)
        message = f"fairseq leaves out {size - batched} of {size} sentences, {' and '.join(reasons)}"
        if batched < size and (skips or (size - batched) % multiple):  # a dropped batch alone is not a multiple
            if not batched:
                raise InputError(f"DATA {self.cfg.task.data}: {message}")
            say(message)

    def run(self, count: int) -> None:
        """Generates and writes everything; `count` worker processes create the lines."""
        if count and (why := self._why_in_between()):
            say(f"without --postprocess-workers: {why}")
            count = 0
        has_targets, sentences, tokens, seconds = False, 0, 0, 0.0
        speed = TimeMeter()
        prefix_size = self.cfg.generation.prefix_size
        log_interval = self.cfg.common.log_interval
        with Workers(self.printer, self.write, count) as workers:
            for number, sample in enumerate(self.batches):
                if "net_input" not in sample:  # a shard with one batch less than other shards
                    continue
                sample = utils.move_to_cuda(sample) if self.has_gpu else sample
                has_targets = sample["target"] is not None
                start = time.perf_counter()
                hypos = self.task.inference_step(
                    self.generator,
                    self.models,
                    sample,
                    prefix_tokens=sample["target"][:, :prefix_size] if prefix_size > 0 else None,
                    constraints=sample.get("constraints"),
                )
                batch_tokens = sum(len(best["tokens"]) for best, *_ in hypos)
                seconds += time.perf_counter() - start
                workers.submit(self.printer.sentences(sample, hypos))
                sentences += sample["nsentences"] if "nsentences" in sample else sample["id"].numel()
                tokens += batch_tokens
                speed.update(batch_tokens)
                if log_interval and number % log_interval == 0:
                    workers.wait()  # a log line must come after the lines before it, if both go to the same stream
                self.batches.log({"wps": round(speed.avg)})
        logger.info("NOTE: hypothesis and token scores are output in base 2")
        rates = (total / seconds if seconds else 0.0 for total in (sentences, tokens))
        speeds = "{:.2f} sentences/s, {:.2f} tokens/s".format(*rates)
        logger.info(f"Translated {sentences:,} sentences ({tokens:,} tokens) in {seconds:.1f}s ({speeds})")
        if has_targets:
            self._write_score()

    def _why_in_between(self) -> str:
        """Returns why other processes cannot create the lines; "" if they can."""
        if "fork" not in get_all_start_methods():
            return f"processes cannot be forked on {sys.platform}"
        if type(self.scorer) is Scorer or hasattr(self.scorer, "add_string"):
            return ""
        name = getattr(self.cfg.scoring, "_name", self.cfg.scoring)
        return f"--scoring {name} compares token numbers (supported: bleu, and scorers that compare strings)"

    def write(self, result: tuple[str, list[Pair]]) -> None:
        """Writes the lines of a batch, and scores its pairs; called in the order of the batches."""
        lines, pairs = result
        self.file.write(lines)
        self.file.flush()  # so that nothing is lost in a crash
        for pair in pairs:
            if hasattr(self.scorer, "add_string"):
                self.scorer.add_string(*pair)
            else:
                self.scorer.add(*map(torch.IntTensor, pair))

    def _write_score(self) -> None:
        cfg = self.cfg
        if cfg.bpe and not cfg.generation.sacrebleu:
            logger.warning(SCORED_WORDS if cfg.common_eval.post_process else SCORED_PIECES)
        score = self.scorer.result_string()
        print(f"Generate {cfg.dataset.gen_subset} with beam={cfg.generation.beam}: {score}", file=self.file)


class Workers(AbstractContextManager):
    """A pool of `count` processes that turn batches into lines and pairs; `write` gets them in the order of batches.

    The thread that calls `submit` and `wait` also calls `write`; without a process, immediately in `submit`.
    """

    def __init__(self, printer: Printer, write: Callable[[Any], None], count: int) -> None:
        self._printer, self._write = printer, write
        self._pool: ProcessPoolExecutor | None = None
        self._unfinished: deque[Future[Any]] = deque()
        self._limit = UNFINISHED_BATCHES_PER_WORKER * count
        if count:
            self._pool = ProcessPoolExecutor(count, get_context("fork"), _begin_worker, (printer, os.getpid()))
            self._pool.submit(int)  # the first task forks them all

    def submit(self, batch: list[Sentence]) -> None:
        """Passes a batch to a process; raises earlier errors of processes or of `write`."""
        if self._pool is None:
            self._write(self._printer.lines(batch))
        else:
            self._unfinished.append(self._pool.submit(_lines_in_worker, batch))
            self.wait(self._limit)

    def wait(self, most: int = 0) -> None:
        """Writes finished batches until at most `most` are unfinished; raises the first error in their order."""
        try:
            while self._unfinished and (len(self._unfinished) > most or self._unfinished[0].done()):
                self._write(self._unfinished.popleft().result())
        except BaseException:
            self._unfinished.clear()  # nothing is written after a failed batch
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Waits like `wait`, but not after an interruption, or an error of a worker or of `write`."""
        try:
            if kind is None:
                self.wait()
            elif issubclass(kind, Exception):
                with suppress(Exception):  # the caller's own error is raised
                    self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)


_printer: Printer  # in a worker process


def _begin_worker(printer: Printer, parent: int) -> None:
    """Prepares a forked process, which inherits the printer instead of a pickled copy."""
    global _printer
    _printer = printer
    gc.freeze()  # a collection would write into every inherited object, and so copy its page
    torch.set_num_threads(1)  # the cores belong to the model
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    # Warnings and prints of libraries must not mix with the lines.
    sys.stdout = sys.stderr
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING, force=True)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _lines_in_worker(batch: list[Sentence]) -> tuple[str, list[Pair]]:
    try:
        return _printer.lines(batch)
    except Exception as error:
        raise RunError(f"in a worker process: {reason(error)}") from error


def _end_with(parent: int) -> None:
    """Ends this process, whatever it is doing, when the parent has ended for any reason."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
