"""Any-precision quantization: one parent of 8 bits per weight whose most significant k bits are a good k-bit model.

Any-Precision LLM, arXiv 2402.10517, section 4. `quantize_any` is called by `linear` for formats made while a checkpoint streams in, by `strata quantize`
with the Fisher diagonals of `tools.calibration.fisher`, and by benchmarks. What comes out is stored and multiplied as `PlanesWeight`.
"""

from strata_runtime.formats.any_precision.parent import AnyParent
from strata_runtime.formats.any_precision.quantize import quantize_any
from strata_runtime.formats.any_precision.refit import refit

__all__ = ["AnyParent", "quantize_any", "refit"]
