"""Checkpoints of GPTQ: a linear X is quantized where `X.qweight` lies in the checkpoint; bits, groups and zeros are as quantization_config says."""

from collections.abc import Mapping

import torch

from strata_planner.contract.quantization import Quantization
from strata_runtime.formats.gptq import PARTS, GptqCodes, GptqTensors, decode, store
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from strata_runtime.loading.stored_linears import WEIGHT, QuantizedCheckpoint


class GptqCheckpoint(QuantizedCheckpoint):
    mark = ".qweight"
    choosing_fields = "`dynamic` or `modules_in_block_to_quantize`"
    quantization: Quantization

    def parts_of(self, name: str, stored: frozenset[str]) -> dict[str, str]:
        return {part: f"{name}.{part}" for part in PARTS if f"{name}.{part}" in stored}

    def dequantized(self, weight_key: str) -> torch.Tensor:
        return self._codes(weight_key, None).dequantized()

    def read_linear(self, tensors: Mapping[str, str], shape: tuple[int, int], dtype: torch.dtype) -> GptqLinear:
        key = tensors["weight"]
        codes = self._codes(key, shape)
        stored = store(codes, group=self.quantization_of(key).group, name=key.removesuffix(WEIGHT))
        return GptqLinear(stored, self.read_bias(tensors, dtype))

    def _codes(self, weight_key: str, shape: tuple[int, int] | None) -> GptqCodes:
        # float32 holds scales of any 16-bit type exactly
        name = weight_key.removesuffix(WEIGHT)
        parts = GptqTensors.of(name, self.read_parts(weight_key, torch.float32))
        return decode(name, parts, self.quantization_of(weight_key), self.quantization.zeros, shape)
