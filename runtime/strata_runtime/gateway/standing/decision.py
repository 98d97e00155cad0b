"""Which standing order fits what is seen, and how far it is: a pure function, level-triggered, so that several gateways do the same side by side.

Called by `carrying`, only while no controller is heard. An order is begun when exactly its slots are lost and everybody else is as the epoch in force has
them; a second loss fits none, and waits for a controller. Each order has a number of its own: of two that were begun the higher one goes on. What a
controller has begun since has a higher one still.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from strata_planner.contract.control import CarryOut, CommitOrder, OrderedEpoch, SetOrders, SetRoute, SlotStatus


@dataclass(frozen=True, slots=True)
class Seen:
    """The status of every slot that answers now, and for how many seconds each of the others has not."""

    slots: Mapping[str, SlotStatus]
    away: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tell:
    slot: str
    message: CarryOut | CommitOrder


@dataclass(frozen=True, slots=True)
class TakeRoute:
    """The epoch of this order serves: requests go to its leaders."""

    order: OrderedEpoch

    @property
    def route(self) -> SetRoute:
        return self.order.route


Step = Tell | TakeRoute


def next_steps(orders: SetOrders, seen: Seen, routed: int) -> tuple[Step, ...]:
    """`routed`: the epoch that this gateway routes to. Nothing where somebody must answer or load first, and where no order fits."""
    if routed > orders.last or any(_known(status) > orders.last for status in seen.slots.values()):
        return ()  # a controller was there
    begun = _begun(orders, seen)
    if begun is not None and _may_commit(begun, seen):
        return _commits(begun, seen) or _route(begun, seen, routed)
    fitting = _fitting(orders, seen)
    if begun is None or (fitting is not None and fitting.number > begun.number):
        begun = fitting
    return () if begun is None else _carry_out(begun, seen)


def _known(status: SlotStatus) -> int:
    return max(status.committed_epoch, status.prepare.epoch)


def _begun(orders: SetOrders, seen: Seen) -> OrderedEpoch | None:
    """The newest that any slot knows."""
    newest = max((_known(status) for status in seen.slots.values()), default=0)
    return next((order for order in orders.orders if order.number == newest), None)


def _may_commit(order: OrderedEpoch, seen: Seen) -> bool:
    """All have prepared it, as whoever told one of them to commit has seen."""
    members = [seen.slots.get(slot) for slot in order.slots]
    if any(status is not None and status.committed_epoch == order.number for status in members):
        return True
    return all(status is not None and _has_prepared(status, order.number) for status in members)


def _has_prepared(status: SlotStatus, number: int) -> bool:
    return (status.prepare.epoch, status.prepare.phase) == (number, "prepared")


def _commits(order: OrderedEpoch, seen: Seen) -> tuple[Tell, ...]:
    return tuple(
        Tell(slot, CommitOrder(order.number))
        for slot, status in sorted(seen.slots.items())
        if slot in order.slots and status.committed_epoch != order.number and _has_prepared(status, order.number)
    )


def _route(order: OrderedEpoch, seen: Seen, routed: int) -> tuple[TakeRoute, ...]:
    serves = all(slot in seen.slots and seen.slots[slot].committed_epoch == order.number for slot in order.slots)
    return (TakeRoute(order),) if serves and routed < order.number else ()


def _carry_out(order: OrderedEpoch, seen: Seen) -> tuple[Tell, ...]:
    return tuple(
        Tell(slot, words)
        for slot, words in sorted(order.slots.items())
        if slot in seen.slots and _known(seen.slots[slot]) < order.number
    )


def _fitting(orders: SetOrders, seen: Seen) -> OrderedEpoch | None:
    """For exactly what is lost."""
    if lost := frozenset(orders.doors) - frozenset(seen.slots):
        if any(seen.away.get(slot, 0.0) < orders.grace_seconds for slot in lost) or not _is_missed(lost, orders, seen):
            return None
        if any(_is_anew(status) for status in seen.slots.values()):
            return None
        return next((order for order in orders.orders if order.lost and frozenset(order.lost) == lost), None)
    hurt = {replica for replica, slots in orders.replicas.items() if _is_hurt(replica, slots, orders.epoch, seen)}
    fit = (order for order in orders.orders if hurt and not order.lost and hurt <= {*order.renewed})
    return min(fit, key=lambda order: len(order.renewed), default=None)


def _is_anew(status: SlotStatus) -> bool:
    """Started since: it has no part. One that has ended its roles to load others knows of those."""
    return not _known(status)


def _is_missed(lost: frozenset[str], orders: SetOrders, seen: Seen) -> bool:
    """Whether a neighbour says so of each: one that this gateway alone cannot reach goes on serving the others."""
    missed = {peer.slot for status in seen.slots.values() for peer in status.lost_peers}
    waits = {slot for slots in orders.replicas.values() for slot in slots if {*slots} & missed}
    return bool(lost & missed) and lost <= missed | waits


def _is_hurt(replica: int, slots: tuple[str, ...], epoch: int, seen: Seen) -> bool:
    """Its slots all answer, and it does not get on: one was started anew, has lost a neighbour that is there, or failed."""
    for slot in slots:
        status = seen.slots[slot]
        if _is_anew(status) or any(each.replica == replica and each.failure for each in status.roles):
            return True
        if status.committed_epoch == epoch and {peer.slot for peer in status.lost_peers} & {*slots}:
            return True
    return False
