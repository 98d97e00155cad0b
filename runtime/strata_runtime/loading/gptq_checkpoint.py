"""Checkpoints of GPTQ: a linear X is quantized where `X.qweight` lies in the checkpoint; bits, groups and zeros are as quantization_config says."""

from collections.abc import Mapping
from math import gcd

import torch

from strata_planner.contract.quantization import Quantization
from strata_runtime.errors import InputError
from strata_runtime.formats.gptq import PARTS, GptqCodes, GptqTensors, decode, store
from strata_runtime.formats.gptq.codes import group_of_inputs
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from strata_runtime.loading.stored_linears import WEIGHT, QuantizedCheckpoint
from strata_runtime.ranges import Range
from strata_runtime.ranks.cut import WHOLE, LinearCut


class GptqCheckpoint(QuantizedCheckpoint):
    mark = ".qweight"
    choosing_fields = "`dynamic` or `modules_in_block_to_quantize`"
    quantization: Quantization

    def parts_of(self, name: str, stored: frozenset[str]) -> dict[str, str]:
        return {part: f"{name}.{part}" for part in PARTS if f"{name}.{part}" in stored}

    def dequantized(self, weight_key: str) -> torch.Tensor:
        return self._codes(weight_key, None).dequantized()

    def read_linear(
        self, tensors: Mapping[str, str], shape: tuple[int, int], dtype: torch.dtype, cut: LinearCut = WHOLE
    ) -> GptqLinear:
        key = tensors["weight"]
        codes, group, name = self._codes(key, shape), self.quantization_of(key).group, key.removesuffix(WEIGHT)
        if cut.columns is not None:
            codes, group = _cut_inputs(name, codes, group, cut.columns)
        stored = store(codes.part(cut.rows, None), group=group, name=name)
        return GptqLinear(stored, self.read_bias(tensors, dtype, cut))

    def _codes(self, weight_key: str, shape: tuple[int, int] | None) -> GptqCodes:
        # float32 holds scales of any 16-bit type exactly
        name = weight_key.removesuffix(WEIGHT)
        parts = GptqTensors.of(name, self.read_parts(weight_key, torch.float32))
        return decode(name, parts, self.quantization_of(weight_key), self.quantization.zeros, shape)


def _cut_inputs(name: str, codes: GptqCodes, group: int | None, columns: Range) -> tuple[GptqCodes, int]:
    """Some inputs, with the inputs of their groups: fewer than before where the part begins or ends within one. Raises InputError for an order of inputs
    of their own (act-order), by which those of one group lie on all ranks.
    """
    size = min(group or codes.in_features, codes.in_features)
    if not torch.equal(codes.groups, group_of_inputs(codes.in_features, size)):
        raise InputError(
            f"{name}: its inputs are grouped in an order of their own (desc_act), by which ranks cannot share them: use stages of one device each"
        )
    within = gcd(size, columns[0])
    return codes.part(None, columns).narrowed(within), within
