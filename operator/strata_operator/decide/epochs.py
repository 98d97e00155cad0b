"""How a deployment passes from one epoch to the next: what is recorded and what is seen -> what to do now.

Called by whoever makes epochs: the supervisor of `strata up` and the operator's reconcile. Pure and level-triggered: it
looks at what is, never at what happened, so that doing its steps twice changes nothing and a controller that starts
anew goes on where the last one stopped. Knows nothing of sockets, processes or Kubernetes (protocol: changing the epoch).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from strata_operator.decide.formation import replicas_going_on, why_not_going_on
from strata_operator.decide.parts import begun, holds, is_prepared, may_begin, parts_of, slots_in, waiting
from strata_operator.render.epoch import Epoch, Formation
from strata_planner.contract.control import (
    ADDS_LEADERS,
    Commit,
    GatewayStatus,
    Leader,
    PlannedStep,
    Prepare,
    SetRoute,
    SlotAddress,
    SlotStatus,
)
from strata_planner.contract.keys import request_secret, role_keys
from strata_planner.contract.moves import PageOrders, moves_between, page_orders
from strata_planner.contract.plan import Plan
from strata_planner.contract.roles import Role, roles_of


@dataclass(frozen=True, slots=True)
class Ledger:
    """What has been recorded: the newest epoch, the highest number recorded as committed (0: none) and, where it is kept, that epoch."""

    newest: Epoch | None = None
    committed: int = 0
    in_force: Epoch | None = None

    def with_newest(self, epoch: Epoch) -> "Ledger":
        return Ledger(epoch, self.committed, self.in_force)

    def with_commit(self, number: int) -> "Ledger":
        return Ledger(self.newest, number, self.newest if self.newest and self.newest.number == number else None)


@dataclass(frozen=True, slots=True)
class Observed:
    """The last status of every slot and gateway that answers now, by name; who does not answer is absent."""

    slots: Mapping[str, SlotStatus]
    gateways: Mapping[str, GatewayStatus]
    addresses: Mapping[str, SlotAddress]


@dataclass(frozen=True, slots=True)
class CreateEpoch:
    """Record a new epoch with a fresh key. If the record exists already another controller won: look again."""

    number: int
    plan: Plan
    reason: str
    formations: tuple[Formation, ...] = ()  # replicas that go on


@dataclass(frozen=True, slots=True)
class RecordCommit:
    """Parts of this epoch have prepared it, and nobody who serves is kept waiting by that: record that it is in force, before anyone is told."""

    number: int


@dataclass(frozen=True, slots=True)
class SendToSlot:
    slot: str
    message: Prepare | Commit


@dataclass(frozen=True, slots=True)
class SendToGateway:
    gateway: str
    message: SetRoute


@dataclass(frozen=True, slots=True)
class PlanWithout:
    """This slot cannot do what the plan asks of it; only another plan helps."""

    slot: str
    reason: str


_TAKES_ORDERS = 2  # the protocol of slots that know of planned steps, shadows and pages

Step = CreateEpoch | RecordCommit | SendToSlot | SendToGateway | PlanWithout


def next_steps(desired: Plan, ledger: Ledger, seen: Observed) -> tuple[Step, ...]:
    """The first rule that has something to do; nothing when all is as desired or someone must answer first."""
    reason = why_new_epoch(desired, ledger, seen)
    if reason or ledger.newest is None:
        return (CreateEpoch(1 + highest_epoch(ledger, seen), desired, reason, going_on(desired, ledger, seen)),)
    epoch = ledger.newest
    if ledger.committed < epoch.number:
        return _refusals(epoch, seen) or _prepares(epoch, ledger.in_force, seen) or _record(epoch, ledger, seen)
    commits, leaves = _commits(epoch, seen), (*_refusals(epoch, seen), *_leaves(epoch, seen))
    return (*commits, *leaves) if commits else (*leaves, *_routes(epoch, seen))


def going_on(desired: Plan, ledger: Ledger, seen: Observed) -> tuple[Formation, ...]:
    """The replicas that a new epoch of this plan leaves as they are."""
    return replicas_going_on(desired, ledger.in_force, ledger.newest, seen.slots)


def to_be_formed(desired: Plan, ledger: Ledger, seen: Observed) -> set[str]:
    """The slots that seem to answer of the replicas that a new epoch forms anew."""
    stay = {each.replica for each in going_on(desired, ledger, seen)}
    formed = {stage.slot for each in desired.replicas if each.replica not in stay for stage in each.stages}
    return formed & set(seen.slots)


def why_new_epoch(desired: Plan, ledger: Ledger, seen: Observed) -> str:
    """Empty while the newest epoch can be finished or is served; else a sentence for logs and status."""
    epoch = ledger.newest
    if epoch is None:
        return "there is no epoch yet"
    if epoch.plan != desired:
        return "the plan has changed"
    if (known := max(highest_known(seen), ledger.committed)) > epoch.number:
        return f"epoch {known} is known to a slot or gateway; the newest on record is {epoch.number}"
    # A slot that is away cannot prepare: its part waits for it, or for another plan.
    there = slots_in(part for part in parts_of(epoch.plan) if part <= set(seen.slots))
    whole = replace(seen, slots={slot: seen.slots[slot] for slot in there})
    if ledger.committed < epoch.number:
        return why_not_going_on(epoch, whole.slots)
    is_used_up = epoch.reserved and epoch.plan.orders is not None and there == slots_of(epoch.plan)
    return why_broken(epoch, whole) or ("its standing orders are used up" if is_used_up else "")


def why_broken(epoch: Epoch, seen: Observed) -> str:
    """Why a committed epoch cannot go on, by the first of its slots that answer and say so; empty: none does."""
    answering = sorted(slots_of(epoch.plan) & set(seen.slots))
    return next(filter(None, (_broken(epoch, seen.slots[slot]) for slot in answering)), "")


def hung_slots(epoch: Epoch, seen: Observed) -> dict[str, str]:
    """Slots that answer and say of themselves that a step does not get on, each with why. In whatever epoch: they cannot leave it."""
    return {
        slot: f"stage {step.stage} of replica {step.replica}: {step.reason}"
        for slot in sorted(slots_of(epoch.plan) & set(seen.slots))
        for step in seen.slots[slot].hung[:1]
    }


def unheard(ledger: Ledger, seen: Observed) -> set[str]:
    """Slots of the epoch in force that do not answer, and whom others of it have lost: a neighbour, or who speaks with its leaders."""
    epoch = ledger.newest
    if epoch is None or ledger.committed < epoch.number:
        return set()
    late = waiting(epoch, seen.slots)  # whose replicas may serve as they were formed before
    witnesses = (each for slot, each in seen.slots.items() if slot in late or each.committed_epoch == epoch.number)
    accused = {peer.slot for status in witnesses for peer in status.lost_peers} | _awaited(epoch, seen, late)
    accused |= missed_leaders(epoch, seen.gateways)
    return (accused & slots_of(epoch.plan)) - set(seen.slots)


def missed_leaders(epoch: Epoch, gateways: Mapping[str, GatewayStatus]) -> set[str]:
    """Slots of the leaders that no gateway may have reached: each that routes to this epoch has fewer than it was told of."""
    replicas = {each.replica for each in epoch.plan.replicas}
    routed = [each for each in gateways.values() if each.epoch == epoch.number]
    told = [set(each.replicas) or replicas for each in routed]
    if any(each.leaders_connected >= len(known) for each, known in zip(routed, told, strict=True)):
        return set()
    missed = set[int]().union(*told)
    return {
        stage.slot for each in epoch.plan.replicas if each.replica in missed for stage in each.stages if stage.leader
    }


def _awaited(epoch: Epoch, seen: Observed, late: Collection[str]) -> set[str]:
    """Slots of the replicas whose leaders wait too long for what is behind them. Those that answer are none of it: they would say that they hang, or are slow.
    Of who is `late` into the epoch, those that go on in it: others may have had another number.
    """
    overdue = set[int]()
    for slot, status in seen.slots.items():
        told = {each.replica for each in status.overdue}
        if slot in late:
            overdue |= told & {each.replica for each in epoch.formations}
        elif status.committed_epoch == epoch.number:
            overdue |= told
    return {stage.slot for replica in epoch.plan.replicas if replica.replica in overdue for stage in replica.stages}


def slots_of(plan: Plan) -> set[str]:
    return {stage.slot for replica in plan.replicas for stage in replica.stages}


def is_ready(desired: Plan, ledger: Ledger, seen: Observed) -> bool:
    """Every slot serves the desired plan, and a gateway has spoken with all its leaders: another one that has not delays nobody."""
    epoch = ledger.newest
    if epoch is None or any(not isinstance(step, SendToGateway) for step in next_steps(desired, ledger, seen)):
        return False
    return all(
        slot in seen.slots and seen.slots[slot].committed_epoch == epoch.number and not seen.slots[slot].hung
        for slot in slots_of(epoch.plan)
    ) and any(reaches_all(gateway, epoch) for gateway in seen.gateways.values())


def reaches_all(gateway: GatewayStatus, epoch: Epoch) -> bool:
    """Whether a gateway routes to this epoch and has spoken with all its leaders."""
    return gateway.epoch == epoch.number and gateway.leaders_connected == len(epoch.plan.replicas)


def _broken(epoch: Epoch, status: SlotStatus) -> str:
    """Why a committed epoch cannot go on at this slot."""
    if epoch.number not in (status.prepare.epoch, status.committed_epoch):
        what = "was not heard when it was prepared" if status.committed_epoch else "was started anew"
        return f"slot {status.slot} {what}"
    if status.committed_epoch != epoch.number:
        return ""  # it has not been told to commit yet: what it says is of an older epoch
    if status.failure:
        return f"slot {status.slot} failed: {status.failure}"
    lost = [peer for peer in status.lost_peers if peer.slot in slots_of(epoch.plan)]  # who has left may end as it likes
    return f"slot {status.slot} lost its neighbour {lost[0].slot}: {lost[0].reason}" if lost else ""


def highest_epoch(ledger: Ledger, seen: Observed) -> int:
    """Numbers only rise, also after records were lost: no slot may see one twice with different plans."""
    kept = [
        each.last_number for each in (ledger.newest, ledger.in_force) if each
    ]  # for standing orders, carried out or not
    return max([ledger.committed, highest_known(seen), *kept])


def highest_known(seen: Observed) -> int:
    """To a slot or gateway that answers."""
    known = [status.prepare.epoch for status in seen.slots.values()]
    known += [status.committed_epoch for status in seen.slots.values()]
    return max([0, *known, *(gateway.epoch for gateway in seen.gateways.values())])


def progress_of(epoch: int, status: SlotStatus | None) -> int:
    """How far a slot is with an epoch: 0 while it is silent, 1 for its answer, 1 more for every layer it has loaded."""
    if status is None:
        return 0
    return 1 + (status.prepare.layers_loaded if status.prepare.epoch == epoch else 0)


def _refusals(epoch: Epoch, seen: Observed) -> tuple[Step, ...]:
    return tuple(
        PlanWithout(slot, seen.slots[slot].prepare.reason)
        for slot in sorted(waiting(epoch, seen.slots))
        if seen.slots[slot].prepare.epoch == epoch.number and seen.slots[slot].prepare.phase == "refused"
    )


def _prepares(epoch: Epoch, in_force: Epoch | None, seen: Observed) -> tuple[Step, ...]:
    """To every slot that answers and lacks it, once the addresses of all its part are known; those that leave are told what to give."""
    known = slots_in(part for part in parts_of(epoch.plan) if part <= set(seen.addresses))
    if known != slots_of(epoch.plan) and _orders(epoch, in_force, seen).giving:
        return ()  # each is told once of whom pages go to
    roles = {slot: each for slot, each in roles_of(epoch.plan).items() if slot in known}
    # Neighbours must mean the same port by the same key: beside one slot of 0.1.0 all do without keys of their own.
    oldest = min((seen.slots[slot].protocol for slot in set(roles) & set(seen.slots)), default=0)
    addresses = {slot: structs.replace(seen.addresses[slot], pages_port=0) for slot in sorted(roles)}
    orders = _orders(epoch, in_force, seen) if oldest >= _TAKES_ORDERS else PageOrders()
    prepares = {
        slot: prepare_for(epoch, roles.get(slot, ()), addresses, seen.slots[slot], with_keys=oldest > 0)
        for slot in sorted((set(roles) | set(orders.giving)) & set(seen.slots))
    }
    return tuple(
        SendToSlot(slot, structs.replace(each, sources=orders.sources.get(slot, ()), giving=orders.giving.get(slot)))
        for slot, each in prepares.items()
        if seen.slots[slot].prepare.epoch < epoch.number and seen.slots[slot].committed_epoch < epoch.number
    )


def _orders(epoch: Epoch, in_force: Epoch | None, seen: Observed) -> PageOrders:
    """Of slots that serve the epoch in force, to all others."""
    if in_force is None or in_force.number == epoch.number:
        return PageOrders()
    serving = {
        slot: each
        for slot, each in roles_of(in_force.plan).items()
        if slot in seen.slots
        and seen.slots[slot].committed_epoch == in_force.number
        and seen.slots[slot].protocol >= _TAKES_ORDERS
    }
    formed_now = {
        slot: tuple(role for role in each if epoch.formed_in(role.replica) == epoch.number)
        for slot, each in roles_of(epoch.plan).items()
    }
    return page_orders(moves_between(serving, formed_now), seen.addresses, epoch.key)


def prepare_for(
    epoch: Epoch,
    roles: tuple[Role, ...],
    addresses: dict[str, SlotAddress],
    status: SlotStatus,
    *,
    with_keys: bool = True,
) -> Prepare:
    """For one slot."""
    formed = tuple(epoch.formed_in(role.replica) for role in roles)
    is_new = status.protocol >= _TAKES_ORDERS  # others refuse what they do not know
    return Prepare(
        epoch=epoch.number,
        key=request_secret(epoch.key),
        roles=roles,
        slots=addresses,
        role_keys=tuple(role_keys(epoch.key, role) for role in roles) if with_keys else (),
        formed=formed if set(formed) != {epoch.number} else (),
        steps=tuple(_planned_step(epoch.plan, role) for role in roles) if is_new else (),
        shadow=epoch.plan.shadow_orders.get(status.slot) if is_new else None,
    )


def _planned_step(plan: Plan, role: Role) -> PlannedStep:
    stages = next(replica.stages for replica in plan.replicas if replica.replica == role.replica)
    seconds = [
        max(stage.times.prefill_seconds, stage.times.decode_seconds)
        + max(stage.times.prefill_transfer_seconds, stage.times.decode_transfer_seconds)
        for stage in stages
    ]
    return PlannedStep(stage_seconds=seconds[role.stage], pipeline_seconds=sum(seconds))


def _record(epoch: Epoch, ledger: Ledger, seen: Observed) -> tuple[Step, ...]:
    """What is in force and not on record any more may serve anybody: nothing begins before all have prepared then."""
    is_known, orders = ledger.in_force is not None or not ledger.committed, _orders(epoch, ledger.in_force, seen)
    learns = all(gateway.protocol >= ADDS_LEADERS for gateway in seen.gateways.values())  # of who joins later
    begins = is_known and learns and may_begin(epoch, ledger.in_force, seen.slots, orders)
    return (RecordCommit(epoch.number),) if begins or is_prepared(epoch, seen.slots) else ()


def _commits(epoch: Epoch, seen: Observed) -> tuple[Step, ...]:
    return tuple(
        SendToSlot(slot, Commit(epoch=epoch.number))
        for slot in sorted(slots_in(begun(epoch, seen.slots)) & set(seen.slots))
        if holds(epoch, seen.slots[slot]) and seen.slots[slot].committed_epoch != epoch.number
    )


def _leaves(epoch: Epoch, seen: Observed) -> tuple[Step, ...]:
    """To those without a part in it that were told to give pages: they end what they served. Nobody waits for them."""
    return tuple(
        SendToSlot(slot, Commit(epoch=epoch.number))
        for slot in sorted(set(seen.slots) - slots_of(epoch.plan))
        if seen.slots[slot].prepare.epoch == epoch.number
        and holds(epoch, seen.slots[slot])
        and seen.slots[slot].committed_epoch != epoch.number
    )


def _routes(epoch: Epoch, seen: Observed) -> tuple[Step, ...]:
    """To every gateway that lacks them, without replicas that wait, and again to one that lacks a replica which waits no more; who does not answer keeps no
    gateway from the replicas that are whole.
    """
    if not _serves(epoch, seen):
        return ()
    late, parts = waiting(epoch, seen.slots), slots_in(begun(epoch, seen.slots))
    members = {each.replica: {stage.slot for stage in each.stages} for each in epoch.plan.replicas}
    formed_later = {each for each, slots in members.items() if slots & late and epoch.formed_in(each) == epoch.number}
    route = route_of(epoch, seen.addresses, without=formed_later)
    joined = {leader.replica for leader in route.leaders if members[leader.replica] <= parts}
    return tuple(
        SendToGateway(name, route)
        for name, status in sorted(seen.gateways.items())
        if (status.protocol >= ADDS_LEADERS or not formed_later)
        and (status.epoch != epoch.number or (status.protocol >= ADDS_LEADERS and not joined <= set(status.replicas)))
    )


def route_of(epoch: Epoch, addresses: Mapping[str, SlotAddress], without: Collection[int] = ()) -> SetRoute:
    """`without`: replicas that are formed in it later: their slots may serve an earlier epoch at the same ports, by another key."""
    leaders = tuple(each for each in _leaders(epoch, addresses) if each.replica not in without)
    return SetRoute(
        epoch=epoch.number, key=request_secret(epoch.key), leaders=leaders, max_model_len=epoch.plan.max_model_len
    )


def _serves(epoch: Epoch, seen: Observed) -> bool:
    """Whether a replica does, with all its slots."""
    serving = {slot for slot, status in seen.slots.items() if status.committed_epoch == epoch.number}
    return any({stage.slot for stage in replica.stages} <= serving for replica in epoch.plan.replicas)


def _leaders(epoch: Epoch, addresses: Mapping[str, SlotAddress]) -> tuple[Leader, ...]:
    rates = {replica.replica: replica.decode_rate for replica in epoch.plan.replicas}
    formed = {each.replica: each.epoch for each in epoch.formations}
    return tuple(
        Leader(
            replica=role.replica,
            slot=slot,
            endpoint=f"tcp://{addresses[slot].host}:{addresses[slot].request_port + place}",
            tokens_per_second=rates[role.replica],
            formed=formed.get(role.replica, 0),
            key=request_secret(epoch.key_of(role.replica)) if role.replica in formed else "",
        )
        for slot, roles in sorted(roles_of(epoch.plan).items())
        for place, role in enumerate(roles)
        if role.leader and slot in addresses  # who is away has perhaps none; back, it is of a new epoch
    )
