"""The call for `fastgen.verify`: runs `generate` of a model of transformers, and compares the outputs of two runs.

Tests: tests/optimizer/test_verify.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteriaList
from transformers.utils import logging

from fastgen.models.cache_names import CACHE_NAMES
from fastgen.ops.kernel import tolerance
from fastgen.optimizer.decoding.verify import ABSENT, Difference, first_token_difference
from fastgen.optimizer.transformers.checks import HostModel

# Settings that choose tokens, lengths and outputs: a greedy call without them scores an existing sequence.
_NOT_OF_SCORES = frozenset({
    "num_beams", "num_return_sequences", "do_sample", "early_stopping", "length_penalty", "streamer",
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "stopping_criteria",
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
})  # fmt: skip


@dataclass
class VerifiedCall:
    """A call `model.generate(inputs, **kwargs)`, or `model.generate(**inputs, **kwargs)` if inputs are a mapping."""

    model: HostModel
    inputs: Any
    kwargs: dict[str, Any]
    host: str = "transformers"

    def run(self) -> Any:
        if isinstance(self.inputs, Mapping):
            return self.model.generate(**self.inputs, **self.kwargs)
        return self.model.generate(self.inputs, **self.kwargs)

    def rows_of(self, output: Any) -> int:
        return next(iter(_tensors(output))).shape[0]

    def difference(self, ours: Any, theirs: Any) -> Difference | None:
        """Returns the first difference: in tokens, with the scores of both sequences; otherwise in other tensors."""
        tokens = _sequences(ours), _sequences(theirs)
        if tokens[0] is not None and tokens[1] is not None:
            start = self._generated_from()
            different = first_token_difference(*tokens, start)
            if different is not None:
                return self._with_scores(different, tokens, start)
        for index, (tensor, expected) in enumerate(zip(_tensors(ours), _tensors(theirs))):
            if tensor.shape != expected.shape:
                return Difference(f"output {index} has shape {tuple(tensor.shape)} instead of {tuple(expected.shape)}")
            atol = tolerance("logits", tensor.dtype) * max(expected.nan_to_num(0, 0, 0).abs().max().item(), 1)
            if tensor.is_floating_point() and not torch.allclose(tensor, expected, rtol=0, atol=atol, equal_nan=True):
                return Difference(f"output {index} differs by {(tensor - expected).abs().max().item():.2g}")
        return None

    def _generated_from(self) -> int:
        """Returns the column of the first generated token."""
        inputs = self.inputs.get("input_ids") if isinstance(self.inputs, Mapping) else self.inputs
        if is_decoder := self.model.config.is_encoder_decoder:
            inputs = self.kwargs.get("decoder_input_ids")
        return int(is_decoder) if inputs is None else inputs.shape[1]

    def _with_scores(self, different: Difference, tokens: tuple[Tensor, Tensor], start: int) -> Difference:
        """Adds the sums of both rows' log-probabilities: of whole rows for beams, else up to the difference."""
        if different.row is None or different.step is None:
            return different
        beams = self.kwargs.get("num_beams", self.model.generation_config.num_beams) or 1
        length = None if beams > 1 else start + different.step + 1
        rows = [sequences[different.row, :length] for sequences in tokens]
        try:
            ours, theirs = (self._log_prob_sum(different.row, len(tokens[0]), row[row != ABSENT]) for row in rows)
        except (TypeError, ValueError) as error:  # the model's own generate takes no processors
            text = f"{different.text} (scores are unknown: {type(error).__name__}: {error})"
            return replace(different, text=text)
        return replace(different, ours=ours, theirs=theirs)

    def _log_prob_sum(self, row: int, rows: int, sequence: Tensor) -> float:
        """Returns the sum over a sequence `[length]` with its prompt, for the input that this row belongs to.

        A greedy call is forced to generate the sequence for each input.
        """
        kwargs = {name: value for name, value in self.kwargs.items() if name not in _NOT_OF_SCORES}
        kwargs |= {"num_beams": 1, "num_return_sequences": 1, "do_sample": False, "max_new_tokens": len(sequence)}
        kwargs |= {"return_dict_in_generate": True, "output_logits": True}
        kwargs["prefix_allowed_tokens_fn"] = lambda _, input_ids: [int(sequence[len(input_ids)])]
        kwargs["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(len(sequence))])
        level = logging.get_verbosity()
        logging.set_verbosity_error()  # silences warnings about settings for beams or samples
        try:
            logits = torch.stack(replace(self, kwargs=kwargs).run().logits, dim=1)  # [inputs, steps, vocabulary_size]
        finally:
            logging.set_verbosity(level)
        log_probs = logits[row * len(logits) // rows].log_softmax(dim=-1)
        return log_probs.gather(1, sequence[-len(log_probs) :, None]).sum().item()


def _sequences(output: Any) -> Tensor | None:
    """Returns the tokens `[rows, length]` of an output; None if it has none, like a speech model's."""
    sequences = output.get("sequences") if isinstance(output, Mapping) else output
    is_tokens = isinstance(sequences, Tensor) and sequences.dim() == 2 and not sequences.is_floating_point()
    return sequences if is_tokens else None


def _tensors(output: Any) -> list[Tensor]:
    """Returns all tensors of an output, in order, except those of caches."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = [value for name, value in output.items() if name not in CACHE_NAMES]
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, (list, tuple)) else []
