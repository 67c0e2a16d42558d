"""Products of rows with large weights on a CPU, in the way that is the fastest.

product.py    what can be multiplied in other ways than through BLAS, and the ways
few_rows.py   one of them: products for few rows, written in C++
autotune.py   which is the fastest, measured once for each shape, and the file with these measurements
"""

from fastgen.ops.cpu_linear.autotune import fastest, kind_of
from fastgen.ops.cpu_linear.product import (
    BLAS,
    FEW_ROWS,
    ONEDNN,
    can_multiply,
    machine_reasons,
    ways,
)

__all__ = [
    "BLAS",
    "FEW_ROWS",
    "ONEDNN",
    "can_multiply",
    "fastest",
    "kind_of",
    "machine_reasons",
    "ways",
]
