"""Where the weights of a stage's linears come from, at any precision, while it loads and as long as it lives.

Made by `load_stage`; kept by the StageModel for whoever changes a linear's precision in place. Dense weights come from the checkpoint, bit-planes
and tables from the any-precision copy, where the model has one. Every answer is memory of its own, on the CPU. Safe for several threads.
"""

from collections.abc import Container, Mapping
from pathlib import Path

import torch
from torch import Tensor

from strata_runtime.errors import InputError
from strata_runtime.formats.static8.activation_file import ActivationEntry, Activations
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.loading.artefact import Artefact
from strata_runtime.loading.checkpoint import Checkpoint

_CPU = torch.device("cpu")


class LinearSource:
    """`weights`: key of a linear -> name of its weight in the checkpoint, for those that lie there as they are."""

    def __init__(
        self, checkpoint: Checkpoint, artefact: Artefact | None, weights: Mapping[str, str], dtype: torch.dtype
    ) -> None:
        self.artefact = artefact
        self.activations: Activations | None = None  # read where a layer is stored in w8a8_static
        self._checkpoint = checkpoint
        self._weights = weights
        self._dtype = dtype

    @property
    def folder(self) -> Path:
        return self._checkpoint.folder

    def dense(self, key: str) -> Tensor:
        """[N, K] in the compute type. Raises InputError where the checkpoint has no such weight."""
        return self._read(key, self._dtype)

    def stored(self, key: str) -> Tensor:
        """[N, K] in the checkpoint's own type. Raises as `dense`."""
        return self._read(key, None)

    def in_order(self, keys: Container[str]) -> list[str]:
        """Those of the keys that have a dense weight, as a load stores them one after the other."""
        return [key for key in self._weights if key in keys]

    def planes(self, key: str, bits: int) -> PlanesWeight:
        """The model of `bits` bits. Raises InputError where there is no any-precision copy, or none of that width."""
        return self._copy(key).read(key, bits, self._dtype)

    def missing_planes(self, key: str, from_bits: int, to_bits: int) -> tuple[Tensor, ...]:
        """What a linear that holds the first `from_bits` planes lacks of `to_bits`. Raises as `planes`."""
        return self._copy(key).missing_planes(key, from_bits, to_bits)

    def table(self, key: str, bits: int) -> Tensor:
        """Centroids [N, 2^bits] in the compute type. Raises as `planes`."""
        return self._copy(key).table(key, bits, self._dtype)

    def activation_entry(self, key: str) -> ActivationEntry:
        """How the inputs of a linear are rounded. Raises NotCalibratedError."""
        assert self.activations is not None
        return self.activations.entry(key)

    def _read(self, key: str, dtype: torch.dtype | None) -> Tensor:
        if key not in self._weights:
            raise InputError(f"{self.folder} has no dense weight of '{key}': it stays at the precision it has")
        name = self._weights[key]
        return self._checkpoint.read([name], dtype, _CPU)[name]

    def _copy(self, key: str) -> Artefact:
        if self.artefact is None:
            raise InputError(
                f"'{key}' cannot change its bits: {self.folder} has no any-precision copy; run `strata quantize {self.folder}` once"
            )
        return self.artefact
