"""Tiny models of every architecture in `architectures.py` agree with the unpatched library in fp32."""

import pytest
from architecture_parity import MODES, expected_sharing, measure, shares
from architectures import ARCHITECTURES, Scale
from auto_parity import AT_REAL_SIZE, read_table
from hooks import ANY_SIZE, costs
from simd_kernels import needs_library

ON_A_CPU = ("gpt2", "llama", "gemma2", "mixtral", "mamba", "bart", "t5", "whisper")
LONG = Scale(length=45, positions=512, frames=160)  # long enough for flash attention
# Models that attend by other functions than torch's, or to fewer pieces of an image.
WITHOUT_FLASH_ATTENTION = """
    bloom xglm openai-gpt gemma2 gpt_oss mamba falcon_mamba roformer trocr mpt gpt_neo gptj codegen falcon
    falcon-alibi llama-eager longt5 nllb-moe led mvp fsmt switch_transformers bigbird_pegasus pegasus_x bart-eager
    prophetnet speech_to_text vit-gpt2 vit-trocr
""".split()


# On a twin of a GPU, tests/gpu/test_parity_cuda.py compares all of them in the same way.
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=[] if each.id in ON_A_CPU else pytest.mark.covered_by_slow, id=each.id)
        for each in ARCHITECTURES
    ],
)
def test_tokens_and_scores_are_those_of_the_unpatched_library(architecture, share_always):
    model, inputs = architecture.model(), architecture.inputs()
    for mode in MODES:
        parity = measure(model, inputs, mode)
        assert parity.tokens_equal, mode
        assert parity.largest_score_difference < 1e-4, mode
        assert shares(parity.report) == expected_sharing(architecture, mode), mode


@needs_library
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.id)
def test_prompts_and_encoders_of_all_models_have_flash_attention(architecture, share_always):
    with costs(**ANY_SIZE):
        parity = measure(architecture.model(LONG), architecture.inputs(LONG), "beam search", 8)
    assert parity.tokens_equal and parity.largest_score_difference < 1e-4
    assert bool(parity.report.kernels["flash attention"]) is (architecture.id not in WITHOUT_FLASH_ATTENTION)


def test_the_table_in_the_documentation_lists_every_architecture():
    assert list(read_table(AT_REAL_SIZE)) == [architecture.id for architecture in ARCHITECTURES]
