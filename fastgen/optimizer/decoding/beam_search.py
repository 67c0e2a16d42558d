"""Bookkeeping of beams on the device: which candidates end a sentence, which go on. No host reads, no host library.

A step proposes C candidates for each of B sentences, the best first; of these M go on. C is 2M where a candidate may
end its sentence, so that M remain in any case.

Tests: tests/optimizer/fairseq/test_fairseq_loop.py, tests/optimizer/transformers/test_finished_inputs.py,
tests/optimizer/transformers/test_beam_scores.py
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


def rows_of(beams: Tensor, sentences: Tensor, num_beams: int) -> Tensor:
    """Row numbers of `beams` (`[B, …]`, numbers within each sentence), where sentence i has place `sentences[i]`."""
    return beams + (sentences * num_beams).unsqueeze(1)


def force_tokens(log_probs: Tensor, tokens: Tensor, pad: int) -> Tensor:
    """Leaves each row the token that it must take, where it must take one; in place.

    log_probs `[rows, vocabulary]`; tokens `[rows]`, `pad` where the row is free.
    """
    kept = log_probs.gather(1, tokens.unsqueeze(1))
    log_probs.masked_fill_(tokens.ne(pad).unsqueeze(1), -torch.inf)
    return log_probs.scatter_(1, tokens.unsqueeze(1), kept)


def sum_in_order(values: Tensor) -> Tensor:
    """Sums up to each of the columns of `[rows, columns]`, each rounded, as a search adds them up step by step."""
    columns = list(values.unbind(1))
    for index in range(1, len(columns)):
        columns[index] = columns[index - 1] + columns[index]
    return torch.stack(columns, dim=1)
