"""Which devices have been dealt to whom: one ledger for all deployments, so that no device is dealt twice.

Plans are made side by side, each on what was free when it began. Whoever is done first takes its devices; a plan that is done
later is taken only if all its devices can still be had. Made by the controller at every look from the records of all
deployments, and written on with each plan that is taken in that look. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata_operator.render.slots import Claim, slots_of
from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Device


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """The claims of each deployment's newest epoch, by its uid."""

    claims: Mapping[str, tuple[Claim, ...]] = field(default_factory=dict)

    def others(self, owner: str) -> tuple[Claim, ...]:
        """What the inventory of one deployment has to leave out."""
        return tuple(claim for uid, claims in self.claims.items() if uid != owner for claim in claims)

    def dealt(self, owner: str, claims: tuple[Claim, ...]) -> "DeviceLedger":
        """A new plan of a deployment replaces what it had."""
        return DeviceLedger({**self.claims, owner: claims})


def still_free(plan: Plan, made_for: Cluster, now: Cluster) -> bool:
    """Whether all devices that a plan takes can still be had. `now`: what its deployment may use, all others' claims left out."""
    free = {(node.name, device.type): device for node in now.nodes for device in node.devices}
    return all(_covers(free.get((slot.node, slot.device.type)), slot.device) for slot in slots_of(plan, made_for))


def _covers(free: Device | None, wanted: Device) -> bool:
    return (
        free is not None
        and free.count >= wanted.count
        and free.threads >= wanted.threads
        and free.memory_bytes >= wanted.memory_bytes
    )
