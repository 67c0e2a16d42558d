"""Attention in Triton on a GPU equals the definition in fp64, and is as exact as torch's own attention."""

import pytest
import torch
from attention_cases import check_ancestors, check_exactness, check_far_masks
from versions import needs_gpu

pytestmark = needs_gpu


# fp32 is left to torch's products. Each combination compiles about four kernels.
@pytest.mark.parametrize(
    ("dtype", "width", "groups"),
    [
        (torch.bfloat16, 64, 1), (torch.bfloat16, 64, 8), (torch.bfloat16, 80, 2), (torch.bfloat16, 128, 1),
        (torch.bfloat16, 128, 4), (torch.bfloat16, 128, 8), (torch.bfloat16, 256, 2), (torch.float16, 64, 1),
        (torch.float16, 64, 4), (torch.float16, 80, 8), (torch.float16, 128, 2), (torch.float16, 256, 4),
    ],
)  # fmt: skip
def test_attention_is_as_exact_as_torchs(dtype, width, groups):
    from fastgen.ops import triton_attention

    check_exactness(triton_attention, dtype, width, groups, "cuda")


@pytest.mark.parametrize("mask", [None, "bool", "added"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_table_of_ancestors_finds_keys_in_other_rows(dtype, mask):
    from fastgen.ops import triton_attention

    check_ancestors(triton_attention, dtype, mask, "cuda")


def test_rows_of_a_mask_may_be_far_apart():
    from fastgen.ops import triton_attention

    check_far_masks(triton_attention, torch.float16, "cuda")
