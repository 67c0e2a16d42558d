"""State dicts with published names are read in each layout; weights that do not fit are named."""

import logging

import pytest
import torch
from tiny_models import token_ids
from unilm_slow import SIZES, tiny_unilm

from fastgen.models.unilm import UniLMConfig, load_published

LAYER_NAMES = """
    attention.self.query.weight attention.self.query.bias attention.self.key.weight attention.self.key.bias
    attention.self.value.weight attention.self.value.bias attention.output.dense.weight attention.output.dense.bias
    attention.output.LayerNorm.weight attention.output.LayerNorm.bias intermediate.dense.weight intermediate.dense.bias
    output.dense.weight output.dense.bias output.LayerNorm.weight output.LayerNorm.bias
""".split()
OTHER_NAMES = """
    bert.embeddings.word_embeddings.weight bert.embeddings.position_embeddings.weight
    bert.embeddings.token_type_embeddings.weight bert.embeddings.LayerNorm.weight bert.embeddings.LayerNorm.bias
    cls.predictions.bias cls.predictions.transform.dense.weight cls.predictions.transform.dense.bias
    cls.predictions.transform.LayerNorm.weight cls.predictions.transform.LayerNorm.bias cls.predictions.decoder.weight
""".split()


def published(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def has_equal_logits(model, other) -> bool:
    with torch.no_grad():
        return torch.equal(*(each(token_ids(2, 6), append_mask=True).logits for each in (model, other)))


def test_names_are_the_published_ones():
    layers = {f"bert.encoder.layer.{index}.{name}" for index in range(3) for name in LAYER_NAMES}
    assert tiny_unilm().state_dict().keys() == layers | set(OTHER_NAMES)


def test_a_file_is_read_into_a_new_model(tmp_path, caplog):
    model = tiny_unilm()
    torch.save(published(model), tmp_path / "unilm.bin")
    loaded, missing, unexpected = load_published(UniLMConfig(**SIZES), tmp_path / "unilm.bin")
    assert not missing and not unexpected and not caplog.records
    assert not loaded.training and has_equal_logits(loaded, model)


def older_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames weights as parallel training and older versions of norms do."""
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    ends = {name: next((end for end in names if name.endswith(end)), "") for name in weights}
    return {"module." + name.removesuffix(end) + names.get(end, ""): weights[name] for name, end in ends.items()}


def one_matrix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Joins query, key and value in one matrix, without a bias of keys."""
    for index in range(3):
        start = f"bert.encoder.layer.{index}.attention.self."
        weights[start + "qkv_linear.weight"] = torch.cat(
            [weights.pop(f"{start}{name}.weight") for name in ("query", "key", "value")]
        )
        weights[start + "q_bias"] = weights.pop(start + "query.bias")
        weights[start + "v_bias"] = weights.pop(start + "value.bias")
        del weights[start + "key.bias"]
    return weights


def one_embedding(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves one embedding of words, which weighs the outputs as well."""
    del weights["cls.predictions.decoder.weight"]
    return weights


@pytest.mark.parametrize("layout", [dict, older_names, one_matrix, one_embedding])
@pytest.mark.parametrize("sizes", [{}, {"rel_pos_bins": 8, "type_vocab_size": 0}], ids=["version 1", "version 2"])
def test_every_layout_is_read(layout, sizes):
    model = tiny_unilm(**sizes)
    for name, weight in model.state_dict().items():
        if name.endswith("self.key.bias"):
            weight.zero_()
    loaded, missing, unexpected = load_published(model.config, layout(published(model)))
    assert not missing and not unexpected and has_equal_logits(loaded, model)


def test_missing_and_unexpected_names_are_listed(caplog):
    weights = published(tiny_unilm())
    del (
        weights["bert.encoder.layer.1.output.dense.bias"],
        weights["cls.predictions.decoder.weight"],
    )  # the latter is tied
    weights["cls.seq_relationship.weight"] = torch.zeros(2, 32)
    with caplog.at_level(logging.WARNING, "fastgen"):
        _, missing, unexpected = load_published(UniLMConfig(**SIZES), weights)
    assert missing == ["bert.encoder.layer.1.output.dense.bias"]
    assert unexpected == ["cls.seq_relationship.weight"]
    assert all(name in caplog.text for name in missing + unexpected)


def test_word_embeddings_that_are_missing_are_named():
    weights = published(tiny_unilm())
    del weights["cls.predictions.decoder.weight"], weights["bert.embeddings.word_embeddings.weight"]
    _, missing, _ = load_published(UniLMConfig(**SIZES), weights)
    assert "bert.embeddings.word_embeddings.weight" in missing


def test_weights_of_another_shape_are_named():
    with pytest.raises(RuntimeError, match=r"bert\.embeddings\.position_embeddings\.weight"):
        load_published(UniLMConfig(**SIZES | {"max_position_embeddings": 64}), published(tiny_unilm()))
