"""Attention in Triton on a GPU equals the definition in fp64, and is as exact as torch's own attention."""

import itertools

import pytest
import torch
from torch.nn import functional
from versions import needs_gpu

pytestmark = needs_gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_attention_is_as_exact_as_torchs(dtype, width, groups):
    from fastgen.ops import triton_attention

    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, dtype=dtype, device="cuda", generator=generator)

    for lengths, masked in itertools.product([(300,), (200, 33), (70, 130, 5)], (None, "bool", "added")):
        rows, kv_heads = 8, 2
        copies = [8 if i == len(lengths) - 1 and i else 2 - (i == 0 and len(lengths) == 3) for i in range(len(lengths))]
        query = random(rows, kv_heads * groups, 1, width)
        keys = [random(count, kv_heads, length, width) for count, length in zip(copies, lengths)]
        values = [random(count, kv_heads, length, width) for count, length in zip(copies, lengths)]
        mask = None
        if masked:
            mask = torch.rand(rows, 1, 1, sum(lengths), device="cuda", generator=generator) > 0.3
            mask[0] = False
        if masked == "added":
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
        with torch.no_grad():
            output = triton_attention.attention(query, keys, values, mask, width**-0.5)
        whole = [
            torch.cat([part.repeat_interleave(rows // part.shape[0], 0) for part in parts], 2).repeat_interleave(
                groups, 1
            )
            for parts in (keys, values)
        ]
        exact_mask = mask.double() if masked == "added" else mask
        expected = functional.scaled_dot_product_attention(query.double(), *(x.double() for x in whole), exact_mask)
        stock = functional.scaled_dot_product_attention(query, *whole, mask)
        seen = slice(1 if masked else 0, None)
        error = [(result.double() - expected)[seen].norm() / expected[seen].norm() for result in (output, stock)]
        assert error[0] < (1e-5 if dtype == torch.float32 else 1.1 * error[1] + 1e-5), (lengths, masked, error)
        assert not masked or not output[0].any()
