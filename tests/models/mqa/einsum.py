"""The attention of "Fast Transformer Decoding" as equations, one letter per dimension: §2.3, §2.4 and §3.

b rows, n queries, m keys, d width of the model, h heads, k width of a head. Weights `[h, d, k]`; keys and values have a
dimension h in multi-head attention and none in multi-query attention. The scale is folded into the queries' weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


def batched(x: Tensor, memory: Tensor, mask: Tensor, p_q: Tensor, p_k: Tensor, p_v: Tensor, p_o: Tensor) -> Tensor:
    """x `[b, n, d]`, memory `[b, m, d]`, mask `[b, h, n, m]`; `p_k` is `[h, d, k]` or `[d, k]`; result `[b, n, d]`."""
    h = "h" if p_k.dim() == 3 else ""
    q = torch.einsum("bnd,hdk->bhnk", x, p_q)
    k = torch.einsum(f"bmd,{h}dk->b{h}mk", memory, p_k)
    v = torch.einsum(f"bmd,{h}dv->b{h}mv", memory, p_v)
    weights = (torch.einsum(f"bhnk,b{h}mk->bhnm", q, k) + mask).softmax(-1)
    return torch.einsum("bhnv,hdv->bnd", torch.einsum(f"bhnm,b{h}mv->bhnv", weights, v), p_o)


def incremental(
    x: Tensor, past_k: Tensor, past_v: Tensor, p_q: Tensor, p_k: Tensor, p_v: Tensor, p_o: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One position x `[b, d]` after those in `past_k` `[b, (h,) m, k]`; the result `[b, d]`, and the longer past."""
    h = "h" if p_k.dim() == 3 else ""
    q = torch.einsum("bd,hdk->bhk", x, p_q)
    k = torch.cat([past_k, torch.einsum(f"bd,{h}dk->b{h}k", x, p_k).unsqueeze(-2)], dim=-2)
    v = torch.cat([past_v, torch.einsum(f"bd,{h}dv->b{h}v", x, p_v).unsqueeze(-2)], dim=-2)
    weights = torch.einsum(f"bhk,b{h}mk->bhm", q, k).softmax(-1)
    return torch.einsum("bhv,hdv->bd", torch.einsum(f"bhm,b{h}mv->bhv", weights, v), p_o), k, v
