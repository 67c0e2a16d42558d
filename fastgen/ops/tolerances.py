"""How far two results of one computation may lie apart where rounding is all that differs.

Tests: tests/ops/test_cpu_linear.py, tests/optimizer/transformers/test_verification.py
"""

from __future__ import annotations

import torch

# As a part of the largest number.
_LOGITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
_PRODUCT = {torch.float32: 1e-4, torch.float16: 0.002, torch.bfloat16: 0.01}
_SCORE = {torch.float32: 1e-4}  # as a number: a log-probability of a token

TOLERANCES = {"logits": _LOGITS, "product": _PRODUCT, "score": _SCORE}


def tolerance(kind: str, dtype: torch.dtype) -> float:
    """kind: a key of TOLERANCES; a dtype that is not in the table has float32's tolerance."""
    table = TOLERANCES[kind]
    return table.get(dtype, table[torch.float32])
