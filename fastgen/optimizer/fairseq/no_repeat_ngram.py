"""`NGramRepeatBlock.forward` through the op, which does on every device what fairseq's CUDA kernel does.

fairseq's own code for the CPU compares with the end of the padded buffer instead of the last tokens: it bans nothing.

Tests: tests/optimizer/fairseq/test_fairseq_ngrams.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastgen.ops.no_repeat_ngram import no_repeat_ngram_ as ban_in_place
from fastgen.ops.no_repeat_ngram.implementations import implementation_for
from fastgen.ops.no_repeat_ngram.problem import unsupported_reasons
from fastgen.optimizer.decoding.call import add_reasons, count
from fastgen.optimizer.decoding.reasons import NGRAMS, Reason, with_code


def no_repeat_ngram(
    original: Callable, self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int
) -> Tensor:
    """Writes -inf into `lprobs`, `[bsz * beam_size, vocabulary_size]`, and returns them.

    tokens: `[bsz * beam_size, max_len + 2]`, of which the first `step + 1` are generated, the rest padding.
    """
    if reasons := _reasons(self, tokens, lprobs, bsz * beam_size, step):
        add_reasons(NGRAMS, reasons)
        return original(self, tokens, lprobs, bsz, beam_size, step)
    count(implementation_for(lprobs.device.type).counted_as)
    return ban_in_place(tokens, lprobs, self.no_repeat_ngram_size, step + 1)


def _reasons(blocker: Any, tokens: Tensor, lprobs: Tensor, rows: int, step: int) -> list[Reason]:
    """Why this call is left to fairseq."""
    if blocker.no_repeat_ngram_size < 1:
        return [Reason("NGRAM_SIZE", f"no_repeat_ngram_size is {blocker.no_repeat_ngram_size} (supported: 1 or more)")]
    if not (tokens.shape[0] == rows == lprobs.shape[0] and 0 <= step < tokens.shape[1]):
        shapes = f"tokens {tuple(tokens.shape)} and lprobs {tuple(lprobs.shape)}"
        return [Reason("SHAPES", f"{shapes} at step {step} (supported: {rows} rows, of more tokens than steps)")]
    return with_code("SHAPES", unsupported_reasons(tokens, lprobs))
