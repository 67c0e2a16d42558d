"""The masks are those of Figure 1 of the paper, and the model sees exactly what they allow."""

import pytest
import torch
from tiny_models import token_ids
from unilm_slow import sees, slow_logits, tiny_unilm

from fastgen.models.unilm import KINDS, attention_masks

LENGTHS, SOURCES = torch.tensor([7, 4, 6]), torch.tensor([3, 2, 6])


def masks(kind: str) -> torch.Tensor:
    return attention_masks(kind, LENGTHS, SOURCES if kind == "sequence-to-sequence" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_each_pair_of_a_mask_is_that_of_the_paper(kind):
    mask = masks(kind)
    assert mask.shape == (3, 7, 7) and mask.dtype == torch.bool
    for row, (length, source) in enumerate(zip(LENGTHS.tolist(), SOURCES.tolist())):
        for query in range(length):
            for key in range(7):
                assert mask[row, query, key] == sees(kind, query, key, source, length), (row, query, key)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_slow_definition(kind):
    model, mask, ids = tiny_unilm().double(), masks(kind), token_ids(3, 7)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    for row, length in enumerate(LENGTHS.tolist()):
        alone = slow_logits(model, ids[row, :length].tolist(), [0] * length, mask[row, :length, :length])
        torch.testing.assert_close(logits[row, :length], alone)


@pytest.mark.parametrize(
    "kind, sources, words",
    [
        ("right-to-left", None, "kind='right-to-left': choose from bidirectional"),
        ("sequence-to-sequence", None, "source_lengths=None"),
        ("bidirectional", SOURCES, 'only "sequence-to-sequence"'),
    ],
)
def test_wrong_arguments_of_masks_are_refused(kind, sources, words):
    with pytest.raises(ValueError, match=words):
        attention_masks(kind, LENGTHS, sources)
