"""Parity with the unpatched library, fp32, for tiny models of every architecture in `architectures.py`."""

from __future__ import annotations

import pytest
import torch
from architecture_parity import MODES, expected_sharing, measure, shares
from architectures import ARCHITECTURES, BY_NAME, Scale
from python_process import REPOSITORY

from fastgen.ops import x86
from fastgen.testing import ANY_SIZE, costs, watched

LONG = Scale(length=45, positions=512, frames=160)  # so many queries have flash attention
# They attend by other functions than torch's, or to fewer pieces of an image.
WITHOUT_FLASH_ATTENTION = """
    bloom xglm openai-gpt gemma2 gpt_oss mamba falcon_mamba roformer trocr mpt gpt_neo gptj codegen falcon
    falcon-alibi llama-eager longt5 nllb-moe led mvp fsmt switch_transformers bigbird_pegasus pegasus_x bart-eager
    prophetnet speech_to_text vit-gpt2 vit-trocr
""".split()
TABLE = REPOSITORY / "docs" / "architectures.md"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.id)
def test_tokens_and_scores_are_those_of_the_unpatched_library(architecture, share_always):
    model, inputs = architecture.model(), architecture.inputs()
    for mode in MODES:
        parity = measure(model, inputs, mode)
        assert parity.tokens_equal, mode
        assert parity.largest_score_difference < 1e-4, mode
        assert shares(parity.report) == expected_sharing(architecture, mode), mode


@pytest.mark.skipif(bool(x86.machine_reasons()), reason=f"x86 kernels: {x86.machine_reasons()}")
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.id)
def test_prompts_and_encoders_of_all_models_have_flash_attention(architecture, share_always):
    with costs(**ANY_SIZE):
        parity = measure(architecture.model(LONG), architecture.inputs(LONG), "beam search", 8)
    assert parity.tokens_equal and parity.largest_score_difference < 1e-4
    assert bool(parity.report.kernels["flash attention"]) is (architecture.id not in WITHOUT_FLASH_ATTENTION)


def test_the_table_in_the_documentation_lists_every_architecture():
    rows = [line.split("|")[1].strip() for line in TABLE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    assert rows[1:] == [architecture.id for architecture in ARCHITECTURES]


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_shared_keys_are_never_reordered_and_held_once(name, monkeypatch, share_always):
    architecture = BY_NAME[name]
    model, inputs = architecture.model(), architecture.inputs()
    reordered, index_select = [], torch.Tensor.index_select

    def record(tensor, dim, index):
        reordered.append(tensor)
        return index_select(tensor, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", record)
    with watched("make a cache") as made:
        model.generate(**inputs, num_beams=3, max_new_tokens=6)
    caches = [call.args[0] for call in made]
    shared = [states for cache in caches for prompt in cache.prompts for pair in prompt for states in pair]
    assert shared, "nothing was shared"
    for states in shared:
        assert states.shape[0] == 2  # inputs, where stock keeps 6 rows
        assert states.untyped_storage().nbytes() == states.numel() * states.element_size()
        storage = states.untyped_storage().data_ptr()
        assert all(tensor.untyped_storage().data_ptr() != storage for tensor in reordered)
    lengths = {length for cache in caches for generated in cache.generated for length in generated.lengths}
    assert lengths == {5}  # the last of 6 tokens is never computed upon
