"""The parts of an epoch: slots whose replicas share slots pass into it together, and each such part by itself.

A part that has prepared an epoch serves it while another still loads: a slot that needs minutes, or is away, keeps no replica waiting that has nothing of
it. Called by `epochs` and by whoever asks whom an epoch waits for. Pure.
"""

from collections.abc import Iterable, Mapping

from strata_operator.decide.formation import places_by_replica, runs
from strata_operator.once import once_of_each
from strata_operator.render.epoch import Epoch
from strata_planner.contract.control import SlotStatus
from strata_planner.contract.moves import PageOrders
from strata_planner.contract.plan import Plan

Part = frozenset[str]  # slots


@once_of_each
def parts_of(plan: Plan) -> tuple[Part, ...]:
    """Disjoint, together all slots of the plan."""
    parts: list[Part] = []
    for replica in plan.replicas:
        slots = frozenset(stage.slot for stage in replica.stages)
        parts = [
            *(part for part in parts if not part & slots),
            slots.union(*(part for part in parts if part & slots)),
        ]
    return tuple(parts)


def holds(epoch: Epoch, status: SlotStatus | None) -> bool:
    """Whether a slot has prepared an epoch, or serves it."""
    if status is None:
        return False
    prepared = status.prepare.epoch == epoch.number and status.prepare.phase == "prepared"
    return prepared or status.committed_epoch == epoch.number


def begun(epoch: Epoch, slots: Mapping[str, SlotStatus]) -> tuple[Part, ...]:
    """The parts that pass into a committed epoch: all of their slots hold it, or one of them serves it already."""
    return tuple(part for part in parts_of(epoch.plan) if _is_held(epoch, part, slots) or _serves(epoch, part, slots))


def waiting(epoch: Epoch, slots: Mapping[str, SlotStatus]) -> frozenset[str]:
    """Slots that answer and are of no such part: they load, or another one of theirs does or is away."""
    return (slots_in(parts_of(epoch.plan)) - slots_in(begun(epoch, slots))) & set(slots)


def is_prepared(epoch: Epoch, slots: Mapping[str, SlotStatus]) -> bool:
    """By all of its slots."""
    return all(_is_held(epoch, part, slots) for part in parts_of(epoch.plan))


def may_begin(epoch: Epoch, in_force: Epoch | None, slots: Mapping[str, SlotStatus], orders: PageOrders) -> bool:
    """Whether the parts that hold an epoch pass into it now, before the others: a replica is formed by that, whatever serves goes on with them, and the others
    load, or are away after they have served. `in_force`: None: nothing was ever served. `orders`: pages that go from one part to another are given as all commit.
    """
    held = [part for part in parts_of(epoch.plan) if _is_held(epoch, part, slots)]
    late, known = slots_in(parts_of(epoch.plan)) - slots_in(held), parts_of(in_force.plan) if in_force else ()
    if not all(_is_asked(epoch, slots[slot]) if slot in slots else slot in slots_in(known) for slot in late):
        return False
    ready = {replica for replica, members in _members(epoch).items() if any(members <= part for part in held)}
    going_on = {each.replica for each in epoch.formations}
    serving = _serving(in_force, slots) if in_force else set()
    return bool(ready - going_on) and serving <= ready & going_on and not _is_between(parts_of(epoch.plan), orders)


def slots_in(parts: Iterable[Part]) -> Part:
    return frozenset[str]().union(*parts)


def _is_asked(epoch: Epoch, status: SlotStatus) -> bool:
    return status.prepare.epoch == epoch.number


def _is_held(epoch: Epoch, part: Part, slots: Mapping[str, SlotStatus]) -> bool:
    return all(holds(epoch, slots.get(slot)) for slot in part)


def _serves(epoch: Epoch, part: Part, slots: Mapping[str, SlotStatus]) -> bool:
    return any(slot in slots and slots[slot].committed_epoch == epoch.number for slot in part)


def _serving(epoch: Epoch, slots: Mapping[str, SlotStatus]) -> set[int]:
    """Its replicas that run whole."""
    return {
        replica
        for replica, places in places_by_replica(epoch.plan).items()
        if runs(places, epoch.formed_in(replica), slots)
    }


def _members(epoch: Epoch) -> dict[int, Part]:
    return {each.replica: frozenset(stage.slot for stage in each.stages) for each in epoch.plan.replicas}


def _is_between(parts: Iterable[Part], orders: PageOrders) -> bool:
    of = {slot: part for part in parts for slot in part}
    return any(of.get(source.slot) != of[taker] for taker, sources in orders.sources.items() for source in sources)
