"""TextGenerator: the pipeline of a run for Python objects, without files.

summarize = fastgen.TextGenerator("facebook/bart-large-cnn", beam=4, bs=16)
[record["outputs"][0]["text"] for record in summarize(articles)]

Tests: tests/batch/test_text_generator.py
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch

import fastgen
from fastgen.batch.config import OTHER_NAMES, BatchConfig, generation_fields, names_of
from fastgen.batch.errors import InputError, Stop, did_you_mean
from fastgen.batch.files import Line
from fastgen.batch.model import Loaded
from fastgen.batch.pipeline import Pipeline, Prefetcher, SplitOnOOM
from fastgen.batch.planner import Item
from fastgen.batch.records import fields_of
from fastgen.batch.task import task_for


class Column(list[Any]):
    """A column of records with a fixed Arrow type: in a batch that fails, for example, all outputs are empty lists.

    An engine takes the types of all batches from the first one. example: a value with all possible fields.
    """

    def __init__(self, values: Iterable[Any], example: Any) -> None:
        super().__init__(values)
        self.example = example

    def __arrow_array__(self, type: Any = None) -> Any:
        """Returns the column for pyarrow, which calls this method."""
        import pyarrow

        return pyarrow.array(list(self), type or pyarrow.infer_type([self.example]))


class TextGenerator:
    """Generates for many inputs with the command's pipeline: tokenizing, batching by length, recovering from errors.

    model: a local folder, a name on the hub, demo, or a model of transformers together with its `tokenizer`, which is
    copied. After a call, each module of this model is in training or evaluation mode as before.
    settings: the command's flags by name, except those of files, shards and workers (`beam=4`, `bs=16`,
    `task="speech-to-text"`, `causal_lm=True, chat=True`, …), and every field of GenerationConfig. With a `seed`, every
    call draws the same samples for the same inputs.

    Raises fastgen.batch.errors.InputError if a setting or the model cannot be used.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **settings: Any) -> None:
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        args = _config(model if isinstance(model, str) else "model", settings)
        self._text_field, self._task = args.text_field, task_for(args)
        loaded = None
        if not isinstance(model, str):
            if tokenizer is None:
                raise InputError("tokenizer: is missing (accepted: the tokenizer of the model)")
            # Padding, truncation and languages are set in the tokenizer.
            loaded = Loaded(self._task.args, model, copy.deepcopy(tokenizer))
        self._task.load(loaded)

    def __call__(self, inputs: Any) -> Any:
        """Returns a record for each input, in order.

        Records are {"input_tokens": 5, "outputs": [{"text": …, "tokens": 7}]}, or have an "error". inputs: texts, lists
        of messages with chat=True, or paths of audio files, strings or Path objects; anything else is that input's
        error. Columns are returned as a dictionary, with the records' fields as further columns; `text_field` names the
        column of inputs. They are a mapping, as passed by `datasets.map` (batched) and Ray Data's `map_batches`, a
        DataFrame, a table of pyarrow or a Dataset.
        """
        names = _columns(inputs)
        if names is None:
            return list(self.iterate(inputs))
        if self._text_field not in names:
            accepted = ", ".join(map(str, names))
            raise InputError(f"text_field={self._text_field!r} is not a column (accepted: {accepted})")
        columns = {name: inputs[name] for name in names}
        columns = {
            name: column.to_pylist() if hasattr(column, "to_pylist") else column for name, column in columns.items()
        }
        records = list(self.iterate(columns[self._text_field]))
        loaded = self._task.loaded
        output: dict[str, Any] = {"text": "", "tokens": 0}
        if loaded.settings.get("output_scores"):
            output["score"] = 0.0
        if loaded.model.config.model_type == "whisper":  # short recordings have no segments
            output["segments"] = [{"start": 0.0, "end": 0.0, "text": ""}]
        examples = {"input_tokens": 0, "outputs": [output], "error": ""}
        added = {name: Column((record.get(name) for record in records), example) for name, example in examples.items()}
        return {**columns, **added}

    def iterate(self, inputs: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yields the records of `inputs` in order while later inputs are processed; memory use does not grow."""
        if isinstance(inputs, (str, bytes)) or _columns(inputs) is not None:
            what = "one text" if isinstance(inputs, (str, bytes)) else "a table"
            raise TypeError(f"inputs is {what} (accepted: a list of texts, of lists of messages, or of paths)")
        args = self._task.args
        _, planner = self._task.notes()
        records: dict[int, dict[str, Any]] = {}
        number = 1

        def write(items: list[Item], amount: float) -> None:
            records.update((item.line.number, fields_of(item)) for item in items)

        generate = SplitOnOOM(self._task, lambda said: None, args.seed)
        pipeline = Pipeline(generate, write, Stop(), args.postprocess_workers, gives_up=False)
        chunks = _chunks(inputs, args.lines_at_once, takes_paths=args.reads is None)
        prefetcher = Prefetcher(chunks, self._task, planner)
        try:
            stock = fastgen.disabled if args.without_fastgen_opt else nullcontext
            batches = pipeline.run(prefetcher)
            is_over = False
            while not is_over:
                with stock(), _borrowed(self._task.loaded.model, args.seed):
                    is_over = next(batches, pipeline) is pipeline
                if is_over or prefetcher.is_waiting:
                    pipeline.wait()
                while number in records:
                    yield records.pop(number)
                    number += 1
        finally:
            prefetcher.stop()
            pipeline.kill()


def _config(model: str, settings: dict[str, Any]) -> BatchConfig:
    """Returns the settings of a run without files. Raises InputError for settings that it does not have."""
    names = names_of(python=True)
    of_generate = generation_fields()
    own: dict[str, Any] = {"gen": list(dict(settings.get("gen") or {}).items())}
    for name, value in settings.items():
        if (setting := OTHER_NAMES.get(name, name)) in names_of(python=False):
            raise InputError(f"{name}: is a flag of the command only")
        if setting in of_generate:
            own["gen"].append((setting, value))
        elif setting not in names:
            accepted = [*names, *of_generate, *OTHER_NAMES]
            raise InputError(f"{name}: there is no such setting{did_you_mean(name, accepted, 'see docs/commands.md')}")
        elif setting != "gen" and value is not None:
            own[setting] = value
    return BatchConfig(model, **own, input_format="jsonl", output_format="jsonl", quiet=True)


def _columns(inputs: Any) -> list[Any] | None:
    """Returns the names of the columns of a mapping, DataFrame, table or Dataset; None for a sequence of inputs."""
    names = inputs if isinstance(inputs, Mapping) else getattr(inputs, "column_names", getattr(inputs, "columns", None))
    return None if names is None else list(names)


@contextmanager
def _borrowed(model: Any, seed: int | None) -> Iterator[None]:
    """Puts a model in evaluation mode, and gives it and, with a seed, torch's random numbers back as they were."""
    modes = [(module, module.training) for module in model.modules()]
    trains = any(is_training for _, is_training in modes)
    devices = {weight.device for weight in model.parameters() if weight.is_cuda}
    with nullcontext() if seed is None else torch.random.fork_rng(devices):
        if trains:
            model.eval()
        try:
            yield
        finally:
            if trains:
                model.train(modes[0][1])
                for module, is_training in modes:
                    module.training = is_training


def _chunks(inputs: Iterable[Any], size: int, takes_paths: bool = True) -> Iterator[list[Line]]:
    """Yields each input as a line, `size` at a time."""
    numbered = enumerate(inputs, start=1)
    while chunk := list(islice(numbered, size)):
        yield [Line(number, value=_plain(value, takes_paths)) for number, value in chunk]


def _plain(value: Any, takes_paths: bool) -> Any:
    """Returns an element of a column of pyarrow or NumPy as a value of Python's, and a path as a string."""
    for convert in ("as_py", "tolist"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    return os.fspath(value) if takes_paths and isinstance(value, os.PathLike) else value
