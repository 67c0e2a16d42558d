"""Arguments of a decode step are padded for keys that have hidden positions before them."""

from __future__ import annotations

import torch

from fastgen.optimizer.transformers.padded_inputs import Padding


def test_what_stays_the_same_is_padded_once_for_each_padding():
    inputs = {"attention_mask": torch.ones(2, 3), "encoder_outputs": (torch.ones(2, 3, 4),)}
    padding = Padding(is_cross=True)
    first, again, longer = (padding.of(inputs, positions) for positions in (2, 2, 4))
    assert first["attention_mask"].tolist() == 2 * [[0, 0, 1, 1, 1]]
    assert all(again[name] is first[name] for name in inputs)
    assert longer["attention_mask"].shape == (2, 7) and longer["encoder_outputs"][0].shape == (2, 7, 4)
    assert padding.of({**inputs, "attention_mask": torch.zeros(2, 3)}, 4)["attention_mask"].sum() == 0
