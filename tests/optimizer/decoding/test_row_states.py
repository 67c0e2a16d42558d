"""Row states move with their rows, and a run that does not count leaves them as they were."""

import pytest
import torch
from hooks import captures_of
from torch import Tensor

from fastgen.optimizer.decoding.graphs import CapturedStep, StepState
from fastgen.optimizer.decoding.static_kv_cache import KVContent, StaticKVCache

STATES = [torch.arange(12.0).view(3, 2, 2), torch.arange(6).view(3, 2), torch.arange(12.0, 24).view(3, 2, 2)]


def cache_with_states(states: list[Tensor] = STATES) -> StaticKVCache:
    """A static cache with states and no keys."""
    keys = torch.empty(len(states[0]), 1, 1, 0)
    content = KVContent(len(keys), 1, [()], [(keys, keys)], states=states)
    static = StaticKVCache(content.spec(8))
    static.load(content)
    return static


def test_states_at_fixed_addresses_move_with_their_rows():
    static = cache_with_states()
    addresses = [tensor.data_ptr() for tensor in static.states]
    static.reorder(torch.tensor([2, 2, 0]))
    for tensor, state in zip(static.states, STATES, strict=True):
        assert torch.equal(tensor, state[[2, 2, 0]])
    assert [tensor.data_ptr() for tensor in static.states] == addresses


def test_a_static_cache_reorders_and_compacts_its_states():
    static = cache_with_states()
    static.reorder(torch.tensor([1, 0, 2]))
    rows = torch.tensor([0, 2])
    content = static.content().of_rows(rows, rows)
    assert [state.tolist() for state in content.states] == [state[[1, 2]].tolist() for state in STATES]
    assert static.nbytes == sum(state.nbytes for state in STATES)


def test_states_are_rewound_until_the_run_counts():
    static = cache_with_states()
    static.save_states()
    static.states[0].add_(1)
    static.rewind()
    assert torch.equal(static.states[0], STATES[0])
    static.states[0].add_(1)
    static.advance()
    static.rewind()
    assert torch.equal(static.states[0], STATES[0] + 1)


def test_each_run_of_a_step_advances_its_states_once():
    static = cache_with_states()
    first = static.states[0]

    def function(number: Tensor) -> Tensor:
        first.add_(number)
        return first.sum()[None]

    step, refused = CapturedStep(function, static), []
    for count in range(1, 6):  # captured, compared, replayed
        outputs = step.run(torch.ones(1), captures_of(refused))
        assert torch.equal(first, STATES[0] + count)
        assert outputs.item() == first.sum().item()
        static.advance()
    assert step.state is StepState.PROVEN and not refused


def test_states_of_a_replay_that_diverges_are_rewound():
    static = cache_with_states()
    first = static.states[0]

    def function(number: Tensor) -> Tensor:
        first.add_(1)
        if number.item() > 3:
            first.mul_(2)
        return first.sum()[None]

    step = CapturedStep(function, static)
    expected = STATES[0].clone()
    for number in (1.0, 1.0, 1.0, 5.0, 1.0):
        expected = (expected + 1) * (2 if number > 3 else 1)
        step.run(torch.tensor([number]), captures_of([]))
        static.advance()
        assert torch.equal(first, expected), number
    assert step.state is StepState.DROPPED


def test_an_error_in_a_proven_replay_is_not_hidden():
    """Its states are lost: the loop must start again."""
    static = cache_with_states()
    first = static.states[0]
    step = CapturedStep(lambda number: first.add_(number).sum()[None], static)
    for _ in range(3):
        step.run(torch.ones(1), captures_of([]))
        static.advance()

    def fails() -> None:
        first.add_(1)
        raise IndexError("no such position")

    step.replay._run = fails
    with pytest.raises(IndexError, match="no such position"):
        step.run(torch.ones(1), captures_of([]))
