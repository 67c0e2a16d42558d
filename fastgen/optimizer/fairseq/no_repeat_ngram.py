"""`NGramRepeatBlock.forward` through the op, which does on every device what fairseq's CUDA kernel does.

fairseq's own code for the CPU compares with the end of the padded buffer instead of the last tokens: it bans nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastgen.ops.no_repeat_ngram import no_repeat_ngram_ as ban_in_place
from fastgen.ops.no_repeat_ngram.problem import unsupported_reasons


def no_repeat_ngram(
    original: Callable, self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int
) -> Tensor:
    """Writes -inf into `lprobs`, `[bsz * beam_size, vocabulary_size]`, and returns them.

    tokens: `[bsz * beam_size, max_len + 2]`, of which the first `step + 1` are generated, the rest padding.
    """
    rows = bsz * beam_size
    is_expected = tokens.shape[0] == rows == lprobs.shape[0] and 0 <= step < tokens.shape[1]
    if not is_expected or self.no_repeat_ngram_size < 1 or unsupported_reasons(tokens, lprobs):
        return original(self, tokens, lprobs, bsz, beam_size, step)
    return ban_in_place(tokens, lprobs, self.no_repeat_ngram_size, step + 1)
