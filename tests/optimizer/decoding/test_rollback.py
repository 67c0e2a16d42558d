"""`Rollback`, and the states that it puts back."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastgen.optimizer.decoding.rollback import (
    LeaveAlone,
    Rollback,
    leave_alone_for,
    undo_of_attributes,
    undo_of_random_numbers,
    undo_of_tensors,
)


def test_everything_is_put_back_once_unless_it_is_kept():
    restored: list[str] = []
    rollback = Rollback()
    rollback.callback(restored.append, "second")
    rollback.callback(restored.append, "first")
    with pytest.raises(KeyError), rollback:
        raise KeyError
    rollback.restore()
    assert restored == ["first", "second"]
    with Rollback() as kept:
        kept.callback(restored.append, "third")
        kept.keep()
    assert restored == ["first", "second"]


def test_modules_get_the_tensors_back_that_they_held():
    module = nn.Linear(2, 2)
    states, hook = torch.ones(3), object()
    module.states = states
    undo = undo_of_tensors([module])
    module.states, module.others, module.hook = torch.zeros(5), torch.zeros(1), hook
    undo()
    assert module.states is states and module.others is None and module.hook is hook


def test_random_numbers_and_attributes_are_put_back():
    processor = SimpleNamespace(seen=[1], limit=3)
    undos = undo_of_random_numbers(), undo_of_attributes([processor, object()])
    expected = torch.rand(3)
    processor.seen.append(2)
    processor.limit, processor.added = 4, True
    for undo in undos:
        undo()
    assert torch.equal(torch.rand(3), expected) and vars(processor) == {"seen": [1], "limit": 3}


def test_nothing_is_left_alone_without_a_reason():
    leave_alone_for([])
    with pytest.raises(LeaveAlone, match="too small"):
        leave_alone_for(["too small"])
