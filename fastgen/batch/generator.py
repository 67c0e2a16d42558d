"""TextGenerator: the pipeline of a run for inputs of Python, without files.

summarize = fastgen.TextGenerator("facebook/bart-large-cnn", beam=4, bs=16)
[record["outputs"][0]["text"] for record in summarize(articles)]

Tests: tests/batch/test_text_generator.py
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import fastgen
from fastgen.batch.config import OTHER_NAMES, BatchConfig, generation_fields, settings_of_run
from fastgen.batch.errors import InputError, Stop, did_you_mean
from fastgen.batch.files import Line
from fastgen.batch.model import Loaded
from fastgen.batch.pipeline import Pipeline, Prefetcher, SplitOnOOM
from fastgen.batch.planner import Item
from fastgen.batch.records import fields_of
from fastgen.batch.task import task_for

# Flags of files, formats, shards and workers, which only the command has.
OF_FILES = (
    *("model", "input", "output", "resume", "overwrite", "retry_failed", "n_obs", "reference_path"),
    *("reference_field", "score_path", "workers", "ray", "verbose", "num_shards", "shard_id", "merge"),
    *("input_format", "output_format", "id_field", "join_outputs", "output_sequence_scores", "generation_config"),
)


class Column(list[Any]):
    """A column of records, to Arrow of one type whatever is in it: in a batch that fails all outputs are empty lists.

    An engine takes the types of all batches from the first. example: a value with all that a value may have.
    """

    def __init__(self, values: Iterable[Any], example: Any) -> None:
        super().__init__(values)
        self.example = example

    def __arrow_array__(self, type: Any = None) -> Any:
        """Returns the column for pyarrow, which asks for it by this name."""
        import pyarrow

        return pyarrow.array(list(self), type or pyarrow.infer_type([self.example]))


class TextGenerator:
    """Generates for many inputs with the command's pipeline: tokenising, batching by length, recovering from errors.

    model: a local folder, a name on the hub, demo, or a model of transformers together with its `tokenizer`.
    settings: the command's flags by name, except OF_FILES (`beam=4`, `bs=16`, `task="speech-to-text"`,
    `causal_lm=True, chat=True`, …), and every field of GenerationConfig. With a `seed`, every call draws the same
    samples for the same inputs.

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
            loaded = Loaded(self._task.args, model.eval(), tokenizer)
        fastgen.enable()
        self._task.load(loaded)

    def __call__(self, inputs: Sequence[Any] | Mapping[str, Sequence[Any]]) -> Any:
        """Returns a record for each input, in order.

        These are {"input_tokens": 5, "outputs": [{"text": …, "tokens": 7}]}, or have an "error". inputs: texts, lists
        of messages with chat=True, or paths of audio files, strings or Path objects; anything else is that input's
        error. Columns, as `datasets.map` (batched) and Ray Data's `map_batches` pass them, come back with these as
        further ones; `text_field` names the inputs.
        """
        if not isinstance(inputs, Mapping):
            return list(self.iterate(inputs))
        if self._text_field not in inputs:
            raise InputError(f"text_field={self._text_field!r} is no column (accepted: {', '.join(inputs)})")
        records = list(self.iterate(inputs[self._text_field]))
        loaded = self._task.loaded
        output: dict[str, Any] = {"text": "", "tokens": 0}
        if loaded.settings.get("output_scores"):
            output["score"] = 0.0
        if loaded.model.config.model_type == "whisper":  # short recordings have none
            output["segments"] = [{"start": 0.0, "end": 0.0, "text": ""}]
        examples = {"input_tokens": 0, "outputs": [output], "error": ""}
        added = {name: Column((record.get(name) for record in records), each) for name, each in examples.items()}
        return {**inputs, **added}

    def iterate(self, inputs: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yields the records of `inputs` in order, while later ones are read and generated for; memory stays flat."""
        if isinstance(inputs, (str, bytes)):
            raise TypeError("inputs is one text (accepted: a list of texts, of lists of messages, or of paths)")
        args = self._task.args
        _, planner = self._task.notes()
        records: dict[int, dict[str, Any]] = {}
        number = 1

        def write(items: list[Item], amount: float) -> None:
            records.update((item.line.number, fields_of(item)) for item in items)

        generate = SplitOnOOM(self._task, lambda said: None, args.seed)
        pipeline = Pipeline(self._task, generate, write, Stop(), gives_up=False)
        chunks = _chunks(inputs, self._task.lines_at_once, takes_paths=self._task.reads is None)
        prefetcher = Prefetcher(chunks, self._task, planner)
        try:
            stock = fastgen.disabled if args.without_fastgen_opt else nullcontext
            batches = pipeline.run(iter(prefetcher))
            is_over = False
            while not is_over:
                with stock():
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
    """Returns the settings of a run that reads and writes no files; raises InputError for those that it has not."""
    names, of_generate = {each.name for each in settings_of_run()} - set(OF_FILES), generation_fields()
    own: dict[str, Any] = {"gen": list(dict(settings.get("gen") or {}).items())}
    for name, value in settings.items():
        if (setting := OTHER_NAMES.get(name, name)) in OF_FILES:
            raise InputError(f"{name}: is a flag of the command only")
        if setting in of_generate:
            own["gen"].append((setting, value))
        elif setting not in names:
            known = [*names, *of_generate, *OTHER_NAMES]
            raise InputError(f"{name}: there is no such setting{did_you_mean(name, known, 'see docs/commands.md')}")
        elif setting != "gen" and value is not None:
            own[setting] = value
    return BatchConfig(model, **own, input_format="jsonl", output_format="jsonl", quiet=True)


def _chunks(inputs: Iterable[Any], size: int, takes_paths: bool = True) -> Iterator[list[Line]]:
    """Yields each input as a line, `size` at a time."""
    numbered = enumerate(inputs, start=1)
    while chunk := list(islice(numbered, size)):
        paths = [os.fspath(value) if takes_paths and isinstance(value, os.PathLike) else value for _, value in chunk]
        yield [Line(number, value=value) for (number, _), value in zip(chunk, paths)]
