"""Linear operators at the plan's precision: quantizers, packing, the reference arithmetic and the kernels.

The loader calls `make_linear` for each linear of a layer. Nothing here knows of models, stages or plans.
"""

from strata_runtime.precision.errors import PrecisionError, WeightNotFiniteError
from strata_runtime.precision.linear import COMPUTE_DTYPES, QuantLinear, make_linear, stored_bytes_of

__all__ = ["COMPUTE_DTYPES", "PrecisionError", "QuantLinear", "WeightNotFiniteError", "make_linear", "stored_bytes_of"]
