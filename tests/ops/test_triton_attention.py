"""Attention in Triton, in its interpreter without a GPU: equal to the definition in fp64."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import check_ancestors, check_exactness, check_far_masks
from python_process import run_functions
from torch import Tensor

from fastgen.ops.shared_attention import attention_by_products

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")

# rows, heads, key heads, positions, widths of keys and values, segments (copies, length), mask
CASES = {
    "prompt and generated": (8, 4, 4, 1, 16, 16, [(2, 40), (8, 7)], None),
    "prefix too": (8, 8, 2, 1, 32, 32, [(1, 30), (2, 40), (8, 7)], None),
    "bool mask": (8, 8, 2, 1, 32, 32, [(1, 30), (2, 40), (8, 7)], "bool"),
    "positions, another width of values": (6, 4, 2, 3, 24, 16, [(2, 33), (6, 5)], "added"),
    "cross-attention": (6, 6, 1, 1, 64, 64, [(3, 300)], "bool"),
    "groups of 8, several chunks": (2, 16, 2, 1, 64, 64, [(1, 150), (2, 130)], "added"),
    "one key": (4, 4, 4, 1, 16, 16, [(2, 1), (4, 1)], None),
    "width 80": (4, 8, 8, 1, 80, 80, [(1, 200), (4, 40)], "bool"),
    "three tokens": (2, 2, 2, 3, 16, 16, [(1, 20), (2, 32)], None),
    "chunks of the last segment": (2, 2, 1, 1, 16, 16, [(1, 40), (2, 300)], "bool"),
    "many positions": (4, 2, 2, 70, 16, 16, [(1, 9), (4, 12)], "added"),
}


def case(name: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor | None]:
    rows, heads, kv_heads, positions, width, value_width, segments, kind = CASES[name]
    generator = torch.Generator().manual_seed(len(name))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = random(rows, heads, positions, width)
    keys = [random(copies, kv_heads, length, width) for copies, length in segments]
    values = [random(copies, kv_heads, length, value_width) for copies, length in segments]
    if kind is None:
        return query, keys, values, None
    mask = random(rows, heads if kind == "added" else 1, positions, sum(length for _, length in segments))
    mask[0] = 9.0  # the first row sees nothing
    return query, keys, values, mask < 1 if kind == "bool" else mask.masked_fill(mask >= 1, float("-inf"))


@contextmanager
def allocations() -> Iterator[list[tuple[int, ...]]]:
    """Yields the sizes of tensors that `new_empty` allocates."""
    allocated, new_empty = [], Tensor.new_empty

    def noted(tensor: Tensor, sizes: Any, **options: Any) -> Tensor:
        allocated.append(tuple(sizes) if isinstance(sizes, tuple) else (sizes,))
        return new_empty(tensor, sizes, **options)

    with mock.patch.object(Tensor, "new_empty", noted):
        yield allocated


def compare_all() -> None:
    from fastgen.ops import triton_attention

    for name in CASES:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
            query, keys, values, mask = case(name, dtype)
            exact = mask if mask is None or mask.dtype == torch.bool else mask.double()
            doubles = query.double(), [part.double() for part in keys], [part.double() for part in values]
            expected = attention_by_products(*doubles, exact, 0.2)
            output = triton_attention.attention(query, keys, values, mask, 0.2)
            torch.testing.assert_close(
                output.double(), expected, atol=tolerance, rtol=tolerance, msg=f"{name}, {dtype}"
            )
            assert mask is None or not output[0].any(), name


def compare_bounds() -> None:
    """Keys and values outside of the bounds are not read.

    A step of three tokens after five reads up to the last of them; the mask hides later ones of each.
    """
    from fastgen.ops import triton_attention
    from fastgen.ops.shared_attention import Bounds

    of_one = torch.zeros(1, 1, 1, 47, dtype=torch.bool)
    of_one[..., 5:44] = True
    of_three = torch.ones(3, 52, dtype=torch.bool)
    for token in range(3):
        of_three[token, 20 + 5 + token + 1 :] = False
    for name, mask, first, last in (("prompt and generated", of_one, 5, 3), ("three tokens", of_three, 0, 7)):
        query, keys, values, _ = case(name, torch.float32)
        expected = attention_by_products(query, keys, values, mask, 0.2)
        for part in (keys[1], values[1]):
            part[:, :, last + 1 :] = float("nan")
        bounds = Bounds(torch.tensor([first]), torch.tensor([last]))
        output = triton_attention.attention(query, keys, values, mask, 0.2, bounds)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def compare_ancestors() -> None:
    from fastgen.ops import triton_attention

    for dtype, mask in ((torch.float32, None), (torch.float32, "added"), (torch.float16, "bool")):
        check_ancestors(triton_attention, dtype, mask, "cpu")


def compare_far_masks() -> None:
    from fastgen.ops import triton_attention

    check_far_masks(triton_attention, torch.float32, "cpu")


def compare_parts() -> None:
    """Partial results of many positions are bounded."""
    from fastgen.ops import triton_attention

    query, keys, values, mask = case("many positions", torch.float32)
    expected = attention_by_products(query, keys, values, mask, 0.2)
    triton_attention.MOST_PARTIAL_BYTES = 1
    with allocations() as sizes:
        output = triton_attention.attention(query, keys, values, mask, 0.2)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    sums = [size[0] for size in sizes if size[1:] == (1, 16)]
    assert sums == [4 * 2 * positions for positions in (32, 32, 6)]


def count_launches() -> None:
    """A launch for each segment, and one more if the last one is summed over in chunks; few chunks are."""
    from fastgen.ops import triton_attention

    chunks = {"Llama-8B, 4 x 16 samples": (2048, 32, 512), "its generated keys": (128, 512, 128)}
    chunks |= {"BART-large, 128 x 4": (1024, 2048, 1024), "one row": (4096, 8, 256), "four beams": (512, 32, 128)}
    for name, (length, programs, chunk) in chunks.items():
        assert triton_attention._chunk(length, programs, torch.device("cpu")) == chunk, name
    for name, slots, merges in (("prompt and generated", 1, 0), ("cross-attention", 3, 1), ("prefix too", 2, 0)):
        query, keys, values, mask = case(name, torch.float32)
        with mock.patch.object(triton_attention, "_merge", mock.MagicMock()) as merge, allocations() as sizes:
            triton_attention.attention(query, keys, values, mask, 0.2)
        assert sizes[0][1] == slots and merge.__getitem__.call_count == merges, name


def compare_nan() -> None:
    """Scores that are NaN stay NaN, instead of hiding the row."""
    from fastgen.ops import triton_attention

    query, keys, values, _ = case("one key", torch.float32)
    query[1] = float("nan")
    output = triton_attention.attention(query, keys, values, None, 0.2)
    assert output[1].isnan().all() and output[0].isfinite().all()


# Widths, query heads of a key head, masks: each width with several groups, and each group with several masks.
EXACT = [(64, 1, "bool"), (64, 8, "left padding"), (80, 2, "added"), (80, 4, "left padding")]
EXACT += [(128, 4, "bool"), (128, 2, "left padding"), (256, 1, "left padding"), (256, 8, "added")]


def compare_errors() -> None:
    """Not in bfloat16, whose products the interpreter computes from the numbers' bits."""
    from fastgen.ops import triton_attention

    for dtype, (width, groups, mask) in itertools.product((torch.float32, torch.float16), EXACT):
        options = {"rows": 4, "all_lengths": [(70, 130, 5)], "kinds": [mask]}
        check_exactness(triton_attention, dtype, width, groups, "cpu", **options)


