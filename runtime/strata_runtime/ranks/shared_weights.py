"""Weights that ranks of one machine read of each other: each lies once, in the segment that the ranks share, so that gathering them moves nothing.

Made by `loading.shared_layers` while a stage loads; what others have placed is looked up with the first step that needs it.
"""

import math
import struct

import msgspec
import torch
from torch import Tensor

from strata_planner.contract.values import Value
from strata_runtime.ranks.shared_memory import SharedMemory

_LENGTH = struct.Struct("q")  # of the list that lies first among a rank's weights
_LIST_BYTES = 16 << 20  # of addresses for it
_ALIGNED = 64


class Placed(Value, frozen=True):
    """A tensor: bytes behind the first of its rank, its type, its shape."""

    begin: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


class PlacedLinear(Value, frozen=True):
    """A linear [out, in] of a kind that whoever placed it knows; `bias`: None where it has none."""

    kind: str
    out_features: int
    in_features: int
    tensors: tuple[Placed, ...]
    bias: Placed | None = None


class SharedWeights:
    """Of one rank: `place` and `show` what it has, then `of` any rank."""

    def __init__(self, memory: SharedMemory) -> None:
        self.rank, self.ranks = memory.rank, memory.ranks
        self._memory = memory
        self._own: dict[str, PlacedLinear] = {}
        self._shown: dict[int, dict[str, PlacedLinear]] = {}
        self._end = _LIST_BYTES

    def place(self, tensor: Tensor) -> tuple[Placed, Tensor]:
        """A copy of it where all ranks see it."""
        begin = -(-self._end // _ALIGNED) * _ALIGNED
        copy = self._memory.place(self.rank, begin, tensor.dtype, tensor.shape)
        copy.copy_(tensor)
        self._end = begin + copy.nbytes
        return Placed(begin, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), copy

    def add(self, key: str, linear: PlacedLinear) -> None:
        self._own[key] = linear

    def show(self) -> None:
        """All that was added is there for the others."""
        told = msgspec.msgpack.encode(self._own)
        packed = torch.frombuffer(bytearray(_LENGTH.pack(len(told)) + told), dtype=torch.uint8)
        self._memory.place(self.rank, 0, torch.uint8, packed.shape).copy_(packed)

    def of(self, rank: int, key: str) -> PlacedLinear | None:
        """None: that rank shows none. After `see_all`."""
        return self._list(rank).get(key)

    def _list(self, rank: int) -> dict[str, PlacedLinear]:
        if rank not in self._shown:
            (length,) = _LENGTH.unpack(bytes(self._memory.place(rank, 0, torch.uint8, (_LENGTH.size,)).tolist()))
            told = (
                self._memory.place(rank, _LENGTH.size, torch.uint8, (length,)).numpy().tobytes() if length else b"\x80"
            )
            self._shown[rank] = msgspec.msgpack.decode(told, type=dict[str, PlacedLinear])
        return self._shown[rank]

    def see_all(self) -> None:
        """Waits until every rank has shown its own: from now on `of` any rank. Every rank calls it."""
        if self._shown:
            return
        self._memory.meet()
        for rank in range(self.ranks):
            ends = [each.begin + each.bytes for linear in self._list(rank).values() for each in linear.tensors]
            self._memory.see(rank, _LIST_BYTES, max(ends, default=_LIST_BYTES))

    def tensor(self, rank: int, placed: Placed) -> Tensor:
        return self._memory.place(rank, placed.begin, getattr(torch, placed.dtype), placed.shape)

    def forget(self, key: str) -> None:
        """The memory of an own linear, which no rank reads any more."""
        linear = self._own.pop(key)
        for each in (*linear.tensors, linear.bias):
            if each is not None:
                self._memory.forget(each.begin, each.begin + each.bytes)
