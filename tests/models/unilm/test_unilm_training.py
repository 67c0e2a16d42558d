"""Batches of the masked-target objective, their loss and gradients."""

import pytest
import torch
from unilm_slow import SIZES, sees, tiny_unilm

from fastgen.models.unilm import UniLMConfig, masked_target_batch

CONFIG = UniLMConfig(**SIZES, source_type_id=1, target_type_id=0)
SOURCES, TARGETS = [[1, 11, 12, 13, 2], [1, 14, 2]], [[21, 22], [23, 24, 25, 26]]
MASK, END, PAD = CONFIG.mask_token_id, CONFIG.eos_token_id, CONFIG.pad_token_id


def batch(**arguments) -> dict[str, torch.Tensor]:
    return masked_target_batch(CONFIG, SOURCES, TARGETS, generator=torch.Generator().manual_seed(0), **arguments)


def test_all_target_tokens_may_be_masked():
    masked = batch(mask_probability=1.0)
    assert masked["input_ids"].tolist() == [[1, 11, 12, 13, 2, MASK, MASK, MASK], [1, 14, 2, *[MASK] * 5]]
    assert masked["labels"].tolist() == [[-100] * 5 + [21, 22, END], [-100] * 3 + [23, 24, 25, 26, END]]
    assert masked["token_type_ids"].tolist() == [[1] * 5 + [0] * 3, [1] * 3 + [0] * 5]


def test_one_token_of_each_row_is_masked_at_least():
    masked = batch(mask_probability=0.0)
    assert ((masked["labels"] != -100).sum(dim=1) == 1).all()
    assert torch.equal(masked["labels"] != -100, masked["input_ids"] == MASK)


def test_a_share_of_tokens_but_no_padding_is_masked():
    sources, targets = [[1, 5, 2]] * 200, [[6] * (row % 20 + 1) for row in range(200)]
    masked = masked_target_batch(CONFIG, sources, targets, 0.4, torch.Generator().manual_seed(3))
    lengths = torch.tensor([len(target) + 1 for target in targets])
    chosen = masked["labels"] != -100
    assert 0.36 < chosen.sum() / lengths.sum() < 0.46
    assert not chosen[:, :3].any()
    past_the_end = torch.arange(24) >= lengths[:, None] + 3
    assert not chosen[past_the_end].any() and (masked["input_ids"][past_the_end] == PAD).all()


def test_a_seed_gives_the_same_batch():
    first, second = batch(), batch()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_mask_of_a_batch_is_sequence_to_sequence():
    mask = batch()["attention_mask"]
    for row, (source, length) in enumerate(((5, 8), (3, 8))):
        expected = [[sees("sequence-to-sequence", q, k, source, length) for k in range(8)] for q in range(8)]
        assert mask[row].tolist() == expected


def test_the_loss_is_the_mean_over_masked_tokens():
    model, inputs = tiny_unilm(), batch()
    with torch.no_grad():
        output = model(**inputs)
    chosen = inputs["labels"] != -100
    log_probs = output.logits[chosen].log_softmax(-1)
    expected = -log_probs.gather(1, inputs["labels"][chosen][:, None]).mean()
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((SOURCES, TARGETS, 1.5), "mask_probability=1.5"),
        ((SOURCES, TARGETS[:1]), "2 sources and 1 targets"),
        (([[1] * 40], [[5] * 8]), "of 49 tokens together: at most 48"),
    ],
)
def test_wrong_arguments_of_batches_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        masked_target_batch(CONFIG, *arguments)


def test_labels_do_not_go_with_an_appended_mask():
    with pytest.raises(ValueError, match="labels with append_mask=True"):
        tiny_unilm()(**batch(), append_mask=True)


@pytest.mark.parametrize("bins", (0, 8))
def test_all_weights_have_gradients(bins):
    model = tiny_unilm(rel_pos_bins=bins).train()
    model(**batch()).loss.backward()
    for name, parameter in model.named_parameters():
        if not name.endswith("key.bias"):  # softmax does not see what is added to all scores of a query
            assert parameter.grad is not None and parameter.grad.any(), name


def test_the_loss_under_autocast_agrees_up_to_rounding():
    model = tiny_unilm(rel_pos_bins=8)
    with torch.no_grad():
        expected = model(**batch()).loss
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch()).loss
    torch.testing.assert_close(loss.float(), expected, atol=0.1, rtol=0.05)
