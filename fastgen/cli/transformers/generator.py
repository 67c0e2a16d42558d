"""TextGenerator: what the command is made of, for Python.

summarize = fastgen.TextGenerator("facebook/bart-large-cnn", beam=4, bs=16)
[record["outputs"][0]["text"] for record in summarize(articles)]

Tests: tests/cli/transformers/test_text_generator.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import fastgen
from fastgen.cli.exits import InputError, Stop
from fastgen.cli.transformers.args import ALIASES, STREAM, RunConfig, completed, generation_fields, parse_arguments
from fastgen.cli.transformers.batching import Item
from fastgen.cli.transformers.files import Line
from fastgen.cli.transformers.model import Loaded
from fastgen.cli.transformers.pipeline import Pipeline, Prefetcher, SplitOnOOM
from fastgen.cli.transformers.records import WrongKindError, fields_of
from fastgen.cli.transformers.tasks import task_for

# Flags that say where the command reads and writes.
OF_FILES = (
    *("model", "input", "output", "resume", "overwrite", "retry_failed", "n_obs", "reference_path"),
    *("reference_field", "score_path", "workers", "ray", "verbose", "num_shards", "shard_id", "merge"),
    *("input_format", "output_format", "id_field", "join_outputs", "output_sequence_scores", "generation_config"),
)


class TextGenerator:
    """Generates for many inputs with the command's pipeline: tokenising, batching by length, recovering from errors.

    model: a local folder, a name on the hub, demo, or a model of transformers together with its `tokenizer`.
    settings: the command's flags by name (`beam=4`, `bs=16`, `task="speech-to-text"`, `causal_lm=True, chat=True`, …)
    and every field of GenerationConfig. With a `seed`, every call draws the same samples for the same inputs.

    Raises fastgen.cli.exits.InputError where a setting or the model cannot be used.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **settings: Any) -> None:
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        given = model if isinstance(model, str) else "model"
        args = completed(replace(_arguments(given, settings), input_format="jsonl", output_format="jsonl"))
        self._text_field = settings.get("text_field") or "text"
        self._task = task_for(replace(args, text_field="text"))
        loaded = None
        if not isinstance(model, str):
            if tokenizer is None:
                raise InputError("tokenizer: is missing (accepted: the tokenizer of the model)")
            loaded = Loaded(self._task.args, model.eval(), tokenizer)
        fastgen.enable()
        self._task.load(loaded)

    def __call__(self, inputs: Sequence[Any] | Mapping[str, Sequence[Any]]) -> Any:
        """A record for each input, in order: {"input_tokens": 5, "outputs": [{"text": …, "tokens": 7}]}, or an "error".

        inputs: texts, lists of messages with chat=True, or paths of audio files. Columns, as `datasets.map` (batched)
        and Ray Data's `map_batches` pass them, come back with these as further ones; `text_field` names the inputs.
        """
        if not isinstance(inputs, Mapping):
            return list(self.iterate(inputs))
        if self._text_field not in inputs:
            raise InputError(f"text_field={self._text_field!r} is no column (accepted: {', '.join(inputs)})")
        records = list(self.iterate(inputs[self._text_field]))
        names = ("input_tokens", "outputs", "error")
        return {**inputs, **{name: [record.get(name) for record in records] for name in names}}

    def iterate(self, inputs: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """The records of `inputs` in order, while later ones are read and generated for; memory stays flat."""
        if isinstance(inputs, (str, bytes)):
            raise TypeError("inputs is one text (accepted: a list of texts, of lists of messages, or of paths)")
        args = self._task.args
        _, planner = self._task.notes()
        records: dict[int, dict[str, Any]] = {}
        number = 1

        def write(items: list[Item], amount: float) -> None:
            records.update((item.line.number, fields_of(item)) for item in items)

        def ready() -> Iterator[dict[str, Any]]:
            nonlocal number
            while number in records:
                yield records.pop(number)
                number += 1

        generate = SplitOnOOM(self._task, lambda said: None, args.seed)
        pipeline = Pipeline(self._task, generate, write, Stop())
        prefetcher = Prefetcher(_chunks(inputs, self._task.lines_at_once), self._task, planner, args.preprocess_workers)
        try:
            stock = fastgen.disabled if args.without_fastgen_opt else nullcontext
            batches = pipeline.run(iter(prefetcher))
            goes_on = True
            while goes_on:
                if prefetcher.is_waiting:
                    pipeline.wait()
                yield from ready()
                with stock():
                    goes_on = next(batches, pipeline) is None
            pipeline.wait()
            yield from ready()
        except WrongKindError as error:
            raise InputError(f"the first input {error}") from error
        finally:
            prefetcher.stop()
            pipeline.kill()


def _arguments(model: str, settings: dict[str, Any]) -> RunConfig:
    """The flags that settings are, with the checks of the command line; other names are refused as there."""
    options = {each.name: each.metadata.get("action") for each in fields(RunConfig)} | {"do_sample": "store_true"}
    argv: list[str] = []
    for name, value in settings.items():
        if name in OF_FILES:
            raise InputError(f"{name}: is a flag of the command only")
        if options.get(ALIASES.get(name, name)) == "store_true":
            argv += [f"--{name}"] * bool(value)
        elif value is not None or name in generation_fields():
            argv.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    # join_outputs: several outputs are apart in a record in any case.
    return parse_arguments([*argv, "--output_format=jsonl", "--quiet", "--", model, "inputs.jsonl", STREAM])


def _chunks(inputs: Iterable[Any], size: int) -> Iterator[list[Line]]:
    """Each input as the line of INPUT that it would be."""
    numbered = enumerate(inputs, start=1)
    while chunk := list(islice(numbered, size)):
        yield [Line(number, json.dumps({"text": each}).encode()) for number, each in chunk]
