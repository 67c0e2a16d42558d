"""Random queries, keys and values for the tests of attention, and the comparison of a kernel with torch."""

import itertools

import torch
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._pytree import tree_map

from fastgen.ops.kernel import tolerance
from fastgen.ops.shared_attention import Bounds, attention_by_products, follow_ancestors

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
    """Compares a kernel with attention in fp64. options: of its `run`."""
    with torch.no_grad():
        assert kernel.supports(query, keys, values, mask)
        output = kernel.run(query, keys, values, mask, scale, **options)
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


def check_far_masks(kernel, dtype, device):
    """Rows of a mask may be more than 2^31 numbers apart; memory that is not touched takes no space on a CPU."""
    rows, stride = 10, 1 << 28
    query = torch.arange(rows * 16.0, device=device).sin().to(dtype).view(rows, 1, 1, 16)
    states = [
        torch.arange(copies * 20 * 16.0, device=device).cos().to(dtype).view(copies, 1, 20, 16) for copies in (1, rows)
    ]
    mask = torch.empty((rows - 1) * stride + 40, dtype=torch.bool, device=device)
    mask = mask.as_strided((rows, 1, 1, 40), (stride, 40, 40, 1))
    mask[:] = torch.arange(400, device=device).view(rows, 1, 1, 40) % 3 > 0
    output = kernel.attention(query, states, states, mask, 0.2)
    doubles = [part.double() for part in states]
    expected = attention_by_products(query.double(), doubles, doubles, mask, 0.2)
    torch.testing.assert_close(output.double(), expected, atol=2e-3, rtol=2e-3)


# Lengths of segments: a prompt; a prompt and generated keys; a prefix of all rows before them.
ALL_LENGTHS = ((300,), (200, 33), (70, 130, 5))


def check_exactness(
    kernel, dtype, width, groups, device, rows=8, all_lengths=ALL_LENGTHS, kinds=(None, "bool", "added", "left padding")
):
    """Compares errors against fp64: at most 1e-5 in fp32, in half precision 1.1 times that of torch's attention.

    kernel: the module. groups: query heads for each key head.
    """
    random = torch.Generator(device).manual_seed(0)
    inputs, kv_heads = 2, 2
    for lengths, kind in itertools.product(all_lengths, kinds):
        copies = [inputs, rows][: len(lengths)] if len(lengths) < 3 else [1, inputs, rows]

        def states(*sizes):
            return torch.randn(sizes, dtype=dtype, device=device, generator=random)

        query = states(rows, kv_heads * groups, 1, width)
        keys, values = ([states(n, kv_heads, size, width) for n, size in zip(copies, lengths)] for _ in range(2))
        mask, hidden_rows = None, 0
        if kind == "left padding":  # the prompts' first keys, fewer of the second input's
            mask = torch.ones(rows, 1, 1, sum(lengths), dtype=torch.bool, device=device)
            start = sum(lengths[: copies.index(inputs)])
            mask[: rows // inputs, ..., start : start + 65] = mask[rows // inputs :, ..., start : start + 3] = False
        elif kind:
            mask = torch.rand(rows, 1, 1, sum(lengths), device=device, generator=random) > 0.3
            mask[0], hidden_rows = False, 1
        if kind == "added":
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
        whole = []
        for parts in (keys, values):
            repeated = [part.repeat_interleave(rows // part.shape[0], 0) for part in parts]
            whole.append(torch.cat(repeated, 2).repeat_interleave(groups, 1))
        with torch.no_grad():
            output = kernel.attention(query, keys, values, mask, width**-0.5)
            doubles, exact_mask = [part.double() for part in whole], mask.double() if kind == "added" else mask
            expected = functional.scaled_dot_product_attention(query.double(), *doubles, exact_mask)
            torchs = functional.scaled_dot_product_attention(query, *whole, mask)
        assert not output[:hidden_rows].any()
        output, torchs, expected = (result[hidden_rows:].double() for result in (output, torchs, expected))
        error, torchs_error = ((result - expected).norm() / expected.norm() for result in (output, torchs))
        most = 1e-5 if dtype == torch.float32 else 1.1 * torchs_error + 1e-5
        assert error <= most, (dtype, width, groups, lengths, kind, error, torchs_error)


def check_ancestors(kernel, dtype, mask, device):
    """Compares attention through a table of ancestors with attention to keys and values that were moved."""
    case = random_case((4, 2, 1), (30, 20, 70), 2, 2, 1, 32, 16, mask, dtype)
    query, keys, values, mask = (
        tree_map(lambda states: None if states is None else states.to(device), part) for part in case
    )
    rows, _, length, _ = keys[-1].shape
    table = torch.randint(0, rows, (rows, length), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    bounds = Bounds(torch.tensor([0], device=device), torch.tensor([length - 1], device=device), table.to(device))
    moved_keys, moved_values = follow_ancestors(keys, bounds), follow_ancestors(values, bounds)
    for row, position in ((0, 0), (rows - 1, length - 1)):
        assert torch.equal(moved_keys[-1][row, :, position], keys[-1][int(table[row, position]), :, position])
    with torch.no_grad():
        output = kernel.attention(query, keys, values, mask, 0.2, bounds)
        expected = kernel.attention(query, moved_keys, moved_values, mask, 0.2, bounds._replace(ancestors=None))
    assert not torch.equal(output, kernel.attention(query, keys, values, mask, 0.2))
    torch.testing.assert_close(output, expected, rtol=tolerance("product", dtype), atol=tolerance("product", dtype))
