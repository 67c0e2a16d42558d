"""Products of rows with large weights on a CPU, through oneDNN where that is faster than BLAS.

product.py   what can be multiplied this way, and the product
choice.py    which of the two is faster, measured once for each kind of product
packing.py   packed copies of weights, and after how many products one pays, measured once as well
kept.py      the file in the user's cache folder that keeps this for later processes
"""

from fastgen.ops.cpu_linear.choice import is_faster, kind_of
from fastgen.ops.cpu_linear.kept import Kind
from fastgen.ops.cpu_linear.packing import MIN_PRODUCTS, TRIAL_AFTER, PackedWeight, Trial, is_known, pays_after
from fastgen.ops.cpu_linear.product import can_multiply, cpu_linear, machine_reasons

__all__ = [
    "MIN_PRODUCTS",
    "TRIAL_AFTER",
    "Kind",
    "PackedWeight",
    "Trial",
    "can_multiply",
    "cpu_linear",
    "is_faster",
    "is_known",
    "kind_of",
    "machine_reasons",
    "pays_after",
]
