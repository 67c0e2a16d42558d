"""What a run that goes on with --resume has to know besides the records: kept with them after each batch."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import torch

CPU_BYTES = torch.get_rng_state().numel()


@dataclass
class RunState:
    """As of the records that are written.

    failures: how many of them are of inputs that failed.
    cells: how large a batch may be since the memory was too small for one; decides what is in a batch.
    random: the state of the random numbers in base 64, where samples are drawn.
    """

    failures: int = 0
    cells: int | None = None
    random: str | None = None


def random_state(device: torch.device) -> str:
    """Of the CPU, and of the GPU where `device` is one."""
    state = torch.get_rng_state().numpy().tobytes()
    if device.type == "cuda":
        state += torch.cuda.get_rng_state(device).numpy().tobytes()
    return base64.b64encode(state).decode("ascii")


def restore_random_state(state: str, device: torch.device) -> None:
    """Samples that are drawn from here on are those that came after `state` was taken."""
    data = torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
    torch.set_rng_state(data[:CPU_BYTES])
    if device.type == "cuda":
        torch.cuda.set_rng_state(data[CPU_BYTES:], device)
