"""The steps of fairseq-generate, with the text made and scored in worker processes while the model runs (§4.3).

This process loads and iterates, calls the model, and hands plain numbers on. The workers are forked before the model
is loaded: they start in milliseconds with fairseq imported and the dictionaries read, and never hold the model's
memory or a CUDA context. Loggers, their texts and the order of the steps are those of fairseq-generate.

Tests: tests/cli/fairseq/test_cli_fairseq_output.py
"""

from __future__ import annotations

import ast
import contextlib
import functools
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, TextIO

import numpy as np
import torch
from fairseq import checkpoint_utils, scoring, tasks, utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.logging import progress_bar
from fairseq.logging.meters import StopwatchMeter, TimeMeter
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq_cli.generate import get_symbols_to_strip_from_output

from fastgen.cli.errors import InputError
from fastgen.cli.fairseq import mistakes
from fastgen.cli.fairseq.command import say
from fastgen.cli.fairseq.hypotheses import Sentence, collect
from fastgen.cli.fairseq.postprocess import Postprocessor, add_part
from fastgen.cli.fairseq.workers import OrderedPool

logger = logging.getLogger("fairseq_cli.generate")

UNFINISHED_TASKS_PER_WORKER = 8
SMALLEST_TASK = 8  # sentences; below, sending them costs more than working on them together


def generate(cfg: Any, workers: int) -> None:
    """Runs fairseq-generate's steps into the standard output, or into the file of --results-path."""
    folder = cfg.common_eval.results_path
    if folder is None:
        _generate(cfg, sys.stdout, workers)
        return
    path = os.path.join(folder, f"generate-{cfg.dataset.gen_subset}.txt")
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"--results-path {folder}: {path} cannot be written ({error.strerror})") from error
    with file:
        _generate(cfg, file, workers)


def _generate(cfg: Any, file: TextIO, workers: int) -> None:
    output = OrderedOutput(file)
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=os.environ.get("LOGLEVEL", "INFO").upper(),
        stream=file,
    )
    utils.import_user_module(cfg.common)
    if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
        cfg.dataset.max_tokens = 12000
    logger.info(cfg)
    if cfg.common.seed is not None and not cfg.generation.no_seed_provided:
        np.random.seed(cfg.common.seed)
        utils.set_torch_seed(cfg.common.seed)

    task = tasks.setup_task(cfg.task)
    run = _Run(cfg, task, output)
    start = functools.partial(Postprocessor, cfg, task, run.src_dict, run.tgt_dict)
    limit = UNFINISHED_TASKS_PER_WORKER * workers
    with OrderedPool(start, run.write, workers=workers, limit=limit) as pool, output.instead_of_its_file():
        run.load()
        output.pool = pool
        run.all_batches(pool)
        pool.close()
        output.pool = None
        run.report()
        output.flush()


class OrderedOutput:
    """A text stream over `file` whose writes take their place behind the tasks of a pool, as long as it has one."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.pool: OrderedPool | None = None

    def write(self, text: str) -> int:
        """Writes `text` when everything that was submitted before it has been written."""
        if self._is_its_turn():
            return self.file.write(text)
        self.pool.put(text)
        return len(text)

    def flush(self) -> None:
        """Whatever waits for its turn is flushed when it is written."""
        if self._is_its_turn():
            self.file.flush()

    def _is_its_turn(self) -> bool:
        return self.pool is None or self.pool.is_writing_here()

    def __getattr__(self, name: str) -> object:
        """Everything else (isatty, encoding, fileno, …) is the file's."""
        return getattr(self.file, name)

    @contextmanager
    def instead_of_its_file(self) -> Iterator[None]:
        """Prints and log handlers that write into `file` write here, if `file` is the standard output."""
        if self.file is not sys.stdout:
            yield
            return
        handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
        handlers = [handler for handler in handlers if handler.stream is self.file]
        for handler in handlers:
            handler.setStream(self)
        try:
            with contextlib.redirect_stdout(self):
                yield
        finally:
            for handler in handlers:
                handler.setStream(self.file)


