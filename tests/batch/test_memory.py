"""A batch that does not fit into memory is halved, and others are cut as before; an input too large fails alone."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastgen.batch.errors import RunError
from fastgen.batch.files import Line
from fastgen.batch.pipeline import SplitOnOOM, batch_seed, is_out_of_memory
from fastgen.batch.planner import Batch, GeneratedBatch, Item
from fastgen.batch.text import pad_text


class SmallMachine:
    """A task whose model has room for `tokens`; records the shapes of batches, and returns the line's number."""

    def __init__(self, tokens: int, error: Callable[[], Exception] = MemoryError, left: bool = False) -> None:
        self.tokens, self.error, self.left = tokens, error, left
        self.shapes: list[tuple[int, ...]] = []
        self.random: dict[tuple[int, ...], float] = {}

    def collate(self, items: list[Item]) -> dict[str, torch.Tensor]:
        return pad_text([item.arrays["input_ids"] for item in items], 0, self.left)

    def generate(self, batch: Batch) -> GeneratedBatch:
        input_ids = batch.inputs["input_ids"]
        assert torch.equal(input_ids.ne(0).long(), batch.inputs["attention_mask"])
        assert input_ids.ne(0).sum(1).tolist() == [item.length for item in batch.items]
        self.shapes.append(tuple(input_ids.shape))
        numbers = [item.line.number for item in batch.items]
        self.random[tuple(numbers)] = torch.rand(()).item()
        if input_ids.numel() > self.tokens:
            raise self.error()
        return GeneratedBatch(batch.items, np.array([[number] for number in numbers]))


def batch_of(machine: SmallMachine, lengths: list[int], number: int = 0) -> Batch:
    items = [
        Item(Line(place, b""), {"input_ids": np.arange(1, length + 1)}, length)
        for place, length in enumerate(lengths, start=1)
    ]
    return Batch(items, [], number, inputs=machine.collate(items))


ERRORS = [
    MemoryError,
    lambda: torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


def numbers(parts: list[GeneratedBatch]) -> list[int]:
    return [item.line.number for part in parts for item in part.items]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("left", [False, True])
def test_a_batch_is_halved_to_fit_and_the_size_is_remembered(error, left):
    machine, said = SmallMachine(30, error, left), []
    generate = SplitOnOOM(machine, said.append, seed=None)
    parts = generate(batch_of(machine, [10, 10, 9, 8, 5, 5, 4, 4]))
    assert numbers(parts) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert np.concatenate([part.sequences for part in parts]).ravel().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    # Eight and four rows are too many; two fit, and the rest, which is shorter, goes in one part.
    assert machine.shapes == [(8, 10), (4, 10), (2, 10), (2, 9), (4, 5)]
    assert len(said) == 2 and "out of memory with 8 inputs of length 10" in said[0]
    machine.shapes.clear()
    assert [len(part.items) for part in generate(batch_of(machine, [10, 10, 10, 10]))] == [2, 2]
    assert machine.shapes == [(2, 10), (2, 10)]


def test_batches_that_fit_keep_their_cut_after_a_halved_one():
    machine = SmallMachine(30)
    generate = SplitOnOOM(machine, lambda said: None, seed=None)
    generate(batch_of(machine, [10] * 8))
    machine.shapes.clear()
    assert [len(part.items) for part in generate(batch_of(machine, [5] * 6))] == [6]


def test_a_part_of_a_batch_has_the_samples_of_the_whole():
    """A resumed run, which does not know yet what is too large, draws the same samples."""
    lengths, drawn = [10] * 8, []
    for before in (True, False):
        machine = SmallMachine(30)
        generate = SplitOnOOM(machine, lambda said: None, seed=7)
        if before:
            generate(batch_of(machine, lengths, number=4))
        generate(batch_of(machine, lengths, number=5))
        drawn.append({part: value for part, value in machine.random.items() if len(part) == 2})
    assert drawn[0] == drawn[1] and len(set(drawn[0].values())) == 4
    assert len({batch_seed(seed, batch, start) for seed in range(4) for batch in range(4) for start in range(4)}) == 64


def test_only_an_input_that_does_not_fit_alone_fails():
    machine = SmallMachine(30)
    batch = batch_of(machine, [50, 10, 10])
    assert numbers(SplitOnOOM(machine, lambda said: None, None)(batch)) == [2, 3]
    assert batch.items[0].error == "out of memory even for this input alone (length 50)"
    assert [item.error for item in batch.items[1:]] == [None, None]


def test_a_batch_without_items_needs_no_model():
    assert SplitOnOOM(SmallMachine(0), print, None)(Batch([], [Item(Line(3, b""))], 0)) == []


@pytest.mark.parametrize("left", [False, True])
def test_a_batch_is_halved_until_the_failing_input_is_alone(left):
    class Poisoned(SmallMachine):
        def generate(self, batch: Batch) -> GeneratedBatch:
            sizes.append(len(batch.items))
            if 6 in [item.line.number for item in batch.items]:
                raise IndexError("out of range\nin self")
            return super().generate(batch)

    machine, said, sizes = Poisoned(1000, left=left), [], []
    generate = SplitOnOOM(machine, said.append, None)
    batch = batch_of(machine, [10, 10, 9, 8, 5, 5, 4, 4])
    assert numbers(generate(batch)) == [1, 2, 3, 4, 5, 7, 8]
    failed = [(item.line.number, item.error) for item in batch.items if item.error]
    assert failed == [(6, "cannot be generated for (IndexError: out of range in self)")]
    assert sizes == [8, 4, 4, 2, 1, 1, 2] and generate.too_large is None and said == []


def test_a_device_that_fails_ends_the_run(monkeypatch):
    monkeypatch.setattr("fastgen.batch.pipeline._device_works_sync", lambda: False)
    machine = SmallMachine(1, lambda: RuntimeError("device-side assert"))
    with pytest.raises(RunError, match="the device failed at lines 1 to 2: RuntimeError: device-side assert"):
        SplitOnOOM(machine, print, None)(batch_of(machine, [3, 3]))
    assert not is_out_of_memory(RuntimeError("index out of range"))
