"""Sizes of BART and T5 with fewer key heads than query heads.

They have a file of their own because configurations of transformers need `AutoModel`, which is complete later than
`AutoConfig`.

Tests: tests/models/mqa/test_pooling.py
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, BartConfig, T5Config


class GroupedBartConfig(BartConfig):
    """BART's configuration with `num_key_value_heads`, the number of key heads of every attention layer."""

    model_type = "grouped_bart"

    def __init__(self, num_key_value_heads: int = 1, **kwargs: Any) -> None:
        import fastgen.models.mqa.grouped  # noqa: F401  # AutoModel finds the model

        super().__init__(**kwargs)
        self.num_key_value_heads = num_key_value_heads


class GroupedT5Config(T5Config):
    """T5's configuration with `num_key_value_heads`, the number of key heads of every attention layer."""

    model_type = "grouped_t5"

    def __init__(self, num_key_value_heads: int = 1, **kwargs: Any) -> None:
        import fastgen.models.mqa.grouped  # noqa: F401  # AutoModel finds the model

        super().__init__(**kwargs)
        self.num_key_value_heads = num_key_value_heads


for _configuration in (GroupedBartConfig, GroupedT5Config):
    AutoConfig.register(_configuration.model_type, _configuration, exist_ok=True)
