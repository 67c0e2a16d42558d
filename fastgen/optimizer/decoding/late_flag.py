"""A flag on the device that is read one step late, so that the host never waits for the step it has just queued.

A host may do the same on some devices; the step that was begun too much is undone by the
loop.

Tests: tests/optimizer/transformers/test_recorded_step.py
"""

from __future__ import annotations

import torch
from torch import Tensor


def reading_waits(device: torch.device) -> bool:
    """Whether to read a flag waits for the device."""
    return device.type != "cpu"


class LateFlag:
    """Flags of consecutive steps, copied to the host beside the device's work."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.slots = [torch.zeros((), dtype=torch.bool, pin_memory=is_cuda) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)] if is_cuda else []

    def exchange(self, flag: Tensor) -> bool:
        """Takes the flag of this step (bool, no dimension), and returns that of the step before; at first False."""
        self.slots[0].copy_(flag, non_blocking=True)
        if self.copied:
            self.copied[0].record(torch.cuda.current_stream(flag.device))
            self.copied[1].synchronize()  # returns at once if nothing was recorded
            self.copied.reverse()
        self.slots.reverse()
        return bool(self.slots[0])
