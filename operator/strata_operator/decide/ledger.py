"""Which devices have been dealt to whom: one ledger for all deployments, so that no device is dealt twice.

Plans are made side by side, each on what was free when it began. Whoever is done first takes its devices; a plan that is done
later is taken only if all its devices can still be had. Made by the controller at every look from the records of all
deployments, and written on with each plan that is taken in that look. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from strata_operator.render.slots import Claim, slots_of
from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Device

_DOUBT_SECONDS = 60.0  # longer than any request takes that is still under way


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


@dataclass(frozen=True, slots=True)
class _Dealt:
    """A plan whose epoch is being recorded. `until`: when it is known not to have been, if no record shows by then."""

    number: int
    claims: tuple[Claim, ...]
    before: tuple[Claim, ...]
    until: float = float("inf")


class Dealing:
    """The ledger from now to now: what the records say, and what has been dealt since they were read."""

    def __init__(self) -> None:
        self.ledger = DeviceLedger()
        self._dealt: dict[str, _Dealt] = {}

    def refresh(self, ledger: DeviceLedger, newest: Mapping[str, int], now: float) -> None:
        """From a new look. `newest`: the highest epoch on record of each deployment. A plan that is being recorded counts."""
        self._dealt = {
            uid: dealt
            for uid, dealt in self._dealt.items()
            if newest.get(uid, dealt.number) < dealt.number and now < dealt.until
        }
        for uid, dealt in self._dealt.items():
            ledger = ledger.dealt(uid, dealt.claims)
        if ledger.claims != self.ledger.claims:  # the same value as long as nothing of it changes
            self.ledger = ledger

    def deal(self, uid: str, number: int, claims: tuple[Claim, ...]) -> None:
        """Before the epoch is recorded, so that nobody takes the same meanwhile."""
        self._dealt[uid] = _Dealt(number, claims, self.ledger.claims.get(uid, ()))
        self.ledger = self.ledger.dealt(uid, claims)

    def take_back(self, uid: str) -> None:
        """Its epoch was refused: it has what it had before. Where a look was faster than the answer, the look is right."""
        dealt = self._dealt.pop(uid, None)
        if dealt is not None:
            self.ledger = self.ledger.dealt(uid, dealt.before)

    def doubt(self, uid: str, now: float) -> None:
        """Nobody knows whether its epoch was recorded: it counts until a look must have shown it, if none has already."""
        if uid in self._dealt:
            self._dealt[uid] = replace(self._dealt[uid], until=now + _DOUBT_SECONDS)


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
