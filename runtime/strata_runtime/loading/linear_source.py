"""Where the weights of a stage's linears come from, at any precision, while it loads and as long as it lives.

Made by `load_stage`; kept by the StageModel for whoever changes a linear's precision in place. Dense weights come from the checkpoint, bit-planes
and tables from the any-precision copy, where the model has one. Every answer is memory of its own, on the CPU. Safe for several threads.
"""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from strata_planner.contract.formats import ANY_PRECISION, FormatName
from strata_runtime.errors import InputError
from strata_runtime.formats.planes.planes import cut_planes
from strata_runtime.formats.static8.activation_file import ActivationEntry, Activations
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.loading.artefact import Artefact
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.ranges import Range, below
from strata_runtime.ranks.cut import WHOLE, LinearCut

ANY_FORMATS: frozenset[FormatName] = frozenset({*ANY_PRECISION.values(), "any4_a8"})  # read from a copy, plane by plane
_CPU = torch.device("cpu")


class LinearSource:
    """`weights`: key of a linear -> name of its weight in the checkpoint, for those that lie there as they are. `cuts`: what of each linear's weight
    this stage has, where several ranks share it; all answers are of that part.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        artefact: Artefact | None,
        weights: Mapping[str, str],
        dtype: torch.dtype,
        cuts: Mapping[str, LinearCut],
        activations: Activations | None = None,
    ) -> None:
        """`activations`: of the model, where a layer is stored in w8a8_static."""
        self.artefact = artefact
        self.cuts = cuts
        self.activations = activations
        self._checkpoint = checkpoint
        self._weights = weights
        self._dtype = dtype

    @property
    def folder(self) -> Path:
        return self._checkpoint.folder

    def checksum(self, layer: int) -> str | None:
        """Of the file that the layer's planes are read from; None where there is none."""
        file = None if self.artefact is None else self.artefact.manifest.of_layer(layer)
        return None if file is None else file.sha256

    def dense(self, key: str) -> Tensor:
        """[N, K] in the compute type. Raises InputError where the checkpoint has no such weight."""
        name, cut = self._named(key), self._cut(key)
        if cut == WHOLE:
            return self._checkpoint.read([name], self._dtype, _CPU)[name]
        return self._checkpoint.read_part(name, self._dtype, cut.rows, cut.columns)

    def whole(self, key: str) -> Tensor:
        """[N, K] in the checkpoint's own type, also where this stage has a part alone. Raises as `dense`."""
        return self._checkpoint.read([self._named(key)], None, _CPU)[self._named(key)]

    def in_order(self, keys: Container[str]) -> list[str]:
        """Those of the keys that have a dense weight, as a load stores them one after the other."""
        return [key for key in self._weights if key in keys]

    def planes(self, key: str, bits: int) -> PlanesWeight:
        """The model of `bits` bits. Raises InputError where there is no any-precision copy, or none of that width."""
        parts = [self._copy(key).read(key, bits, self._dtype, rows=rows) for rows in self._ranges(key)]
        planes = zip(*(part.planes for part in parts), strict=True)
        rows = PlanesWeight(
            tuple(below(each) for each in planes), below([part.table for part in parts]), parts[0].in_features
        )
        return self.part(key, rows, rows_done=True)

    def part(self, key: str, planes: PlanesWeight, *, rows_done: bool = False) -> PlanesWeight:
        """Of the planes of a whole linear (or of this stage's rows of it) what this stage has."""
        cut = self._cut(key)
        rows = None if rows_done else cut.rows
        return planes.part(rows, cut.columns) if rows or cut.columns else planes

    def missing_planes(self, key: str, from_bits: int, to_bits: int) -> tuple[Tensor, ...]:
        """What a linear that holds the first `from_bits` planes lacks of `to_bits`. Raises as `planes`."""
        copy, columns = self._copy(key), self._cut(key).columns
        parts = [copy.missing_planes(key, from_bits, to_bits, rows=rows) for rows in self._ranges(key)]
        planes = tuple(below(each) for each in zip(*parts, strict=True))
        return cut_planes(planes, copy.shape(key)[1], columns) if columns and planes else planes

    def table(self, key: str, bits: int) -> Tensor:
        """Centroids [N, 2^bits] in the compute type. Raises as `planes`."""
        return below([self._copy(key).table(key, bits, self._dtype, rows=rows) for rows in self._ranges(key)])

    def activation_entry(self, key: str) -> ActivationEntry:
        """How the inputs of a linear are rounded. Raises NotCalibratedError."""
        assert self.activations is not None
        return self.activations.entry(key)

    def _named(self, key: str) -> str:
        if key not in self._weights:
            raise InputError(f"{self.folder} has no dense weight of '{key}': it stays at the precision it has")
        return self._weights[key]

    def _cut(self, key: str) -> LinearCut:
        return self.cuts.get(key, WHOLE)

    def _ranges(self, key: str) -> Sequence[Range | None]:
        """Of the rows of a linear that this stage has; None: all of them."""
        return self._cut(key).rows or (None,)

    def _copy(self, key: str) -> Artefact:
        if self.artefact is None:
            raise InputError(
                f"'{key}' cannot change its bits: {self.folder} has no any-precision copy; run `strata quantize {self.folder}` once"
            )
        return self.artefact
