"""Probes: asked once for each key, without what the program has set, and an error is a reason."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.ops.probes import probe


def asked(answer):
    calls = []

    @probe("it is wrong")
    def ask(*key):
        """Says something."""
        calls.append(key)
        return answer(*key)

    return ask, calls


def test_each_key_is_asked_once():
    ask, calls = asked(lambda device, dtype: dtype is torch.float32)
    for _ in range(2):
        assert ask("cpu", torch.float32) and not ask("cpu", torch.float16)
    assert calls == [("cpu", torch.float32), ("cpu", torch.float16)]
    assert ask.reasons("cpu", torch.float32) == [] and ask.reasons("cpu", torch.float16) == ["it is wrong"]
    ask.cache_clear()
    assert ask("cpu", torch.float32) and len(calls) == 3


def test_an_error_is_a_reason_of_one_line():
    ask, _ = asked(lambda: 1 / 0)
    assert not ask() and ask.reasons() == ["ZeroDivisionError: division by zero"]
    lines, _ = asked(lambda: torch.ones(2) @ torch.ones(3))
    (reason,) = lines.reasons()
    assert reason.startswith("RuntimeError: ") and "\n" not in reason


def test_the_function_keeps_its_name():
    ask, _ = asked(bool)
    assert ask.__name__ == "ask" and ask.__doc__ == "Says something."


class Sees(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def surroundings():
    tensor = torch.rand(2) + torch.rand(2)
    return tensor.device.type == "cpu" and not (torch.is_grad_enabled() or tensor.is_inference())


@pytest.mark.parametrize("context", (torch.enable_grad, torch.inference_mode, lambda: torch.device("meta"), Sees))
def test_surroundings_do_not_change_the_answer(context):
    state = torch.get_rng_state()
    ask, _ = asked(surroundings)
    entered = context()
    with entered:
        assert ask()
    assert torch.equal(state, torch.get_rng_state())
    assert not isinstance(entered, Sees) or not entered.seen
