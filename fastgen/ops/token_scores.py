"""Log-probabilities of tokens under logits, and entropies, with a backward that needs no second array of their size.

torch's own operations hold several: exponentials, the gradients of a log-sum-exp and of a gather, their sum. This
function goes over the logits in chunks of rows, and saves the logits alone.

Tests: tests/ops/test_token_scores.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Logits that are exponentiated together: 16 MB in fp32.
CHUNK = 1 << 22


def token_scores(logits: Tensor, tokens: Tensor, temperature: float, entropy: bool) -> list[Tensor]:
    """Returns log-probabilities `[rows, columns]` of tokens under `logits / temperature`, and entropies if requested.

    logits: `[rows, columns, vocabulary_size]`. tokens: int64 `[rows, columns]`. The results are float32, float64 if the
    logits are. Differentiable once.
    """
    return list(_TokenScores.apply(logits, tokens, temperature, entropy))


def _chunks(logits: Tensor) -> list[slice]:
    """Returns slices of the rows of logits `[rows, vocabulary_size]`."""
    rows = max(CHUNK // max(logits.shape[1], 1), 1)
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Returns a new tensor of at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, ...]:
        flat = logits.reshape(-1, logits.shape[-1])
        index = tokens.reshape(-1, 1)
        norms, log_probs, entropies = [], [], []
        for chunk in _chunks(flat):
            scaled = _scaled(flat[chunk], temperature)
            norms.append(scaled.logsumexp(dim=-1, keepdim=True))
            scaled -= norms[-1]
            log_probs.append(scaled.gather(-1, index[chunk]))
            if entropy:
                entropies.append(-(scaled.exp() * scaled).sum(dim=-1))
        ctx.temperature = temperature
        results = [torch.cat(values).view(tokens.shape) for values in (log_probs, entropies) if values]
        ctx.save_for_backward(logits, tokens, torch.cat(norms), *results[1:])
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_log_probs: Tensor, of_entropies: Tensor | None = None) -> Any:
        logits, tokens, norms, *entropies = ctx.saved_tensors
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat = logits.reshape(-1, logits.shape[-1])
        index = tokens.reshape(-1, 1)
        result = gradient.flatten(0, -2)
        of_log_probs = of_log_probs.reshape(-1, 1)
        for chunk in _chunks(flat):
            log_probs = _scaled(flat[chunk], ctx.temperature).sub_(norms[chunk])
            if of_entropies is None:
                scaled = log_probs.exp_().mul_(-of_log_probs[chunk])
            else:  # an entropy's derivative by logit j is -p_j (log p_j + entropy)
                weights = (log_probs + entropies[0].reshape(-1, 1)[chunk]).mul_(of_entropies.reshape(-1, 1)[chunk])
                scaled = log_probs.exp_().mul_(-weights.add_(of_log_probs[chunk]))
            scaled.scatter_add_(-1, index[chunk], of_log_probs[chunk])
            result[chunk] = scaled.div_(ctx.temperature)
        return gradient, None, None, None
