"""Forwards of fairseq's modules while fastgen generates: without reading tokens on the host, or what Python counts.

`TransformerDecoderBase.extract_features_scriptable` asks in every step whether a token is padding, which waits for the
device. What a generation has written is none, except in rows that can win no more: see `attention.self_attention`.
Positional embeddings take the position from the shape of the tokens; in a captured step it is a number on the device.
`NGramRepeatBlock.forward` compares, on a CPU, with the end of the padded buffer instead of the last tokens, and bans
nothing; the op does on every device what fairseq's CUDA kernel does. Its HiFi-GAN vocoders are those of
`optimizer/vocoder.py`, for spectrograms and, as `CodeGenerator`, for units.

Tests: tests/optimizer/fairseq/test_fairseq_attention.py, tests/optimizer/fairseq/test_fairseq_captured_steps.py,
tests/optimizer/fairseq/test_fairseq_ngrams.py, tests/optimizer/vocoder/test_fairseq_vocoders.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq.models.text_to_speech.hifigan import LRELU_SLOPE
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor
from torch.nn import functional

from fastgen.ops import no_repeat_ngram as op
from fastgen.ops.no_repeat_ngram.implementations import implementation_for
from fastgen.optimizer.decoding.call import add_reasons, count
from fastgen.optimizer.decoding.model_facts import facts_of
from fastgen.optimizer.decoding.reasons import NGRAMS, Reason, with_code
from fastgen.optimizer.fairseq.checks import KNOWN
from fastgen.optimizer.fairseq.decode_step import DecodingState
from fastgen.optimizer.vocoder import faster_waveform


class NoneEqual:
    """The outcome of a comparison in which nothing is equal."""

    def any(self) -> bool:
        return False


class Written(Tensor):
    """Tokens of which none is padding: whether one equals it is known without reading them."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.eq:
            return NoneEqual()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(Written) if func in _VIEWS else result


_VIEWS = (Tensor.__getitem__, Tensor.contiguous)


def extract_features(
    original: Callable,
    self: Any,
    prev_output_tokens: Tensor,
    encoder_out: Any,
    incremental_state: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if isinstance(incremental_state, DecodingState) and not self.cross_self_attention:
        prev_output_tokens = prev_output_tokens.as_subclass(Written)
    return original(self, prev_output_tokens, encoder_out, incremental_state, *args, **kwargs)


def positions(
    original: Callable, self: Any, input: Tensor, incremental_state: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Of a table of positions; in a captured step that of the token that is fed, in all rows: `[1, 1, embed_dim]`."""
    if not isinstance(incremental_state, DecodingState) or incremental_state.position is None:
        return original(self, input, incremental_state, *args, **kwargs)
    table = self.weights if isinstance(self, SinusoidalPositionalEmbedding) else self.weight
    return functional.embedding(incremental_state.position + (self.padding_idx or 0), table)


def no_repeat_ngram(
    original: Callable, self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int
) -> Tensor:
    """Writes -inf into `lprobs`, `[bsz * beam_size, vocabulary_size]`, and returns them.

    tokens: `[bsz * beam_size, max_len + 2]`, of which the first `step + 1` are generated, the rest padding.
    """
    if reasons := _ngram_reasons(self, tokens, lprobs, bsz * beam_size, step):
        add_reasons(NGRAMS, reasons)
        return original(self, tokens, lprobs, bsz, beam_size, step)
    count(implementation_for(lprobs.device.type).counted_as)
    return op.no_repeat_ngram_(tokens, lprobs, self.no_repeat_ngram_size, step + 1)


def _ngram_reasons(blocker: Any, tokens: Tensor, lprobs: Tensor, rows: int, step: int) -> list[Reason]:
    """Why n-grams are left to fairseq."""
    if blocker.no_repeat_ngram_size < 1:
        return [Reason("NGRAM_SIZE", f"no_repeat_ngram_size is {blocker.no_repeat_ngram_size} (supported: 1 or more)")]
    if not (tokens.shape[0] == rows == lprobs.shape[0] and 0 <= step < tokens.shape[1]):
        shapes = f"tokens {tuple(tokens.shape)} and lprobs {tuple(lprobs.shape)}"
        return [Reason("SHAPES", f"{shapes} at step {step} (supported: {rows} rows, of more tokens than steps)")]
    return with_code("SHAPES", op.unsupported_reasons(tokens, lprobs))


def vocode(original: Callable, self: Any, x: Tensor) -> Tensor:
    """Of a HiFi-GAN generator: states `[batch, channels, frames]` become a waveform `[batch, 1, samples]`."""
    upsamplings = self.ups[: self.num_upsamples]
    found = faster_waveform(self, KNOWN, x, lambda layers: layers.hifi_gan(self, upsamplings, LRELU_SLOPE))
    return original(self, x) if found is None else found


def vocode_without_gradients(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Of a vocoder, whose waveform has no gradients: none are recorded on the way there, unless somebody looks."""
    if facts_of(self.model, KNOWN).altered:
        return original(self, *args, **kwargs)
    with torch.no_grad():
        return original(self, *args, **kwargs)
