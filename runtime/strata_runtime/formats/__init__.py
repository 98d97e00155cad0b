"""Linear operators at the plan's precision: quantizers, packing, the reference arithmetic and the kernels.

The loader calls `make_linear` for each linear of a layer. Nothing here knows of models, stages or plans.
"""

from strata_runtime.formats.errors import PrecisionError, WeightNotFiniteError
from strata_runtime.formats.linear import COMPUTE_DTYPES, MAKERS, make_linear, stored_bytes_of
from strata_runtime.formats.quant_linear import QuantLinear

__all__ = [
    "COMPUTE_DTYPES",
    "MAKERS",
    "PrecisionError",
    "QuantLinear",
    "WeightNotFiniteError",
    "make_linear",
    "stored_bytes_of",
]
