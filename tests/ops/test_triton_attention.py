"""Attention in Triton, in its interpreter without a GPU: equal to the definition in fp64."""

import itertools
import os
import re
import subprocess
from importlib.util import find_spec

import pytest
import torch
from attention_cases import check_ancestors, check_exactness
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
    """Keys and values outside of the bounds are not read."""
    from fastgen.ops import triton_attention
    from fastgen.ops.shared_attention import Bounds

    query, keys, values, _ = case("prompt and generated", torch.float32)
    mask = torch.zeros(1, 1, 1, 47, dtype=torch.bool)
    mask[..., 5:44] = True
    expected = attention_by_products(query, keys, values, mask, 0.2)
    for part in (keys[1], values[1]):
        part[:, :, 4:] = float("nan")
    output = triton_attention.attention(query, keys, values, mask, 0.2, Bounds(torch.tensor([5]), torch.tensor([3])))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def compare_ancestors() -> None:
    from fastgen.ops import triton_attention

    for dtype, mask in ((torch.float32, None), (torch.float32, "added"), (torch.float16, "bool")):
        check_ancestors(triton_attention, dtype, mask, "cpu")


def compare_nan() -> None:
    """Scores that are NaN stay NaN, instead of hiding the row."""
    from fastgen.ops import triton_attention

    query, keys, values, _ = case("one key", torch.float32)
    query[1] = float("nan")
    output = triton_attention.attention(query, keys, values, None, 0.2)
    assert output[1].isnan().all() and output[0].isfinite().all()


def compare_errors() -> None:
    """Not in bfloat16, whose products the interpreter computes from the numbers' bits."""
    from fastgen.ops import triton_attention

    for dtype, width, groups in itertools.product((torch.float32, torch.float16), (64, 80, 128, 256), (4, 8)):
        options = {"rows": 4, "all_lengths": [(70, 130, 5)], "kinds": ["left padding"]}
        check_exactness(triton_attention, dtype, width, groups, "cpu", **options)


def test_grouped_heads_are_as_exact_as_torchs_attention():
    run_functions(__file__, "compare_errors", TRITON_INTERPRET="1")


def test_triton_attention_equals_the_definition():
    run_functions(__file__, "compare_all", "compare_bounds", "compare_ancestors", "compare_nan", TRITON_INTERPRET="1")


def compile_all() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fastgen.ops import triton_attention

    kernel = triton_attention._add_up
    shapes = [("fp16", 64, 16, False), ("bf16", 128, 64, False), ("fp16", 256, 32, False), ("fp32", 128, 16, False)]
    shapes += [("bf16", 128, 16, True), ("fp16", 256, 16, True)]  # a tile of the heads of one row
    for architecture, (dtype, width, tile, follows) in itertools.product((80, 90, 100), shapes):
        torch_type = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        constants = {"WIDTH": width, "VALUE_WIDTH": width, "GROUPS": 4, "MASK": 2, "ONE_MASK": False, "TILE": tile}
        constants |= {
            "HAS_FIRST": True,
            "HAS_LAST": True,
            "HAS_ANCESTORS": follows,
            "WIDTH_2": width,
            "VALUE_WIDTH_2": width,
        }
        tuning = triton_attention._tuning(tile, width, torch_type)
        options = {"num_warps": tuning.pop("num_warps")}
        types = dict.fromkeys(("query", "keys", "values"), f"*{dtype}") | dict.fromkeys(("sums", "maxima"), "*fp32")
        types |= {"mask": "*u8", "ancestors": "*i32", "first_key": "*i64", "last_key": "*i64", "scale": "fp32"}
        constants |= tuning
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        aligned = [
            index
            for index, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or name.split("_")[0] in "qkv"
        ]
        source = ASTSource(
            kernel,
            signature,
            {(kernel.arg_names.index(name),): value for name, value in constants.items()},
            {(index,): [["tt.divisibility", 16]] for index in aligned},
        )
        binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert binary.asm["cubin"]
        assert binary.metadata.shared <= 160 << 10, (dtype, width, binary.metadata.shared)
        used = resources(binary.asm["ptx"], architecture)
        spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", used)]
        most = 32 if architecture == 80 else 0  # 16 and 32 bytes of 255 registers, for one of these shapes
        assert max(spilled) <= most, (architecture, dtype, width, follows, used)


def resources(ptx: str, architecture: int) -> str:
    """Returns what Triton's assembler says of a kernel: registers, bytes that do not fit into them, shared memory."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if architecture >= 100 else knobs.nvidia.ptxas
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    command = [tool.path, "-v", f"-arch={target}", "-o", os.devnull, "/dev/stdin"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr


def test_triton_attention_compiles_without_a_gpu(tmp_path):
    run_functions(__file__, "compile_all", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
