"""Random queries, keys and values for the tests of attention, and the comparison of a kernel with torch."""

import torch
from hypothesis import strategies as st

from fastgen.ops.kernel import tolerance
from fastgen.ops.shared_attention import attention_by_products

ALL_WIDTHS = (1, 3, 8, 16, 20, 33, 64, 72, 80, 128)
# Rows for each copy of a segment, the first segment's first: each is a multiple of the next.
ALL_COPIES = ((1,), (2,), (4,), (2, 1), (4, 1), (1, 1), (4, 2, 1), (6, 3, 1))
ALL_MASKS = (None, "added", "per head", "bool", "one for all", "one column")
WIDTHS, COPIES, MASKS = map(st.sampled_from, (ALL_WIDTHS, ALL_COPIES, ALL_MASKS))


def random_case(copies, lengths, groups, kv_heads, length, width, value_width, mask, dtype, inputs=2, seed=0):
    random = torch.Generator().manual_seed(seed)
    rows, heads = copies[0] * inputs, groups * kv_heads

    def states(*sizes):  # heads and positions change places in memory, as models have them
        return torch.randn(sizes, generator=random).transpose(1, 2).contiguous().transpose(1, 2).to(dtype)

    query = states(rows, heads, length, width)
    keys = [states(rows // each, kv_heads, n, width) for each, n in zip(copies, lengths)]
    values = [states(rows // each, kv_heads, n, value_width) for each, n in zip(copies, lengths)]
    total = sum(segment.shape[2] for segment in keys)
    shapes = {"added": (rows, 1, length), "per head": (1, heads, length), "one for all": (1, 1, 1)}
    added = torch.randn(*shapes.get(mask, (rows, 1, 1)), total, generator=random)
    added[torch.rand(added.shape, generator=random) < 0.3] = -torch.inf
    if mask == "bool":
        added = added > -0.5
    elif mask == "one column":
        added = added[..., :1]
    return query, keys, values, None if mask is None else added if mask == "bool" else added.to(dtype)


def check_attention(kernel, query, keys, values, mask, scale=0.3, **options):
    """Compares a kernel with attention in fp64. kernel: the module; options: of its `attention`."""
    with torch.no_grad():
        assert kernel.can_attend(query, keys, values, mask)
        output = kernel.attention(query, keys, values, mask, scale, **options)
        wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
        if options.get("is_causal"):
            wide = torch.ones(query.shape[2], keys[0].shape[2], dtype=torch.bool).tril()
        expected = attention_by_products(
            query.double(), [part.double() for part in keys], [part.double() for part in values], wide, scale
        )
    assert output.dtype == query.dtype and output.shape == expected.shape
    assert output.transpose(1, 2).is_contiguous()
    atol = tolerance("product", query.dtype) * (expected.abs().max() + 1)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=atol.item())
