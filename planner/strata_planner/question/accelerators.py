"""Devices as the search has them: resolved to their rates and usable memory, alone or as the group that forms a stage.

Made by `Cluster`, read by the search and the costs. Knows no model and no load.
"""

import msgspec

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.plan import Place
from strata_planner.contract.shares import Shares, lowest, told
from strata_planner.contract.values import Value


class Accelerator(Value, frozen=True):
    """One device, resolved. `index` counts the devices of this type on its node; `usable_bytes` is free of overhead."""

    node: str
    type: str
    index: int
    usable_bytes: int
    overhead_bytes: int
    profile: DeviceProfile
    name: str = ""  # catalogue name, or the type where a user's profile names it
    hourly_cost: float | None = None

    @property
    def place(self) -> Place:
        """What no other device has: node, type, index."""
        return self.node, self.type, self.index


class DeviceGroup(Value, frozen=True):
    """The devices of one stage, of one node, which split its layers by tensor parallelism. Often just one. `shares`: how much of a layer each has, told of
    unlike devices alone, where they are equal too; none: equal devices. `rank`: of the device whose rates and memory are asked of (`ranks`).
    """

    devices: tuple[Accelerator, ...]
    shares: Shares = ()
    rank: int = 0

    @property
    def degree(self) -> int:
        return len(self.devices)

    @property
    def leader(self) -> Accelerator:
        """The device that sends and receives hidden states (HexGen, section 3.3)."""
        return self.devices[0]

    @property
    def own(self) -> Accelerator:
        return self.devices[self.rank]

    @property
    def ranks(self) -> "tuple[DeviceGroup, ...]":
        """As each of its unlike devices sees it; equal ones see the same."""
        if not self.shares:
            return (self,)
        return tuple(msgspec.structs.replace(self, rank=rank) for rank in range(self.degree))

    @property
    def node(self) -> str:
        return self.leader.node

    @property
    def profile(self) -> DeviceProfile:
        return self.own.profile

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(device.place for device in self.devices)

    @property
    def usable_bytes(self) -> int:
        """Of each device; of unlike ones of its own."""
        return self.own.usable_bytes if self.shares else min(device.usable_bytes for device in self.devices)

    @property
    def step_variation(self) -> float:
        """Of the device whose steps vary most."""
        return (
            max(device.profile.step_variation for device in self.devices)
            if self.shares
            else self.profile.step_variation
        )

    @property
    def total_bytes(self) -> int:
        """Usable, of all its devices."""
        return sum(device.usable_bytes for device in self.devices)

    def __str__(self) -> str:
        count = f"{self.degree} x " if self.degree > 1 else ""
        unlike = f" ({told(self.shares)})" if lowest(self.shares) else ""
        return f"{count}{' + '.join(dict.fromkeys(each.type for each in self.devices))}{unlike} on {self.node}"
