"""Settings of all tests on a GPU: captured steps, CUDA and Triton kernels on, exact products without TF32."""

from unittest import mock

import pytest
import torch

from fastgen.config import CONFIG


@pytest.fixture(autouse=True, scope="module")
def switched_on():
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # for the process: some versions of torch refuse to read it again
    with mock.patch.object(CONFIG, "cuda_graphs", "on"), mock.patch.object(CONFIG, "cuda_kernels", True):
        yield
