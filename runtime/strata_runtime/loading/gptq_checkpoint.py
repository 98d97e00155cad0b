"""Checkpoints of GPTQ: a linear X is quantized where `X.qweight` lies in the checkpoint; bits, groups and zeros are as quantization_config says."""

from collections.abc import Mapping
from pathlib import Path

import torch

from strata_planner.contract.formats import FormatName
from strata_planner.contract.quantization import ModuleQuantization, Quantization
from strata_runtime.errors import InputError
from strata_runtime.formats.gptq import PARTS, GptqCodes, GptqTensors, decode, store
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from strata_runtime.loading.stored_linears import QuantizedCheckpoint

_WEIGHT, _CODES = ".weight", ".qweight"


class GptqCheckpoint(QuantizedCheckpoint):
    """Of one `quantization`."""

    def __init__(self, folder: Path, quantization: Quantization) -> None:
        super().__init__(folder)
        self.quantization = quantization

    def find_parts(self, stored: tuple[str, ...]) -> dict[str, dict[str, str]]:
        there = set(stored)
        names = [key.removesuffix(_CODES) for key in stored if key.endswith(_CODES)]
        return {
            name + _WEIGHT: {part: f"{name}.{part}" for part in PARTS if f"{name}.{part}" in there} for name in names
        }

    def format_of(self, weight_key: str) -> FormatName:
        return self._quantization_of(weight_key).format

    def dequantized(self, weight_key: str) -> torch.Tensor:
        return self._codes(weight_key, None).dequantized()

    def read_linear(self, tensors: Mapping[str, str], shape: tuple[int, int], dtype: torch.dtype) -> GptqLinear:
        key = tensors["weight"]
        codes = self._codes(key, shape)
        stored = store(codes, group=self._quantization_of(key).group, name=key.removesuffix(_WEIGHT))
        return GptqLinear(stored, self.read_bias(tensors, dtype))

    def _quantization_of(self, weight_key: str) -> ModuleQuantization:
        name = weight_key.removesuffix(_WEIGHT)
        how = self.quantization.of(name)
        if how is None:
            raise InputError(
                f"{name}{_CODES} is in the checkpoint, and quantization_config says that {name} is not quantized: "
                "correct its `dynamic` or `modules_in_block_to_quantize`, or fetch the checkpoint again"
            )
        return how

    def _codes(self, weight_key: str, shape: tuple[int, int] | None) -> GptqCodes:
        # float32 holds scales of any 16-bit type exactly
        name = weight_key.removesuffix(_WEIGHT)
        parts = GptqTensors.of(name, self.read_parts(weight_key, torch.float32))
        return decode(name, parts, self._quantization_of(weight_key), self.quantization.zeros, shape)
