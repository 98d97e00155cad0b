"""On which processors the roles of a slot load and compute: those of their devices, where the machine has several memories (NUMA). Used by the slot and its ranks."""

from dataclasses import dataclass

import torch

from strata_planner.contract.devices import is_processor
from strata_planner.contract.processors import ANYWHERE, UNDIVIDED, Division, Processors, memories
from strata_planner.contract.roles import Role


@dataclass(frozen=True, slots=True)
class Binding:
    """`beside`: the processors beside each memory of this machine that the slot may use."""

    division: Division = UNDIVIDED
    beside: tuple[Processors, ...] = ()

    @classmethod
    def here(cls, division: Division) -> "Binding":
        return cls(division, memories())

    def of(self, role: Role, rank: int = 0) -> Processors:
        """Of the device of this rank; ANYWHERE on a GPU."""
        device = role.devices[rank]
        return self.division.processors(device.index, self.beside) if is_processor(device.type) else ANYWHERE


UNBOUND = Binding()


def device_of(role: Role, rank: int = 0) -> torch.device:
    """Where this rank computes; a slot sees only its own GPUs, in the order of their indices."""
    device = role.devices[rank]
    return torch.device("cpu") if is_processor(device.type) else torch.device("cuda", device.index)
