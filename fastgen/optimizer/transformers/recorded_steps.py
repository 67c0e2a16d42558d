"""The decode steps of one loop of transformers as replays of a recording.

Arguments and masks are prepared by the library at each step; only the model's forward is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor
from transformers.cache_utils import Cache

from fastgen.optimizer.decoding.call import current_call
from fastgen.optimizer.decoding.recorded_steps import RecordedSteps
from fastgen.optimizer.decoding.static_cache import Content, StaticCache
from fastgen.optimizer.transformers import model_state
from fastgen.optimizer.transformers.padded_inputs import Padding, can_be_padded
from fastgen.optimizer.transformers.static_layers import contents_or_reasons, make_plain, take_over, with_fixed_layers

NAME = "past_key_values"


class RecordedForwards(RecordedSteps):
    """The forwards of a model with its cache, for loops with these `model_kwargs`."""

    def __init__(self, model: Any, arguments: dict[str, Any], rows: int) -> None:
        given = frozenset(name for name, value in arguments.items() if value is not None)
        super().__init__(model, model, given)
        self.rows = rows
        self.original = ref(arguments[NAME])
        self.padding = Padding(model.config.is_encoder_decoder)

    def contents_or_reasons(self, left: int) -> tuple[list[Content], list[str]]:
        cache = self.original()
        contents, reasons = contents_or_reasons(cache, cache.get_seq_length() + left)
        return contents, reasons or model_state.rows_reasons(self.model, {self.rows, current_call().inputs})

    def function_of(self, states: list[StaticCache]) -> tuple[Callable[[dict[str, Any]], Any], Cache]:
        like = self.original() if self.recording is None else self.recording.cache
        fixed, model = with_fixed_layers(like, states), ref(self.model)
        return lambda inputs: model()(**inputs, **{NAME: fixed}, return_dict=True), fixed

    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        without_cache = {name: value for name, value in inputs.items() if name != NAME}
        return self.padding.of(without_cache, self.padded_part.padding)

    def scores(self, outputs: Any) -> Tensor:
        return outputs.logits

    def can_hide(self, inputs: dict[str, Any]) -> bool:
        return can_be_padded(inputs, self.padding.is_cross)

    def moved(self) -> None:
        if (original := self.original()) is not None:
            take_over(original, self.recording.cache)

    def ended(self) -> None:
        """The cache, if anybody has kept it, becomes plain."""
        if (original := self.original()) is not None:
            make_plain(original)