def test_grouped_heads_are_as_exact_as_torchs_attention():
    run_functions(__file__, "compare_errors", TRITON_INTERPRET="1")


def test_triton_attention_equals_the_definition():
    compared = "compare_all", "compare_bounds", "compare_ancestors", "compare_nan", "compare_far_masks"
    compared += "compare_parts", "count_launches"
    run_functions(__file__, *compared, TRITON_INTERPRET="1")


# dtype, width, queries of a tile, query heads of a key head, mask and whether it is one for all, table of ancestors,
# whether the launch merges
COMPILED = [
    ("fp16", 64, 16, 1, "none", True, False, True),
    ("bf16", 128, 64, 4, "bool", False, False, False),
    ("bf16", 128, 64, 4, "none", True, False, True),
    ("fp16", 256, 32, 8, "added", False, False, False),
    ("fp32", 128, 16, 4, "bool", False, False, True),
    ("bf16", 80, 64, 8, "bool", True, False, False),
    ("bf16", 128, 16, 8, "added", True, True, True),
    ("fp16", 256, 16, 1, "bool", False, True, True),
    ("fp16", 80, 16, 4, "none", True, True, False),
]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def compile_all() -> None:
    """Compiles what a program of each kind would use, each option with several others."""
    from triton_compile import MOST_SPILLED, compile_kernel

    from fastgen.ops import triton_attention

    kernel, masks = triton_attention._add_up, {"none": 0, "added": 1, "bool": 2}
    aligned = [name for name in kernel.arg_names if name.split("_")[0] in "qkv"]  # strides
    for architecture, (dtype, width, tile, groups, mask, one_mask, follows, merges) in itertools.product(
        MOST_SPILLED, COMPILED
    ):
        padded = triton_attention._padded(width)
        tuning = triton_attention._tuning(tile, padded, DTYPES[dtype])
        constants = {"WIDTH": width, "VALUE_WIDTH": width, "WIDTH_2": padded, "VALUE_WIDTH_2": padded, "TILE": tile}
        constants |= {"GROUPS": groups, "MASK": masks[mask], "ONE_MASK": one_mask, "BLOCK": tuning["BLOCK"]}
        constants |= {"HAS_FIRST": True, "HAS_LAST": True, "HAS_ANCESTORS": follows, "MERGES": merges}
        types = dict.fromkeys(("query", "keys", "values"), f"*{dtype}") | dict.fromkeys(("sums", "maxima"), "*fp32")
        types |= {"mask": "*u8" if mask == "bool" else f"*{dtype}", "ancestors": "*i32", "scale": "fp32"}
        types |= {"first_key": "*i64", "last_key": "*i64", "output": f"*{dtype}"}
        options = {"num_warps": tuning["num_warps"]}
        binary = compile_kernel(kernel, architecture, types, constants, aligned, **options)
        assert binary.metadata.shared <= 160 << 10, (architecture, types, constants, binary.metadata.shared)


def compile_merge() -> None:
    from triton_compile import MOST_SPILLED, compile_kernel

    from fastgen.ops import triton_attention

    for architecture, (dtype, width, slots) in itertools.product(MOST_SPILLED, [("bf16", 80, 4), ("fp16", 256, 32)]):
        constants = {"VALUE_WIDTH": width, "VALUE_WIDTH_2": triton_attention._padded(width), "BLOCK": slots}
        types = {"sums": "*fp32", "maxima": "*fp32", "output": f"*{dtype}"}
        compile_kernel(triton_attention._merge, architecture, types, constants, ("o_row", "o_head", "o_position"))


def test_triton_attention_compiles_without_a_gpu(tmp_path):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run_functions(__file__, "compile_all", "compile_merge", **environment)
