"""Operations on tensors; they know no host library. `kernels()` returns the implementations of each, see kernel.py.

The shared libraries of `csrc/` are bound with ctypes. They include no torch header, so that one build works with every
version of torch.

Tests: tests/ops/test_kernel.py, tests/ops/test_no_repeat_ngram.py, tests/ops/test_no_repeat_ngram_build.py
"""

from __future__ import annotations

import ctypes
import functools
from importlib import import_module
from importlib.util import find_spec

from fastgen.ops.kernel import Kernel

# The module that defines each operation's KERNELS, or "module:name" if they have another name.
OPERATIONS = {
    "shared attention": "shared_attention",
    "flash attention": "cpu_attention",
    "cpu linear": "cpu_linear",
    "fused activation": "activations:LOOKUP_KERNELS",
    "GELU": "activations:GELU_KERNELS",
    "layer norm": "norms:LAYER_KERNELS",
    "RMS norm": "norms:RMS_KERNELS",
    "beam top k": "beams",
    "move rows": "beams:MOVE_KERNELS",
    "checksums": "checksums",
    "no-repeat n-gram": "no_repeat_ngram.kernels",
}


def kernels() -> dict[str, tuple[Kernel, ...]]:
    """Returns the kernels of each operation by its name, torch's own last."""
    if not find_spec("torch"):
        return dict.fromkeys(OPERATIONS, (Kernel("all", lambda: ["torch is not installed"], lambda: None),))
    kernels_of = {}
    for operation, path in OPERATIONS.items():
        module, _, name = path.partition(":")
        kernels_of[operation] = getattr(import_module(f"{__name__}.{module}"), name or "KERNELS")
    return kernels_of


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """Returns the shared library at a module's dotted name. Raises OSError if it is missing or cannot be loaded."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise OSError("not built")
    return ctypes.CDLL(spec.origin)


def load_reasons(name: str) -> list[str]:
    """Returns why a library cannot be used; empty if it can."""
    try:
        load(name)
    except OSError as error:
        return [str(error)]
    return []
