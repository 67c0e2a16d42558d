"""State of decoding loops on the device, the same for all hosts: beams, what steps have produced, and the stop check.

A step proposes C candidates for each of B sentences, the best first; of these M beams go on. C is 2M where a candidate
may end its sentence, so that M remain in any case.

Tests: tests/optimizer/fairseq/test_fairseq_loop.py, tests/optimizer/fairseq/test_fairseq_caches.py,
tests/optimizer/transformers/test_finished_inputs.py, tests/optimizer/transformers/test_beam_scores.py,
tests/optimizer/transformers/test_captured_steps.py
"""

from __future__ import annotations

import torch
from torch import Tensor


def ending(scores: Tensor, tokens: Tensor, eos: int, ignored: Tensor) -> Tensor:
    """Which candidates end their sentence, `[B, C]`.

    scores, tokens: the candidates, `[B, C]`. ignored: those of the first M places that count no more, because the
    sentence had collected so many hypotheses before, `[B, M]`.
    """
    ended = tokens.eq(eos) & scores.ne(-torch.inf)
    ended[:, : ignored.shape[1]] &= ~ignored
    return ended


def going_on(ended: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor]:
    """The first M candidates that neither end nor are ignored, and which of the M places nothing was left for.

    ended `[B, C]`, ignored `[B, M]`; both results `[B, M]`: places among the candidates (int64), and whether they are
    to be ignored from now on.
    """
    candidates, beams = ended.shape[1], ignored.shape[1]
    stopped = ended.clone()
    stopped[:, :beams] |= ignored
    places = torch.arange(candidates, device=ended.device)
    rank, active = torch.topk(stopped * (2 * candidates) + places, k=beams, dim=1, largest=False)
    return active, rank.ge(2 * candidates)


class StepHistory:
    """Values `[rows, width]` of up to `steps` steps, for at most `rows` rows, which change places.

    What was written is never moved. A table of ancestors is moved instead: the value that belongs to row i at step s
    lies in row `ancestors[i, s]` of step s.
    """

    def __init__(self, steps: int, values: Tensor, dtype: torch.dtype) -> None:
        rows, width = values.shape
        self.values = torch.empty((steps, rows, width), dtype=dtype, device=values.device)
        self.ancestors = torch.zeros((rows, steps), dtype=torch.int64, device=values.device)
        self.rows = torch.arange(rows, device=values.device)
        self.written = 0

    def write(self, step: int, values: Tensor) -> None:
        """Values `[rows, width]` of the rows as they lie at this step."""
        rows = values.shape[0]
        self.values[step, :rows] = values
        self.ancestors[:, step] = self.rows[:rows]
        self.written = step + 1

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row `order[i]` (int64) was; there may be fewer rows than before."""
        self.ancestors = self.ancestors.index_select(0, order)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """As of a tensor `[rows, width, steps]`, of dimension 0: the steps of these rows (int64) that are written."""
        ancestors = self.ancestors.index_select(dim, rows)[:, : self.written].t()  # [steps, rows]
        steps = torch.arange(self.written, device=rows.device).unsqueeze(1)
        return self.values[steps, ancestors].permute(1, 2, 0).contiguous()


class LateStopCheck:
    """Whether a loop stops, read one step late: the host never waits for the step that it has just queued.

    The flags of consecutive steps are copied to the host beside the device's work. The loop undoes the step that it has
    begun too much.
    """

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
