"""What sequences keep in layers that are no attention: a slot of each sequence in tensors of one layer each, and how far it has come.

Used by PagedKvCache; a layer's tensors are read and written by `mixers`. Bytes are those of `contract.sequence_state`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_planner.contract.frames import Segment
from strata_planner.contract.sequence_state import SequenceState
from strata_runtime.errors import StepError

TOKENS_AT_ONCE = 256  # of one sequence: bounds the temporaries


@dataclass(frozen=True, slots=True)
class LayerState:
    """inputs: [slots, inputs, channels] in the compute type; matrices: [slots, heads, key_dim, value_dim] float32."""

    inputs: Tensor
    matrices: Tensor


@dataclass(frozen=True, slots=True)
class StateRun:
    """`count` sequences with `length` new tokens each, that pass the layers with state together.

    rows: of the packed batch, sequence after sequence; slots: [count].
    """

    count: int
    length: int
    rows: slice | Tensor
    slots: Tensor

    def of(self, packed: Tensor) -> Tensor:
        """packed: [rows, ...] -> [count, length, ...]."""
        return packed[self.rows].reshape(self.count, self.length, *packed.shape[1:])


class StateSlots:
    """Which sequence has which slot, and at which position its state is. Without tensors."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        self._free = list(range(self._slots - 1, -1, -1))
        self._held: dict[int, tuple[int, int]] = {}  # sequence -> its slot, and the position that comes next

    def take(self, segment: Segment) -> int:
        """The slot that this segment goes on in: one of its sequence's own.

        Raises StepError for a segment that does not go on where the state is, and for a sequence more than there are slots.
        """
        slot, position = self._held.get(segment.sequence, (-1, 0))
        if segment.start not in {0, position}:
            raise StepError(
                f"sequence {segment.sequence}: its segment starts at position {segment.start} and its state is at {position}; a state goes "
                "on from where it is, or starts at 0"
            )
        if slot < 0:
            if not self._free:
                raise StepError(
                    f"sequence {segment.sequence} finds none of {self._slots} states free: so many sequences run at once"
                )
            slot = self._free.pop()
        self._held[segment.sequence] = slot, segment.start + segment.length
        return slot

    def free(self, sequence: int) -> None:
        """The sequence is over. One that never had a slot is no error: it may end before its first step."""
        held = self._held.pop(sequence, None)
        if held is not None:
            self._free.append(held[0])


class StatePool:
    """The state of `slots` sequences in each of `shapes` (by layer), taken and touched at construction."""

    def __init__(
        self, shapes: Mapping[int, SequenceState], slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = {layer: _layer_state(shape, slots, dtype, device) for layer, shape in shapes.items()}
        self._table = StateSlots(slots)
        self._device = device

    @property
    def bytes(self) -> int:
        return sum(each.inputs.nbytes + each.matrices.nbytes for each in self.layers.values())

    def plan(self, segments: Sequence[Segment]) -> tuple[StateRun, ...]:
        """How these segments, packed in their order, pass the layers. States of those that start at position 0 are zero from now on.

        Raises StepError as StateSlots does, and for a sequence with two segments; then the step must not run.
        """
        if not self.layers:
            return ()
        slots = [self._table.take(each) for each in segments]
        if len(set(slots)) < len(slots):
            raise StepError(
                "a sequence has two segments in one step: those after the first need a state that is not there yet"
            )
        self._begin([slot for slot, segment in zip(slots, segments, strict=True) if segment.start == 0])
        return tuple(_runs(segments, slots, self._device))

    def free(self, sequence: int) -> None:
        self._table.free(sequence)

    def clear(self) -> None:
        self._table.clear()

    def _begin(self, slots: list[int]) -> None:
        if slots:
            places = torch.tensor(slots, device=self._device)
            for state in self.layers.values():
                state.inputs.index_fill_(0, places, 0)
                state.matrices.index_fill_(0, places, 0)


def _layer_state(shape: SequenceState, slots: int, dtype: torch.dtype, device: torch.device) -> LayerState:
    return LayerState(
        torch.empty((slots, shape.inputs, shape.channels), dtype=dtype, device=device).zero_(),
        torch.empty((slots, shape.heads, shape.key_dim, shape.value_dim), dtype=torch.float32, device=device).zero_(),
    )


def _runs(segments: Sequence[Segment], slots: Sequence[int], device: torch.device) -> list[StateRun]:
    """Single tokens together, longer segments each for itself, some tokens after the others."""
    runs: list[StateRun] = []
    single: list[tuple[int, int]] = []  # row and slot
    row = 0
    for segment, slot in zip(segments, slots, strict=True):
        if segment.length == 1:
            single.append((row, slot))
        else:
            place, end = torch.tensor([slot], device=device), row + segment.length
            for start in range(row, end, TOKENS_AT_ONCE):
                length = min(TOKENS_AT_ONCE, end - start)
                runs.append(StateRun(1, length, slice(start, start + length), place))
        row += segment.length
    if single:
        rows, places = (torch.tensor(each, device=device) for each in zip(*single, strict=True))
        runs.append(StateRun(len(single), 1, rows, places))
    return runs
