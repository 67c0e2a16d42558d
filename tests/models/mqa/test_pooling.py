"""Key heads are pooled by their means, in multi-query Transformers, BART, T5, Llama and folders."""

import pytest
import torch
from models.mqa.test_models import tiny_model
from python_process import run_programs
from tiny_models import padded, tiny, token_ids
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5PreTrainedModel

from fastgen.models.mqa import (
    GroupedBartForConditionalGeneration,
    GroupedT5ForConditionalGeneration,
    MQATransformerForConditionalGeneration,
    pool_kv_heads,
)
from fastgen.models.mqa.__main__ import main

HEADS = 4
T5_HAS_SDPA = getattr(T5PreTrainedModel, "_supports_sdpa", False)
NO_SDPA = "T5 has no sdpa in this version of transformers"
T5 = pytest.param("t5", marks=pytest.mark.skipif(not T5_HAS_SDPA, reason=NO_SDPA))
MODELS = ("mqa", "bart", T5, "llama", "qwen2", "qwen3")
FOLDERS = {
    "bart": GroupedBartForConditionalGeneration,
    "t5": GroupedT5ForConditionalGeneration,
    "mqa": MQATransformerForConditionalGeneration,
}


def model_of(name: str) -> nn.Module:
    if name == "mqa":
        return tiny_model(MQATransformerForConditionalGeneration, key_value_heads=HEADS)
    if name in ("bart", "t5"):
        return tiny(name)
    return tiny(name, num_key_value_heads=HEADS)


def logits_of(model: nn.Module) -> torch.Tensor:
    inputs = padded(9, 5, side="right" if model.config.is_encoder_decoder else "left")
    target = {"decoder_input_ids": token_ids(2, 4)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(**inputs, **target).logits[:, -1]


def projections(model: nn.Module) -> dict[str, nn.Parameter]:
    wanted = ("k_proj", "v_proj", "k", "v")
    return {name: weight for name, weight in model.named_parameters() if name.split(".")[-2] in wanted}


def with_equal_heads(model: nn.Module, distinct: int) -> nn.Module:
    """Makes key heads equal, so that only `distinct` of them differ."""
    with torch.no_grad():
        for weight in projections(model).values():
            heads = weight.view(distinct, HEADS // distinct, -1)
            heads.copy_(heads[:, :1].expand_as(heads).clone())
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("heads", (1, 2, 4))
def test_equal_heads_pool_to_the_same_model(name, heads):
    model = with_equal_heads(model_of(name), heads)
    pooled = pool_kv_heads(model, heads)
    assert pooled.config.num_key_value_heads == heads
    torch.testing.assert_close(logits_of(pooled), logits_of(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_pooled_heads_are_means(name):
    model = model_of(name)
    pooled = projections(pool_kv_heads(model, 2))
    for key, weight in projections(model).items():
        heads = weight.view(2, 2, -1)
        torch.testing.assert_close(pooled[key].view(2, -1), (heads[:, 0] + heads[:, 1]) / 2)
        assert 2 * pooled[key].numel() == weight.numel()


POOL = """
import runpy, sys

assert "torch" in sys.modules and "fastgen" not in sys.modules
sys.argv[1:] = ["pool", "{folder}/2", "{folder}/1", "--num_key_value_heads", "1"]
runpy.run_module("fastgen.models.mqa", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_folder_is_pooled_by_a_command(tmp_path):
    """Each class is pooled twice, the second time by a process that has not seen it before."""
    models = {name: model_of(name) for name in FOLDERS if name != "t5" or T5_HAS_SDPA}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name / "4")
        (tmp_path / name / "4" / "vocabulary.txt").write_text("a\n")
        folders = [str(tmp_path / name / heads) for heads in "42"]
        assert main(["pool", *folders, "--num_key_value_heads", "2"]) == 0
    run_programs([POOL.format(folder=tmp_path / name) for name in models], tmp_path)
    for name, model in models.items():
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name / "1")
        assert type(loaded) is FOLDERS[name]
        torch.testing.assert_close(logits_of(loaded), logits_of(pool_kv_heads(model, 1)))
        assert (tmp_path / name / "1" / "vocabulary.txt").read_text() == "a\n"
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["1", "2", "4"]


def test_folders_that_cannot_be_pooled_are_named(tmp_path, capsys):
    model_of("bart").save_pretrained(tmp_path / "in")
    (tmp_path / "out").mkdir()
    for out, heads, message in (
        ("out", "1", f"OUT {tmp_path / 'out'} exists already"),
        ("new", "3", "num_key_value_heads=3 does not divide"),
    ):
        assert main(["pool", str(tmp_path / "in"), str(tmp_path / out), "--num_key_value_heads", heads]) == 1
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_pooled_causal_models_are_the_librarys(tmp_path):
    pooled = pool_kv_heads(model_of("llama"), 1)
    pooled.save_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(pooled))


NOT_DIVIDED = "num_key_value_heads=3 does not divide"


@pytest.mark.parametrize(
    ("name", "heads", "message"),
    [
        *(pytest.param(name, 3, NOT_DIVIDED, marks=T5.marks if name == "t5" else ()) for name in (*FOLDERS, "llama")),
        ("gpt2", 1, "no num_key_value_heads"),
        ("phi3", 1, "qkv_proj"),
    ],
)
def test_models_that_cannot_be_pooled_are_named(name, heads, message):
    model = tiny(name) if name == "gpt2" else model_of(name)
    with pytest.raises(ValueError, match=message):
        pool_kv_heads(model, heads)
