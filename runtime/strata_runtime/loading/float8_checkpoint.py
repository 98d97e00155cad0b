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
from strata_runtime.ranges import Range, Ranges
from strata_runtime.ranks.cut import WHOLE, LinearCut, moved


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
        found = self.shape(self.parts[key]["codes"])
        if found != shape:
            raise InputError(
                f"the checkpoint does not fit config.json: {key} has the shape {list(found)}, {list(shape)} is expected"
            )
        if cut.rows is None:
            stored = self._stored(key)
            stored = stored if cut == WHOLE else stored.part(None, cut.columns)
        else:
            stored = self._stored_rows(key, cut.rows, cut.columns)
        return BlockFloat8Linear(stored, self.read_bias(tensors, dtype, cut))

    def _stored(self, weight_key: str) -> BlockFloat8Weight:
        read = self.read_parts(weight_key, None)
        return checked_blocks(weight_key, read["codes"], read["scales"], self.quantization.block)

    def _stored_rows(self, weight_key: str, rows: Ranges, columns: Range | None) -> BlockFloat8Weight:
        """Some outputs; no more is read than the blocks that lie between the first and the last of them."""
        names, block = self.parts[weight_key], self.quantization.block
        count, blocks = (self.shape(names[part])[0] for part in ("codes", "scales"))
        if blocks != -(-count // block[0]):
            return self._stored(weight_key)  # which says what is wrong
        first, last = rows[0][0] // block[0], -(-rows[-1][1] // block[0])
        begin, end = first * block[0], min(last * block[0], count)
        codes, scales = (
            self.read_some(names[part], own) for part, own in (("codes", (begin, end)), ("scales", (first, last)))
        )
        some = checked_blocks(weight_key, codes, scales, block)
        return some.part(tuple(moved(each, -begin) for each in rows), columns)
