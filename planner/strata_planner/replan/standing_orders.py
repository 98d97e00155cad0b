"""Standing orders: the repair of each single loss, worked out before it happens, for slots and gateways to carry out while nobody controls them.

Called for plans that a search has found, by whoever makes them. A single loss is that of a slot, or of a node with several. Orders make do with slots that
run: nobody is there who would start others.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from strata_planner.contract.plan import Place, Plan, StandingOrder
from strata_planner.errors import PlannerError
from strata_planner.question.cluster import Cluster
from strata_planner.question.request import PlanRequest
from strata_planner.replan.repair import Repair, Takeover, repair

MOST_STAGES = 512  # of all orders together: they are part of the plan, which one object of the API server has to hold


@dataclass(frozen=True)
class Ordered:
    """`note`: against which losses there is no order; empty: there is nothing to say."""

    plan: Plan
    note: str = ""


def with_orders(request: PlanRequest, plan: Plan, wishes: Takeover, *, wanted: bool = True) -> Ordered:
    """`request`: what the plan answers. Costs a repair for each loss."""
    plan = msgspec.structs.replace(plan, orders=None)
    if not wanted:
        return Ordered(plan)
    found, missing, stages = list[StandingOrder](), list[str](), 0
    for lost in single_losses(plan):
        repaired = _repaired(request, plan, wishes, lost)
        order = None if repaired is None else order_of(plan, repaired, lost)
        stages += sum(len(each.stages) for each in order.replicas) if order else 0
        if order is None or stages > MOST_STAGES:
            missing.append(" and ".join(lost))
        else:
            found.append(order)
    why = f"more than {MOST_STAGES} stages would be in orders" if stages > MOST_STAGES else "no repair is known for it"
    note = f"no standing order against the loss of {', '.join(missing)}: {why}" if missing else ""
    return Ordered(msgspec.structs.replace(plan, orders=tuple(found)), note)


def single_losses(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Each slot, then each node with several slots and not all of them."""
    nodes: dict[str, set[str]] = {}
    for stage in plan.stages:
        nodes.setdefault(stage.node, set()).add(stage.slot)
    slots = sorted({stage.slot for stage in plan.stages})
    several = (tuple(sorted(each)) for _, each in sorted(nodes.items()) if 1 < len(each) < len(slots))
    return (*((slot,) for slot in slots), *several)


def order_of(plan: Plan, found: Repair, lost: tuple[str, ...]) -> StandingOrder:
    losing = {each.replica for each in plan.replicas if {stage.slot for stage in each.stages} & {*lost}}
    left = {each.replica for each in found.plan.replicas}
    note = found.note
    return StandingOrder(
        lost=lost,
        replicas=tuple(each for each in found.plan.replicas if each.replica in losing),
        prediction=found.plan.prediction,
        kind=note.kind,
        layers_moved=note.layers_moved,
        bits_lowered=note.bits_lowered,
        loaded_bytes=note.loaded_bytes,
        kept_share=note.kept_share,
        left_out=tuple(sorted(losing - left)),
        shadows=found.plan.shadows,
    )


def _repaired(request: PlanRequest, plan: Plan, wishes: Takeover, lost: tuple[str, ...]) -> Repair | None:
    gone = {place for stage in plan.stages if stage.slot in lost for place in stage.places}
    try:
        return repair(replace(request, cluster=only(request.cluster, plan.places - gone)), plan, wishes)
    except PlannerError:
        return None


def only(cluster: Cluster, places: Iterable[Place]) -> Cluster:
    """The cluster with no other devices, which keep their numbers as long as the last ones of a type go."""
    nodes, wanted = [], sorted(places)
    for node in cluster.nodes:
        kept = {kind: 1 + index for name, kind, index in wanted if name == node.name}
        devices = []
        for device in node.devices:
            count = min(device.count, kept.get(device.type, 0))
            kept[device.type] = kept.get(device.type, 0) - count
            devices += [msgspec.structs.replace(device, count=count)] if count else []
        nodes += [msgspec.structs.replace(node, devices=tuple(devices))] if devices else []
    rest = cluster.restricted_to({node.name for node in nodes})
    return msgspec.structs.replace(rest, nodes=tuple(nodes))
