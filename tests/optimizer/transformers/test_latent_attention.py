"""Multi-head latent attention: latents that rows share are kept, and expanded into keys and values, once per input."""

import pytest
import torch
from architectures import DROP, INDEXED, LATENT
from hooks import watched
from parity import assert_equal_caches, assert_same, compared, run_both
from reports import PROMPT, capturing, is_shared, left_alone_because, replays
from tiny_models import BEAMS, BOTH, padded, tiny
from torch import nn

from fastgen.optimizer.transformers.models.latent_attention import expanding_in_parts

pytestmark = pytest.mark.usefixtures("share_always")

HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "q_lora_rank": DROP}
MODELS = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "minicpm3": {},
    "youtu": {},
    "axk1": {},
    "longcat_flash": {
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "head_dim": 4,
    },
    "bailing_hybrid": {**HYBRID, "head_dim": 8},
    "kimi_linear": {**HYBRID, "linear_head_dim": 8, "linear_num_heads": 4},
}


def latent(name: str) -> nn.Module:
    return tiny(name, **LATENT | MODELS[name])


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_latents_are_expanded_in_parts(name, arguments):
    both = compared(latent(name), padded(9, 5), **arguments)
    assert is_shared(both.report, PROMPT)
    assert set(both.report.kernels) == {"scaled_dot_product_attention"}
    assert_equal_caches(both.stock.past_key_values, both.fast.past_key_values)


@BOTH
def test_eager_attention_multiplies_segments(arguments):
    model = latent("deepseek_v3")
    model.set_attn_implementation("eager")
    assert set(assert_same(model, padded(9, 5), **arguments).kernels) == {"matmul"}


@BOTH
@pytest.mark.parametrize("name", ("deepseek_v32", "glm_moe_dsa"))
def test_layers_with_an_index_share_the_prefill(name, arguments):
    assert is_shared(assert_same(tiny(name, **LATENT | INDEXED), padded(9, 5), **arguments))


@BOTH
def test_captured_steps_serve_the_next_call(arguments):
    model = latent("deepseek_v3")
    with capturing(), watched("capture a step") as captures:
        for _ in range(2):
            both = run_both(lambda: model.generate(**padded(9, 5), **arguments))
            assert torch.equal(both.stock, both.fast) and replays(both.report) and is_shared(both.report, PROMPT)
    assert len(captures) == 1


def test_calls_of_two_threads_may_end_in_any_order():
    model = latent("deepseek_v3")
    attention = model.model.layers[0].self_attn
    first, second = (expanding_in_parts(model.modules()) for _ in range(2))
    first.__enter__()
    second.__enter__()
    assert "expand_kv" in vars(attention)
    first.__exit__(None, None, None)
    assert is_shared(assert_same(model, padded(9, 5), **BEAMS), PROMPT)
    second.__exit__(None, None, None)
    assert "expand_kv" not in vars(attention)


@pytest.mark.parametrize("place", ("class", "module"))
def test_an_expansion_of_user_code_gets_whole_latents(place, monkeypatch):
    model = latent("deepseek_v3")
    attention = model.model.layers[0].self_attn
    owner = type(attention) if place == "class" else attention
    original, seen = owner.expand_kv, []

    def expand_kv(*latents):
        seen.append(len(latents[-1]))
        return original(*latents)

    monkeypatch.setattr(owner, "expand_kv", expand_kv)
    report = assert_same(model, padded(9, 5), **BEAMS)
    assert left_alone_because(report, "USER_CODE", "expand_kv") and 6 in seen
