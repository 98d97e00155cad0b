"""Shadows: which slot keeps which layers of others in host memory, so that a takeover reads memory. What the repair of each node's loss would have it read.

Called for plans that a search has found, by whoever makes them. What a slot keeps is against the loss of another node, so that no loss takes a layer
and its shadow; what lies on one node is spread over all slots that would take it over.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from strata_planner.contract.plan import Plan
from strata_planner.contract.shadows import Shadow
from strata_planner.errors import PlannerError
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.replan.repair import Repair, Takeover, repair
from strata_planner.replan.shadow_room import Read, reads_for, rooms_of, shadows_of
from strata_planner.replan.steps import Load


@dataclass(frozen=True)
class Shadowed:
    """`note`: why nothing is kept, or against which losses nothing can be; empty: there is nothing to say."""

    plan: Plan
    note: str = ""


def with_shadows(request: PlanRequest, plan: Plan, wishes: Takeover, most_bytes: int) -> Shadowed:
    """`most_bytes`: of host memory on each slot; of a processor's no more than the plan leaves of it. 0: nothing is kept, or worked out. What a plan has already
    stays, unless there is more to be kept.
    """
    before, plan = plan, msgspec.structs.replace(plan, shadows=())
    if not most_bytes:
        return Shadowed(plan)
    nodes = sorted({stage.node for stage in plan.stages})
    if len(nodes) == 1:
        return Shadowed(
            plan,
            f"no shadows: every stage is on {nodes[0]}; its loss takes them along, its page cache serves all its slots",
        )
    reads: dict[str, dict[str, tuple[Read, ...]]] = {}
    missing = list[str]()
    for node in nodes:
        found = _repaired(request, plan, wishes, node)
        if found is None:
            missing.append(node)
            continue
        for slot, listed in reads_after(plan, found, request.model).items():
            reads.setdefault(slot, {})[node] = listed
    rooms = rooms_of(plan, {stage.slot: most_bytes for stage in plan.stages})
    shadows = tuple(each for slot in sorted(reads) for each in shadows_of(plan, slot, reads[slot], rooms[slot]))
    note = _note(missing, reads, shadows=bool(shadows))
    allowed = all(each.room_bytes <= rooms.get(each.slot, 0) for each in before.shadows)
    if before.shadows and allowed and _all_bytes(before.shadows) >= _all_bytes(shadows):
        return Shadowed(before, note)
    return Shadowed(msgspec.structs.replace(plan, shadows=shadows), note)


def _all_bytes(shadows: Iterable[Shadow]) -> int:
    return sum(each.size_bytes for each in shadows)


def _note(missing: list[str], reads: dict[str, dict[str, tuple[Read, ...]]], *, shadows: bool) -> str:
    if missing:
        return f"no shadows against the loss of {', '.join(missing)}: no repair is known for it"
    if reads and not shadows:
        return "no shadows: no slot has host memory left for a layer of another"
    return ""


def _repaired(request: PlanRequest, plan: Plan, wishes: Takeover, node: str) -> Repair | None:
    left = replace(request, cluster=request.cluster.without({node}))
    try:
        return repair(left, plan, wishes)
    except PlannerError:
        return None


def reads_after(plan: Plan, found: Repair, model: Model) -> dict[str, tuple[Read, ...]]:
    """Of each slot that runs stages of the plan, what the repair has it read; nothing of stages that several devices share."""
    before = {stage.places: stage for stage in plan.stages if stage.tensor_parallel == 1}
    after = {stage.places: stage for stage in found.plan.stages}
    layers: dict[str, dict[int, Load]] = {}
    tables: dict[str, tuple[bool, bool]] = {}
    for step in found.steps:
        if not isinstance(step, Load) or step.place not in before:
            continue
        old, new = before[step.place], after[step.place]
        if step.layer is None:
            tables[old.slot] = (new.embedding and not old.embedding, new.head and not old.head)
        else:
            layers.setdefault(old.slot, {})[step.layer] = step
    return {
        slot: reads_for(
            model,
            plan,
            {layer: load.to for layer, load in sorted(layers.get(slot, {}).items())},
            tables.get(slot, (False, False)),
        )
        for slot in sorted(layers.keys() | tables.keys())
    }
