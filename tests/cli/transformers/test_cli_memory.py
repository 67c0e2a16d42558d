"""A batch that does not fit into memory is halved; what fitted is remembered; one input alone fails by itself."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastgen.cli.errors import RunError
from fastgen.cli.transformers.stages.batches import pad_text
from fastgen.cli.transformers.stages.generation import WithinMemory, is_out_of_memory
from fastgen.cli.transformers.stages.items import Batch, Generated, Line, NotGenerated


def batch_of(lengths: list[int], left: bool = False, first: int = 1) -> Batch:
    rows = [{"input_ids": np.arange(1, length + 1)} for length in lengths]
    lines = [Line(first + place, b"") for place in range(len(lengths))]
    return Batch(lines, lengths, pad_text(0, left)(rows), [NotGenerated(Line(99, b""))])


class SmallMachine:
    """Fits `cells` tokens; keeps the shapes of what it was given, and gives the first token and the line's number."""

    def __init__(self, cells: int, error: Callable[[], Exception]) -> None:
        self.cells = cells
        self.error = error
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, batch: Batch) -> Generated:
        input_ids = batch.inputs["input_ids"]
        assert torch.equal(input_ids.ne(0).long(), batch.inputs["attention_mask"])
        assert input_ids.ne(0).sum(1).tolist() == batch.lengths
        self.shapes.append(tuple(input_ids.shape))
        if input_ids.numel() > self.cells:
            raise self.error()
        sequences = np.array([[line.number] for line in batch.lines])
        return Generated(batch.lines, batch.lengths, sequences, None, batch.not_generated)


ERRORS = [
    MemoryError,
    lambda: torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("left", [False, True])
def test_a_batch_is_halved_until_it_fits_and_the_size_is_remembered(error: Callable[[], Exception], left: bool) -> None:
    machine, said = SmallMachine(30, error), []
    generate = WithinMemory(machine, left, said.append)
    parts = list(generate(batch_of([10, 10, 9, 8, 5, 5, 4, 4], left)))
    assert [line.number for part in parts for line in part.lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert np.concatenate([part.sequences for part in parts]).ravel().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sum(len(part.not_generated) for part in parts) == 1
    # Eight and four rows are too many; two fit, and the rest, which is shorter, goes in one part.
    assert machine.shapes == [(8, 10), (4, 10), (2, 10), (2, 9), (4, 5)]
    assert len(said) == 2 and "out of memory with 8 inputs of length 10" in said[0]
    machine.shapes.clear()
    assert [len(part.lines) for part in generate(batch_of([10, 10, 10, 10], left))] == [2, 2]
    assert machine.shapes == [(2, 10), (2, 10)]


def test_an_input_that_does_not_fit_alone_fails_and_the_others_are_generated() -> None:
    machine, said = SmallMachine(30, MemoryError), []
    parts = list(WithinMemory(machine, False, said.append)(batch_of([50, 10, 10])))
    assert sorted(line.number for part in parts for line in part.lines) == [2, 3]
    failed = [each for part in parts for each in part.not_generated if each.error]
    assert [each.line.number for each in failed] == [1]
    assert "memory is too small for this input of length 50" in failed[0].error


def test_a_batch_without_lines_needs_no_model() -> None:
    (generated,) = WithinMemory(SmallMachine(0, MemoryError), False, print)(
        Batch([], [], {}, [NotGenerated(Line(3, b""))])
    )
    assert generated.lines == [] and [each.line.number for each in generated.not_generated] == [3]


@pytest.mark.parametrize("left", [False, True])
def test_a_batch_is_halved_until_the_line_that_raises_stands_alone(left: bool) -> None:
    machine, said, sizes = SmallMachine(1000, MemoryError), [], []

    def model(batch: Batch) -> Generated:
        sizes.append(len(batch))
        if 6 in [line.number for line in batch.lines]:
            raise IndexError("out of range\nin self")
        return machine(batch)

    generate = WithinMemory(model, left, said.append)
    parts = list(generate(batch_of([10, 10, 9, 8, 5, 5, 4, 4], left)))
    assert [line.number for part in parts for line in part.lines] == [1, 2, 3, 4, 5, 7, 8]
    failed = [each for part in parts for each in part.not_generated if each.error]
    assert [(each.line.number, each.error) for each in failed] == [
        (6, "cannot be generated for (IndexError: out of range in self)")
    ]
    assert sizes == [8, 4, 4, 2, 1, 1, 2] and generate.cells is None and said == []
    assert [each.line.number for part in parts for each in part.not_generated] == [99, 6]


def test_a_device_that_fails_ends_the_run() -> None:
    def broken(batch: Batch) -> Generated:
        raise RunError("cuda:0 failed")

    with pytest.raises(RunError, match="cuda:0 failed"):
        list(WithinMemory(broken, False, print)(batch_of([3, 3])))
    assert not is_out_of_memory(RuntimeError("index out of range"))
