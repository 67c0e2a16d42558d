"""Attention in Triton on a GPU equals the definition in fp64, and is as exact as torch's own attention."""

import pytest
import torch
from attention_cases import check_ancestors, check_exactness
from versions import needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_attention_is_as_exact_as_torchs(dtype, width, groups):
    from fastgen.ops import triton_attention

    check_exactness(triton_attention, dtype, width, groups, "cuda")


@pytest.mark.parametrize("mask", [None, "bool", "added"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_table_of_ancestors_finds_keys_in_other_rows(dtype, mask):
    from fastgen.ops import triton_attention

    check_ancestors(triton_attention, dtype, mask, "cuda")
