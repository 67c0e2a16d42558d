"""Products of rows with large weights on a CPU, in fp32, through oneDNN where that is faster than BLAS.

product.py   what can be multiplied this way, and the product
choice.py    which of the two is faster, measured once for each kind of product
kept.py      the file in the user's cache folder that keeps this for later processes
"""

from fastgen.ops.cpu_linear.choice import is_faster
from fastgen.ops.cpu_linear.product import can_multiply, cpu_linear, machine_reasons

__all__ = ["can_multiply", "cpu_linear", "is_faster", "machine_reasons"]
