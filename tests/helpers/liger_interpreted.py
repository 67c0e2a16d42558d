"""Makes Triton's interpreter run Liger's kernels on a CPU; to be imported with TRITON_INTERPRET=1."""

import liger_kernel.ops.rms_norm
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from fastgen.ops import liger
from fastgen.optimizer.transformers import small_kernels

_convert = interpreter._implicit_cvt


def _converted(argument: object) -> object:
    """Converts floats, too, as a GPU's launcher does."""
    if type(argument) is not float:
        return _convert(argument)
    return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)


@triton.jit
def _rsqrt(number):
    return 1.0 / tl.sqrt(number)


interpreter._implicit_cvt = _converted
liger_kernel.ops.rms_norm.rsqrt = _rsqrt  # the interpreter has no functions of libdevice
liger.unsupported_reasons = list
small_kernels.DEVICE = "cpu"
