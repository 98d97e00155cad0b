"""Quantizing a model by GPTQ (Frantar et al., arXiv 2210.17323): `python -m strata_runtime.tools.gptq MODEL`."""