class _Run:
    """One run: what is loaded, and what is counted on the way."""

    def __init__(self, cfg: Any, task: FairseqTask, output: OrderedOutput) -> None:
        self.cfg = cfg
        self.task = task
        self.output = output
        try:
            self.src_dict = getattr(task, "source_dictionary", None)
        except NotImplementedError:
            self.src_dict = None
        self.tgt_dict = task.target_dictionary
        self.generation = Namespace(**cfg.generation)  # a batch looks at many of them, and omegaconf takes its time
        self.timer = StopwatchMeter()
        self.sentences = 0
        self.has_target = True

    def load(self) -> None:
        """Models, data, generator, and the scorer in which the workers' parts meet."""
        cfg = self.cfg
        self.use_cuda = torch.cuda.is_available() and not cfg.common.cpu
        self.models, language_model = self._load_models()
        self.batches = self._batches()
        self.generator = self.task.build_generator(
            self.models,
            cfg.generation,
            extra_gen_cls_kwargs={"lm_model": language_model, "lm_weight": cfg.generation.lm_weight},
        )
        self.ignored = set(get_symbols_to_strip_from_output(self.generator))
        # The workers have their own; a task that logs what it builds does it here, where logs have their order.
        if type(self.task).build_tokenizer is not FairseqTask.build_tokenizer:
            self.task.build_tokenizer(cfg.tokenizer)
        if type(self.task).build_bpe is not FairseqTask.build_bpe:
            self.task.build_bpe(cfg.bpe)
        self.scorer = scoring.build_scorer(cfg.scoring, self.tgt_dict)

    def _load_models(self) -> tuple[list[Any], Any]:
        """The ensemble and the language model of --lm-path, on their device and ready for generation."""
        cfg = self.cfg
        overrides = ast.literal_eval(cfg.common_eval.model_overrides)
        logger.info(f"loading model(s) from {cfg.common_eval.path}")
        models, saved_cfg = checkpoint_utils.load_model_ensemble(
            utils.split_paths(cfg.common_eval.path),
            arg_overrides=overrides,
            task=self.task,
            suffix=cfg.checkpoint.checkpoint_suffix,
            strict=cfg.checkpoint.checkpoint_shard_count == 1,
            num_shards=cfg.checkpoint.checkpoint_shard_count,
        )
        self.task.load_dataset(cfg.dataset.gen_subset, task_cfg=saved_cfg.task)
        language_model = None
        if cfg.generation.lm_path is not None:
            overrides["data"] = cfg.task.data
            try:
                (language_model,), _ = checkpoint_utils.load_model_ensemble(
                    [cfg.generation.lm_path], arg_overrides=overrides, task=None
                )
            except Exception as error:
                needed = f"its dictionary must be the target's and be in {cfg.task.data}"
                other = f"--lm-path {cfg.generation.lm_path}: cannot be loaded ({error}); {needed}"
                raise InputError(mistakes.of_checkpoint(cfg, error) or other) from error
        for model in models if language_model is None else [*models, language_model]:
            if cfg.common.fp16:
                model.half()
            if self.use_cuda and not cfg.distributed_training.pipeline_model_parallel:
                model.cuda()
            model.prepare_for_inference_(cfg)
        return models, language_model

    def _batches(self) -> Any:
        """The progress bar over the batches of this shard: of --num-shards, every one from --shard-id on."""
        cfg, dataset, distributed = self.cfg, self.cfg.dataset, self.cfg.distributed_training
        epoch = self.task.get_batch_iterator(
            dataset=self.task.dataset(dataset.gen_subset),
            max_tokens=dataset.max_tokens,
            max_sentences=dataset.batch_size,
            max_positions=utils.resolve_max_positions(
                self.task.max_positions(), *[model.max_positions() for model in self.models]
            ),
            ignore_invalid_inputs=dataset.skip_invalid_size_inputs_valid_test,
            required_batch_size_multiple=dataset.required_batch_size_multiple,
            seed=cfg.common.seed,
            num_shards=distributed.distributed_world_size * dataset.num_shards,
            shard_id=distributed.distributed_rank * dataset.num_shards + dataset.shard_id,
            num_workers=dataset.num_workers,
            data_buffer_size=dataset.data_buffer_size,
        )
        if type(epoch) is EpochBatchIterator:
            self._look_for_left_out(epoch)
        return progress_bar.progress_bar(
            epoch.next_epoch_itr(shuffle=False),
            log_format=cfg.common.log_format,
            log_interval=cfg.common.log_interval,
            default_log_format="simple" if cfg.common.no_progress_bar else "tqdm",
        )

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

    def all_batches(self, pool: OrderedPool) -> None:
        """Every batch through the model, and its numbers to the workers."""
        speed = TimeMeter()
        workers = len(pool.pids)
        for sample in self.batches:
            on_device = utils.move_to_cuda(sample) if self.use_cuda else sample
            if "net_input" not in sample:
                continue
            hypos, number_of_tokens = self._infer(on_device)
            sentences = self._sentences(sample, hypos)
            size = max(SMALLEST_TASK, -(-len(sentences) // workers))
            pool.submit(*((sentences[i : i + size], self.ignored) for i in range(0, len(sentences), size)))
            speed.update(number_of_tokens)
            self.batches.log({"wps": round(speed.avg)})
            self.sentences += sample["nsentences"] if "nsentences" in sample else sample["id"].numel()

    def _infer(self, sample: dict[str, Any]) -> tuple[list[list[dict[str, Any]]], int]:
        """The model's hypotheses, and how many tokens the best ones have."""
        size = self.generation.prefix_size
        self.timer.start()
        hypos = self.task.inference_step(
            self.generator,
            self.models,
            sample,
            prefix_tokens=sample["target"][:, :size] if size > 0 else None,
            constraints=sample.get("constraints"),
        )
        number_of_tokens = sum(len(sentence[0]["tokens"]) for sentence in hypos)
        self.timer.stop(number_of_tokens)
        return hypos, number_of_tokens

    def _sentences(self, sample: dict[str, Any], hypos: list[list[dict[str, Any]]]) -> list[Sentence]:
        """What is printed of a batch; `sample` is the one in the host's memory."""
        ids = sample["id"].tolist()
        source, target = sample["net_input"].get("src_tokens"), sample["target"]
        self.has_target = target is not None
        sources = repeat(None) if source is None or self.src_dict is None else source.numpy()
        targets = repeat(None) if target is None else target.numpy()
        originals = repeat(None) if self.generation.replace_unk is None else self._originals(ids)
        hypotheses = collect(hypos, self.generation, not self.cfg.common_eval.quiet)
        return list(map(Sentence, ids, sources, targets, originals, hypotheses))

    def _originals(self, ids: list[int]) -> list[tuple[str, str]]:
        dataset = self.task.dataset(self.cfg.dataset.gen_subset)
        return [(dataset.src.get_original_text(i), dataset.tgt.get_original_text(i)) for i in ids]

    def write(self, result: tuple[str, dict[str, Any]] | str) -> None:
        """Called by the pool for each result in order: a worker's, or what was written by this process."""
        text, part = (result, {}) if isinstance(result, str) else result
        self.output.write(text)
        self.output.flush()  # it survives whatever happens next
        add_part(self.scorer, part)

    def report(self) -> None:
        """The lines after the last batch."""
        cfg, timer = self.cfg, self.timer
        logger.info("NOTE: hypothesis and token scores are output in base 2")
        logger.info(
            f"Translated {self.sentences:,} sentences ({timer.n:,} tokens) in {timer.sum:.1f}s "
            f"({self.sentences / timer.sum:.2f} sentences/s, {1.0 / timer.avg:.2f} tokens/s)"
        )
        if not self.has_target:
            return
        if cfg.bpe and not cfg.generation.sacrebleu:
            logger.warning(_SPLIT_TEXT if cfg.common_eval.post_process else _SPLIT_BPE)
        result = f"Generate {cfg.dataset.gen_subset} with beam={cfg.generation.beam}: {self.scorer.result_string()}"
        print(result, file=self.output)


# What fairseq-generate warns of, word for word.
_SPLIT_TEXT = (
    "BLEU score is being computed by splitting detokenized string on spaces, this is probably not what you want. "
    "Use --sacrebleu for standard 13a BLEU tokenization"
)
_SPLIT_BPE = (
    "If you are using BPE on the target side, the BLEU score is computed on BPE tokens, not on proper words.  "
    "Use --sacrebleu for standard 13a BLEU tokenization"
)
