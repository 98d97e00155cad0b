"""Checkpoints in float8 with a scale for each block: a linear X is quantized where `X.weight_scale_inv` lies beside `X.weight`.

`weight_scale_inv` is what codes are multiplied by, whatever its name says (DeepSeek-V3's, arXiv 2412.19437).
"""

from collections.abc import Mapping

import torch

from strata_planner.contract.quantization import BlockFloat8
from strata_runtime.errors import InputError
from strata_runtime.formats.float8.block_linear import BlockFloat8Linear
from strata_runtime.formats.float8.blocks import BlockFloat8Weight, checked_blocks
from strata_runtime.loading.stored_linears import WEIGHT, QuantizedCheckpoint
from strata_runtime.ranks.cut import WHOLE, LinearCut


class BlockFloat8Checkpoint(QuantizedCheckpoint):
    mark = ".weight_scale_inv"
    choosing_fields = "`modules_to_not_convert`"
    quantization: BlockFloat8

    def parts_of(self, name: str, stored: frozenset[str]) -> dict[str, str]:  # noqa: ARG002  both are always needed
        return {"codes": name + WEIGHT, "scales": name + self.mark}

    def dequantized(self, weight_key: str) -> torch.Tensor:
        return self._stored(weight_key).dequantized()

    def read_linear(
        self, tensors: Mapping[str, str], shape: tuple[int, int], dtype: torch.dtype, cut: LinearCut = WHOLE
    ) -> BlockFloat8Linear:
        key = tensors["weight"]
        stored = self._stored(key)
        if tuple(stored.codes.shape) != shape:
            raise InputError(
                f"the checkpoint does not fit config.json: {key} has the shape {list(stored.codes.shape)}, {list(shape)} is expected"
            )
        if cut != WHOLE:
            stored = stored.part(cut.rows, cut.columns)
        return BlockFloat8Linear(stored, self.read_bias(tensors, dtype, cut))

    def _stored(self, weight_key: str) -> BlockFloat8Weight:
        read = self.read_parts(weight_key, None)
        return checked_blocks(weight_key, read["codes"], read["scales"], self.quantization.block)
