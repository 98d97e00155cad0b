"""Checkpoints whose experts are in MXFP4 (OCP Microscaling Formats 1.0): 4-bit values, a power of two for each 32 of them.

Used by `load_stage` as a plain checkpoint: `X` stands for `X_blocks` and `X_scales`, and is read to the compute type, from where it is stored
as the plan says. Nothing is rounded on the way: every value has at most two significant bits.
"""

from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path

import torch

from strata_runtime.errors import InputError
from strata_runtime.loading.checkpoint import Checkpoint, TensorPlace, read_entry
from strata_runtime.ranges import Range, Ranges

_BLOCKS, _SCALES = "_blocks", "_scales"
_BIAS = 127  # of the exponents
# Codes 0 to 15: sign, two bits of exponent, one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Mxfp4Checkpoint(Checkpoint):
    """`keys` are those of the plain model. X: [experts, out, in], of blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32]."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        stored = frozenset(super().keys)
        names = (key.removesuffix(_BLOCKS) for key in stored if key.endswith(_BLOCKS))
        self._packed = frozenset(name for name in names if name + _SCALES in stored)

    @property
    def keys(self) -> tuple[str, ...]:
        hidden = {name + part for name in self._packed for part in (_BLOCKS, _SCALES)}
        return (*(key for key in super().keys if key not in hidden), *sorted(self._packed))

    def check(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        packed = [key for key in wanted if key in self._packed]
        super().check(key for key in wanted if key not in self._packed)
        super().check(name + part for name in packed for part in (_BLOCKS, _SCALES))

    def read(self, keys: Iterable[str], dtype: torch.dtype | None, device: torch.device) -> dict[str, torch.Tensor]:
        wanted = list(keys)
        tensors = super().read((key for key in wanted if key not in self._packed), dtype, device)
        for key in wanted:
            if key in self._packed:
                tensors[key] = self._experts(key, dtype or torch.bfloat16).to(device)
        return tensors

    def read_part(
        self, key: str, dtype: torch.dtype | None, rows: Ranges | None, columns: Range | None = None
    ) -> torch.Tensor:
        if key not in self._packed or rows is None or columns is not None:
            return super().read_part(key, dtype, rows, columns)
        return torch.stack(
            [self._expert(key, index, dtype or torch.bfloat16) for each in rows for index in range(*each)]
        )

    def read_rows(self, places: Sequence[TensorPlace], dtype: torch.dtype) -> torch.Tensor:
        if all(place.name not in self._packed for place in places):
            return super().read_rows(places, dtype)
        (place,) = places
        assert place.index is not None, place
        return self._expert(place.name, place.index, dtype)

    def _experts(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One after the other: what is read lies in memory beside one expert's values alone."""
        count, rows, groups, size = self._entry_of(TensorPlace(name + _BLOCKS)).shape
        experts = torch.empty((count, rows, groups * size * 2), dtype=dtype)
        for index, expert in enumerate(experts):
            expert.copy_(self._expert(name, index, dtype))
        return experts

    def _expert(self, name: str, index: int, dtype: torch.dtype) -> torch.Tensor:
        """[out, in]."""
        blocks, scales = (self._part(TensorPlace(name + part, index)) for part in (_BLOCKS, _SCALES))
        if blocks.shape[:-1] != scales.shape:
            raise InputError(
                f"{self.folder}: {name} has scales {list(scales.shape)} for blocks {list(blocks.shape)}: damaged file"
            )
        pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # the low half comes first
        values = torch.tensor(_VALUES, dtype=torch.float32)[pairs.int()]
        return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(-2).to(dtype)

    def _part(self, place: TensorPlace) -> torch.Tensor:
        with FileIO(self.folder / self._file_of[place.name]) as file:
            read = read_entry(file, place.name, self._entry_of(place))
        self.keys_read.append(place.name)
        return read
