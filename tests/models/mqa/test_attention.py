"""The attention is that of the paper, in float64, with any number of key heads."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from fastgen.models.mqa import MQATransformerConfig
from fastgen.models.mqa.attention import MQAAttention

HEADS, WIDTH, HEAD_DIM, ROWS, LENGTH, MEMORY = 4, 24, 6, 3, 5, 7


def attention_of(key_value_heads: int, implementation: str, layer_idx: int | None = None, causal: bool = False):
    torch.manual_seed(key_value_heads)
    config = MQATransformerConfig(
        d_model=WIDTH, num_attention_heads=HEADS, num_key_value_heads=key_value_heads, head_dim=HEAD_DIM
    )
    config._attn_implementation = implementation
    return MQAAttention(config, layer_idx, causal).double().eval()


def paper_weights(attention: MQAAttention) -> list[Tensor]:
    """`P_q, P_k, P_v, P_o`, with the scale in the first; one key head for each query head, or one without letter h."""
    q, o = attention.q_proj.weight.view(HEADS, HEAD_DIM, WIDTH), attention.o_proj.weight.view(WIDTH, HEADS, HEAD_DIM)
    keys = [module.weight.view(-1, HEAD_DIM, WIDTH).mT for module in (attention.k_proj, attention.v_proj)]
    if attention.key_value_heads == 1:
        keys = [weight[0] for weight in keys]
    else:
        keys = [weight.repeat_interleave(attention.groups, dim=0) for weight in keys]
    return [q.mT * HEAD_DIM**-0.5, *keys, o.transpose(0, 1)]


def by_einsum(x: Tensor, memory: Tensor, mask: Tensor, p_q: Tensor, p_k: Tensor, p_v: Tensor, p_o: Tensor) -> Tensor:
    """§2.3 and §3 of the paper as equations: x `[b, n, d]`, memory `[b, m, d]`, mask `[b, h, n, m]`.

    b rows, n queries, m keys, d width of the model, h heads, k and v widths of a head; `p_k` has no h in the paper.
    """
    h = "h" if p_k.dim() == 3 else ""
    q = torch.einsum("bnd,hdk->bhnk", x, p_q)
    k = torch.einsum(f"bmd,{h}dk->b{h}mk", memory, p_k)
    v = torch.einsum(f"bmd,{h}dv->b{h}mv", memory, p_v)
    weights = (torch.einsum(f"bhnk,b{h}mk->bhnm", q, k) + mask).softmax(-1)
    return torch.einsum("bhnv,hdv->bnd", torch.einsum(f"bhnm,b{h}mv->bhnv", weights, v), p_o)


@pytest.mark.parametrize("implementation", ("sdpa", "eager"))
@pytest.mark.parametrize("key_value_heads", (1, 2, 4))
@pytest.mark.parametrize("masked", (False, True))
def test_attention_is_that_of_the_papers_equations(key_value_heads, masked, implementation):
    attention = attention_of(key_value_heads, implementation)
    x, memory = (torch.randn(ROWS, n, WIDTH, dtype=torch.float64) for n in (LENGTH, MEMORY))
    mask = torch.zeros(ROWS, 1, LENGTH, MEMORY, dtype=torch.float64)
    if masked:
        mask.masked_fill_(torch.rand(mask.shape) < 0.4, -1e9)
    ours, weights = attention(x, mask if masked else None, None, memory)
    torch.testing.assert_close(ours, by_einsum(x, memory, mask, *paper_weights(attention)), atol=1e-12, rtol=0)
    if implementation == "eager":
        assert weights.shape == (ROWS, HEADS, LENGTH, MEMORY)
        torch.testing.assert_close(weights.sum(-1), torch.ones(ROWS, HEADS, LENGTH, dtype=torch.float64))


def test_the_encoders_keys_are_computed_once():
    attention = attention_of(1, "sdpa", layer_idx=0)
    x, memory = (torch.randn(ROWS, n, WIDTH, dtype=torch.float64) for n in (1, MEMORY))
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    first, _ = attention(x, None, cache, memory)
    again, _ = attention(x, None, cache, torch.full_like(memory, float("nan")))
    assert torch.equal(first, again)


@pytest.mark.parametrize("masked", (False, True))
def test_keys_are_never_expanded(masked, monkeypatch):
    """The attention function gets as many key heads as are stored, and as many query heads."""
    attention = attention_of(1, "sdpa", causal=True)
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def look(query, key, value, **kwargs):
        seen.append((query.shape[1], key.shape[1], value.shape[1], key.untyped_storage().nbytes()))
        return original(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril() if masked else None
    attention(torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64), mask)
    assert seen == [(1, 1, 1, ROWS * LENGTH * HEAD_DIM * 8)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    (
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=8"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"local_window": 0}, "local_window=0"),
    ),
)
def test_sizes_of_multi_query_models_must_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        MQATransformerConfig(**sizes)
