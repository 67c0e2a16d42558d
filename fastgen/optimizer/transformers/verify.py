"""`fastgen.verify` of a model of transformers.
Tests: tests/optimizer/test_verify.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.utils import logging

from fastgen.ops.tolerances import tolerance
from fastgen.optimizer.decoding.verify_once import Difference
from fastgen.optimizer.transformers.verification import ABSENT, first_token_difference

# Settings of how tokens are chosen: the scores of a sequence that is there already are those of a greedy call.
_CHOICE = ("num_beams", "num_return_sequences", "do_sample", "early_stopping", "length_penalty", "streamer")
_LENGTH = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "stopping_criteria")
_OUTPUT = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass
class TransformersCall:
    """`model.generate(inputs, **kwargs)`, or `model.generate(**inputs, **kwargs)` where inputs are a mapping."""

    model: Any
    inputs: Any
    kwargs: dict[str, Any]
    host: str = "transformers"

    def run(self) -> Any:
        return self._generate(self.inputs, self.kwargs)

    def _generate(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(inputs, Mapping):
            return self.model.generate(**inputs, **kwargs)
        return self.model.generate(inputs, **kwargs)

    def rows_of(self, output: Any) -> int:
        return next(iter(_tensors(output))).shape[0]

    def difference(self, ours: Any, theirs: Any) -> Difference | None:
        """Of tokens first, with the scores of both sequences by the model as it is; then of all other tensors."""
        tokens = _sequences(ours), _sequences(theirs)
        if tokens[0] is not None and tokens[1] is not None:
            start = self._generated_from()
            found = first_token_difference(*tokens, start)
            if found is not None:
                return found if found.row is None else self._with_scores(found, tokens, start)
        for index, (one, other) in enumerate(zip(_tensors(ours), _tensors(theirs))):
            if one.shape != other.shape:
                return Difference(f"output {index} has shape {tuple(one.shape)} instead of {tuple(other.shape)}")
            atol = tolerance("logits", one.dtype) * max(other.nan_to_num(0, 0, 0).abs().max().item(), 1)
            if one.is_floating_point() and not torch.allclose(one, other, rtol=0, atol=atol, equal_nan=True):
                return Difference(f"output {index} differs by {(one - other).abs().max().item():.2g}")
        return None

    def _generated_from(self) -> int:
        """The column of the sequences with the first generated token."""
        if self.model.config.is_encoder_decoder:
            started = self.kwargs.get("decoder_input_ids")
            return 1 if started is None else started.shape[1]
        inputs = self.inputs.get("input_ids") if isinstance(self.inputs, Mapping) else self.inputs
        return 0 if inputs is None else inputs.shape[1]

    def _with_scores(self, found: Difference, tokens: tuple[Tensor, Tensor], start: int) -> Difference:
        """The sums of the log-probabilities of both rows: of beams whole, of others up to where they differ."""
        beams = self.kwargs.get("num_beams", self.model.generation_config.num_beams) or 1
        length = None if beams > 1 else start + found.step + 1
        rows = [sequences[found.row, :length] for sequences in tokens]
        try:
            ours, theirs = (self._log_prob_sum(found.row, tokens[0].shape[0], row[row != ABSENT]) for row in rows)
        except (TypeError, ValueError) as error:  # a generate of the model's own that takes no processors
            return replace(found, text=f"{found.text} (scores are not known: {type(error).__name__}: {error})")
        return replace(found, ours=ours, theirs=theirs)

    def _log_prob_sum(self, row: int, rows: int, sequence: Tensor) -> float:
        """Of the tokens of a sequence `[length]` that the model generates for the input of this row."""
        forced = _Forced(sequence)
        kwargs = {name: value for name, value in self.kwargs.items() if name not in (*_CHOICE, *_LENGTH, *_OUTPUT)}
        kwargs["logits_processor"] = LogitsProcessorList([*(kwargs.get("logits_processor") or []), forced])
        kwargs["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(len(sequence))])
        kwargs |= {"num_beams": 1, "num_return_sequences": 1, "do_sample": False, "max_new_tokens": len(sequence)}
        level = logging.get_verbosity()
        logging.set_verbosity_error()  # of settings that are meant for beams or samples
        try:
            self._generate(_input_of(self.inputs, row, rows), kwargs)
        finally:
            logging.set_verbosity(level)
        return forced.log_prob_sum


class _Forced(LogitsProcessor):
    """Lets a greedy call of one row generate a sequence `[length]`, the prompt included, and sums what that scores."""

    def __init__(self, sequence: Tensor) -> None:
        self.sequence = sequence
        self.log_prob_sum = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.sequence[input_ids.shape[1]]
        self.log_prob_sum += scores.log_softmax(dim=-1)[0, token].item()
        forced = torch.full_like(scores, -torch.inf)
        forced[:, token] = 0
        return forced


def _input_of(inputs: Any, row: int, rows: int) -> Any:
    """The input that a row of the outputs belongs to, alone."""
    if not isinstance(inputs, Mapping):
        index = row // (rows // inputs.shape[0])
        return inputs[index : index + 1]
    count = next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor))
    index = row // (rows // count)

    def of_input(value: Any) -> Any:
        return value[index : index + 1] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value

    return {name: of_input(value) for name, value in inputs.items()}


def _sequences(output: Any) -> Tensor | None:
    """The tokens `[rows, length]` of an output; None if it has none, as that of a model which speaks."""
    found = output.get("sequences") if isinstance(output, Mapping) else output
    is_tokens = isinstance(found, Tensor) and found.dim() == 2 and not found.is_floating_point()
    return found if is_tokens else None


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, in order; those of caches are left out."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = [value for name, value in output.items() if name != "past_key_values"]
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, (list, tuple)) else []
