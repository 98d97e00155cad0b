"""Checkpoints in float8 with a scale for each block: a linear X is quantized where `X.weight_scale_inv` lies beside `X.weight`.

`weight_scale_inv` is what codes are multiplied by, whatever its name says (DeepSeek-V3's, arXiv 2412.19437).
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from strata_planner.contract.formats import FormatName
from strata_planner.contract.quantization import BlockFloat8
from strata_runtime.errors import InputError
from strata_runtime.formats.float8.block_linear import BlockFloat8Linear
from strata_runtime.formats.float8.blocks import BlockFloat8Weight, checked_blocks
from strata_runtime.loading.stored_linears import QuantizedCheckpoint

_WEIGHT, _SCALES = ".weight", ".weight_scale_inv"


class BlockFloat8Checkpoint(QuantizedCheckpoint):
    """Of one `quantization`."""

    def __init__(self, folder: Path, quantization: BlockFloat8) -> None:
        super().__init__(folder)
        self.quantization = quantization

    def find_parts(self, stored: tuple[str, ...]) -> dict[str, dict[str, str]]:
        names = [key.removesuffix(_SCALES) for key in stored if key.endswith(_SCALES)]
        return {name + _WEIGHT: {"codes": name + _WEIGHT, "scales": name + _SCALES} for name in names}

    def format_of(self, weight_key: str) -> FormatName:
        name = weight_key.removesuffix(_WEIGHT)
        how = self.quantization.of(name)
        if how is None:
            raise InputError(
                f"{name}{_SCALES} is in the checkpoint, and quantization_config says that {name} is not quantized: "
                "correct its `modules_to_not_convert`, or fetch the checkpoint again"
            )
        return how.format

    def dequantized(self, weight_key: str) -> torch.Tensor:
        return self._stored(weight_key).dequantized()

    def read_linear(self, tensors: Mapping[str, str], shape: tuple[int, int], dtype: torch.dtype) -> BlockFloat8Linear:
        key = tensors["weight"]
        stored = self._stored(key)
        if tuple(stored.codes.shape) != shape:
            raise InputError(
                f"the checkpoint does not fit config.json: {key} has the shape {list(stored.codes.shape)}, {list(shape)} is expected"
            )
        return BlockFloat8Linear(stored, self.read_bias(tensors, dtype))

    def _stored(self, weight_key: str) -> BlockFloat8Weight:
        read = self.read_parts(weight_key, None)
        return checked_blocks(weight_key, read["codes"], read["scales"], self.quantization.block)
