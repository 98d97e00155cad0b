"""Making the any-precision copy of a model: `python -m strata_runtime.tools.quantize`, called by `strata quantize`."""
