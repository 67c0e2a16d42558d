"""Marks of tests that need a GPU, or what older versions of a library cannot do, or do wrong by themselves."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest
import torch
from packaging.version import Version
from transformers.integrations import peft as integration

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def needs(library: str, lowest: str, why: str) -> pytest.MarkDecorator:
    """Returns a mark that skips if `library` is older than `lowest`, because of `why`."""
    return pytest.mark.skipif(Version(version(library)) < Version(lowest), reason=f"{library} before {lowest}: {why}")


def has_peft() -> bool:
    """Returns whether the installed peft is new enough for transformers."""
    try:
        return Version(version("peft")) >= Version(getattr(integration, "MIN_PEFT_VERSION", "0"))
    except PackageNotFoundError:
        return False


needs_peft = pytest.mark.skipif(not has_peft(), reason="no peft that this transformers can use")
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
