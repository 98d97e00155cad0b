"""GPTQ (Frantar et al., arXiv 2210.17323): reading and writing its checkpoints, running them at their own bits, and quantizing by it.

The loader calls `decode` and `store` for each linear of a GPTQ checkpoint and makes a `gptq_linear.GptqLinear` of it; `python -m
strata_runtime.tools.gptq` quantizes a model. Kernels import the stored form from here, so nothing here imports kernels.
"""

from strata_runtime.formats.gptq.codes import GptqCodes
from strata_runtime.formats.gptq.tensors import PARTS, GptqTensors, decode, encode
from strata_runtime.formats.gptq.weight import GptqWeight, store

__all__ = ["PARTS", "GptqCodes", "GptqTensors", "GptqWeight", "decode", "encode", "store"]
