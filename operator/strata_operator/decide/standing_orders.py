"""Standing orders: the epochs that slots and gateways may make by themselves, what gateways are told of them, and what was carried out.

Each order of an epoch has a number of its own, kept from the moment that the epoch is made: whoever carries it out makes the same epoch with the same
plan and key, and whatever a controller makes afterwards has a higher one. Called by whoever makes epochs. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from msgspec import structs

from strata_operator.decide.epochs import Ledger, Observed, prepare_for, route_of, slots_of
from strata_operator.render.epoch import Epoch, Formation
from strata_operator.render.records import ORDERED, Cause, EpochRecord
from strata_planner.contract.control import (
    LARGEST_CONTROL_BYTES,
    CarryOut,
    OrderedEpoch,
    SetOrders,
    SlotAddress,
    SlotDoor,
    encode,
)
from strata_planner.contract.keys import order_key, seal_of
from strata_planner.contract.plan import StandingOrder
from strata_planner.contract.roles import Role, roles_of
from strata_planner.replan.repair import RepairKind, RepairNote

TAKES_STANDING_ORDERS = 3  # the protocol of slots that do
MOST_BYTES = LARGEST_CONTROL_BYTES * 3 // 4  # of all orders for one gateway, beside what else a message has


@dataclass(frozen=True, slots=True)
class Ordered:
    """The epoch that a standing order makes. `lost`: the slots that it does without; none: `renewed` replicas are formed anew as they were."""

    epoch: Epoch
    lost: tuple[str, ...] = ()
    renewed: tuple[int, ...] = ()
    order: StandingOrder | None = None


@dataclass(frozen=True, slots=True)
class OrderTerms:
    """From when on orders are carried out, in seconds: without a controller, and for a slot that is away."""

    silence_seconds: float
    grace_seconds: float


def ordered_epochs(epoch: Epoch) -> tuple[Ordered, ...]:
    """By their numbers. Those that form replicas anew come first, so that those for a loss supersede them."""
    if not epoch.has_orders or epoch.plan.orders is None:
        return ()
    replicas = tuple(each.replica for each in epoch.plan.replicas)
    renewals = [*((each,) for each in replicas), *([replicas] if len(replicas) > 1 else [])]
    made = [_renewed(epoch, epoch.number + 1 + place, each) for place, each in enumerate(renewals)]
    first = epoch.number + 1 + len(renewals)
    return (*made, *(_without(epoch, first + place, each) for place, each in enumerate(epoch.plan.orders)))


def carried_out(ledger: Ledger, seen: Observed) -> Ordered | None:
    """What was done meanwhile and is not on record: an order whose epoch a slot serves, so that all had prepared it. It is to be recorded as it is."""
    if (newest := ledger.newest) is None or not newest.has_orders:
        return None
    served = {each.committed_epoch for each in seen.slots.values()} | {each.epoch for each in seen.gateways.values()}
    if not any(
        newest.number < number <= newest.last_number for number in served
    ):  # each look asks, and hundreds of epochs have a key each
        return None
    return next((each for each in reversed(ordered_epochs(newest)) if each.epoch.number in served), None)


def cause_of(ordered: Ordered, newest: EpochRecord) -> Cause:
    """Why its epoch was made, as whoever records it says. `newest`: the epoch that had the order."""
    order = ordered.order
    nodes = {stage.slot: stage.node for stage in newest.epoch.plan.stages}
    return replace(
        newest.cause,
        reason=ORDERED,
        node=nodes[ordered.lost[0]] if ordered.lost else "",
        planned_in=0 if order else newest.planned_in,
        seconds_to_plan=0.0,
        repair=None if order is None else _note_of(order),
        gain=None,
        noticed=None,
        planned=None,
    )


def _note_of(order: StandingOrder) -> RepairNote:
    kind = cast("RepairKind", order.kind)
    return RepairNote(
        kind, order.layers_moved, order.bits_lowered, order.loaded_bytes, order.kept_share, milliseconds=0.0
    )


def set_orders(
    epoch: Epoch, seen: Observed, secrets: Mapping[str, str], doors: Mapping[str, SlotDoor], terms: OrderTerms
) -> SetOrders | None:
    """What gateways are told. `secrets`: of the slots' control ports. None while a slot of the plan is away or takes no orders, and where there are none."""
    slots = slots_of(epoch.plan)
    if not slots <= set(seen.slots) & set(seen.addresses) & set(secrets) & set(doors):
        return None
    if any(seen.slots[slot].protocol < TAKES_STANDING_ORDERS for slot in slots):
        return None
    orders, size = [], 0
    for each in ordered_epochs(epoch):
        told = _told(each, epoch.number, seen, secrets, terms)
        size += len(encode(told))
        orders += [told] if size <= MOST_BYTES else []
    if not orders:
        return None
    return SetOrders(
        epoch=epoch.number,
        last=epoch.last_number,
        silence_seconds=terms.silence_seconds,
        grace_seconds=terms.grace_seconds,
        replicas={each.replica: tuple(sorted({stage.slot for stage in each.stages})) for each in epoch.plan.replicas},
        doors={slot: doors[slot] for slot in sorted(slots)},
        orders=tuple(orders),
    )


def untold(epoch: Epoch, told: SetOrders) -> tuple[str, ...]:
    """Slots whose loss waits for a controller: their orders are more than a message holds."""
    numbers = {each.number for each in told.orders}
    return tuple(slot for each in ordered_epochs(epoch) if each.epoch.number not in numbers for slot in each.lost)


def _renewed(epoch: Epoch, number: int, replicas: tuple[int, ...]) -> Ordered:
    return Ordered(_epoch(epoch, number, frozenset(replicas)), renewed=replicas)


def _without(epoch: Epoch, number: int, order: StandingOrder) -> Ordered:
    changed = frozenset({each.replica for each in order.replicas} | {*order.left_out})
    return Ordered(replace(_epoch(epoch, number, changed), plan=epoch.plan.after(order)), lost=order.lost, order=order)


def _epoch(epoch: Epoch, number: int, changed: frozenset[int]) -> Epoch:
    """Replicas that are not changed go on as they were formed."""
    rest = (each.replica for each in epoch.plan.replicas if each.replica not in changed)
    formations = tuple(Formation(each, epoch.formed_in(each), epoch.key_of(each)) for each in rest)
    return Epoch(number, order_key(epoch.key, number), epoch.plan, formations, reserved=epoch.last_number)


def _told(ordered: Ordered, after: int, seen: Observed, secrets: Mapping[str, str], terms: OrderTerms) -> OrderedEpoch:
    epoch = ordered.epoch
    slots = {}
    for slot, roles in sorted(roles_of(epoch.plan).items()):
        prepare = prepare_for(epoch, roles, _neighbours(slot, roles, seen.addresses), seen.slots[slot])
        words = CarryOut(after=after, silence_seconds=terms.silence_seconds, prepare=encode(prepare).decode(), seal="")
        slots[slot] = structs.replace(words, seal=seal_of(secrets[slot], words.sealed))
    route = route_of(epoch, seen.addresses)
    return OrderedEpoch(number=epoch.number, slots=slots, route=route, lost=ordered.lost, renewed=ordered.renewed)


def _neighbours(slot: str, roles: tuple[Role, ...], addresses: Mapping[str, SlotAddress]) -> dict[str, SlotAddress]:
    """All that a slot needs to know: those of all would be in each of many messages."""
    known = {slot} | {side.slot for role in roles for side in (role.next, role.previous)}
    return {each: structs.replace(addresses[each], pages_port=0) for each in sorted(known)}
