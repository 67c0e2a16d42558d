"""Gives a model's projection to the vocabulary to `vocabulary_linear`, without touching the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fastgen.ops.vocabulary_linear import can_multiply, vocabulary_linear


class FastVocabularyProjection(TorchFunctionMode):
    """Inside this context, in this thread, `linear` with this very weight is a `vocabulary_linear`.

    usage: counts the products that went this way, under "vocabulary_linear".
    """

    def __init__(self, weight: Tensor, usage: Counter[str]) -> None:
        super().__init__()
        self.weight, self.usage = weight, usage

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is functional.linear and not kwargs and args[1] is self.weight and can_multiply(args[0], self.weight):
            self.usage["vocabulary_linear"] += 1
            return vocabulary_linear(*args)
        return func(*args, **kwargs) if kwargs else func(*args)
