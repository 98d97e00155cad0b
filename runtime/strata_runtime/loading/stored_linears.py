"""A checkpoint whose linears are quantized already: the same tensors as of a plain one, and its linears as they are stored.

Base of one class for each method (`gptq_checkpoint`, `float8_checkpoint`). Whoever loads asks for `X.weight` whatever the checkpoint holds: read as
a tensor it is dequantized, read as a linear it stays at its own bits.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from strata_planner.contract.formats import FormatName
from strata_planner.contract.quantization import BlockFloat8, ModuleQuantization, Quantization
from strata_runtime.errors import InputError
from strata_runtime.formats import QuantLinear
from strata_runtime.loading.checkpoint import Checkpoint, TensorPlace
from strata_runtime.ranges import Range, Ranges
from strata_runtime.ranks.cut import WHOLE, LinearCut

CPU = torch.device("cpu")
WEIGHT = ".weight"


class QuantizedCheckpoint(Checkpoint):
    """`keys` are those of the plain model: `X.weight` for the parts of a quantized linear X.

    `mark`: X is quantized where the checkpoint holds X + `mark`. `choosing_fields`: those of quantization_config that say which
    linears are.
    """

    mark: ClassVar[str]
    choosing_fields: ClassVar[str]
    quantization: Quantization | BlockFloat8

    def __init__(self, folder: Path, quantization: Quantization | BlockFloat8) -> None:
        super().__init__(folder)
        self.quantization = quantization
        stored = super().keys
        there = frozenset(stored)
        names = [key.removesuffix(self.mark) for key in stored if key.endswith(self.mark)]
        self.parts = {name + WEIGHT: self.parts_of(name, there) for name in names}

    @abstractmethod
    def parts_of(self, name: str, stored: frozenset[str]) -> dict[str, str]:
        """The parts of the quantized linear `name` -> their names among the `stored` tensors."""

    @abstractmethod
    def dequantized(self, weight_key: str) -> torch.Tensor:
        """float32 [N, K], exact, on the CPU."""

    @abstractmethod
    def read_linear(
        self, tensors: Mapping[str, str], shape: tuple[int, int], dtype: torch.dtype, cut: LinearCut = WHOLE
    ) -> QuantLinear:
        """At its own bits, on the CPU. `tensors`: `weight` and perhaps `bias` -> its name here; `shape`: [N, K] as the model has it; `cut`: what of it
        is wanted. Raises PrecisionError where that cannot be cut out.
        """

    @property
    def keys(self) -> tuple[str, ...]:
        hidden = {part for parts in self.parts.values() for part in parts.values()}
        return (*(key for key in super().keys if key not in hidden), *self.parts)

    def format_of(self, weight_key: str) -> FormatName:
        return self.quantization_of(weight_key).format

    def quantization_of(self, weight_key: str) -> ModuleQuantization:
        """Of the linear of `X.weight`, as quantization_config says. Raises InputError where that says otherwise than the tensors."""
        name = weight_key.removesuffix(WEIGHT)
        how = self.quantization.of(name)
        if how is None:
            raise InputError(
                f"{name}{self.mark} is in the checkpoint, and quantization_config says that {name} is not quantized: "
                f"correct its {self.choosing_fields}, or fetch the checkpoint again"
            )
        return how

    def holds(self, weight_key: str) -> bool:
        """Whether the linear of `X.weight` is quantized."""
        return weight_key in self.parts

    def check(self, keys: Iterable[str]) -> None:
        super().check(name for key in keys for name in self.stored_names(key))

    def read(self, keys: Iterable[str], dtype: torch.dtype | None, device: torch.device) -> dict[str, torch.Tensor]:
        """Quantized weights are dequantized: exact (float32, where no type is asked for), then rounded once to `dtype`."""
        wanted = list(keys)
        tensors = super().read((key for key in wanted if key not in self.parts), dtype, device)
        for key in wanted:
            if key in self.parts:
                tensors[key] = self.dequantized(key).to(dtype or torch.float32).to(device)
        return tensors

    def read_rows(self, places: Sequence[TensorPlace], dtype: torch.dtype) -> torch.Tensor:
        read = [self.read([place.name], dtype, CPU)[place.name] for place in places]
        return torch.cat(
            [tensor if place.index is None else tensor[place.index] for place, tensor in zip(places, read, strict=True)]
        )

    def read_parts(self, weight_key: str, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """The parts of a quantized linear by name, floating-point ones in `dtype` (None: as they are stored), on the CPU."""
        names = self.parts[weight_key]
        read = super().read(names.values(), dtype, CPU)
        return {part: read[stored] for part, stored in names.items()}

    def read_part(
        self, key: str, dtype: torch.dtype | None, rows: Ranges | None, columns: Range | None = None
    ) -> torch.Tensor:
        if key not in self.parts:
            return super().read_part(key, dtype, rows, columns)
        whole = self.read([key], dtype, CPU)[key][:, slice(*(columns or (None,)))]
        return torch.cat([whole[slice(*each)] for each in rows]) if rows else whole.contiguous()

    def read_some(self, stored: str, rows: Range) -> torch.Tensor:
        """Of a tensor by its name in the checkpoint, as it lies there, on the CPU."""
        return super().read_part(stored, None, (rows,))

    def read_bias(self, tensors: Mapping[str, str], dtype: torch.dtype, cut: LinearCut) -> torch.Tensor | None:
        return self.read_part(tensors["bias"], dtype, cut.rows) if "bias" in tensors else None

    def stored_names(self, key: str) -> Iterable[str]:
        return self.parts[key].values() if key in self.parts else (key,)
