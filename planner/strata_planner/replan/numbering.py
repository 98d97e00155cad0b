"""Which number each replica of a new plan has: one that stays as it is keeps its own.

A replica goes on through a change of epoch only under its own number and with the same roles (the operator's `formation`), so that numbers dealt
anew would empty the KV of replicas that lost nothing. Called by `moves` and `decision`. Pure.
"""

from collections.abc import Hashable, Sequence

import msgspec

from strata_planner.contract.plan import Plan, Replica
from strata_planner.question.request import PlanRequest
from strata_planner.search.layouts.stages import with_concurrency


def numbers_of(new: Sequence[Replica], running: Sequence[Replica]) -> tuple[int, ...]:
    """Of each new replica: that of the running one with the same layers at the same bits on the same devices; else that of the one with most
    of its devices; else the least that no other has.
    """
    held = {replica.replica: (_content(replica), _places(replica)) for replica in running}
    shared = [
        (-(_content(replica) == content), -len(_places(replica) & places), number, at)
        for at, replica in enumerate(new)
        for number, (content, places) in held.items()
    ]
    found = dict[int, int]()
    for _, in_common, number, at in sorted(shared):
        if in_common and at not in found and number not in found.values():
            found[at] = number
    free = iter(number for number in range(len(new) + len(held)) if number not in found.values())
    return tuple(found[at] if at in found else next(free) for at in range(len(new)))


def staying(request: PlanRequest, plan: Plan, running: Plan) -> Plan:
    """The plan with replicas that need not change left to the last byte: the same layers, bits, devices and micro-batches, and pages enough.

    A budget of pages found anew may be some pages larger, for the kernels of fewer widths are counted, and that alone is not worth empty KV.
    """
    if _shared(plan) != _shared(running):
        return plan
    old = {replica.replica: replica for replica in running.replicas}
    return msgspec.structs.replace(
        plan, replicas=tuple(_staying(request, each, old.get(each.replica)) for each in plan.replicas)
    )


def _staying(request: PlanRequest, new: Replica, old: Replica | None) -> Replica:
    if old is None or _content(new) != _content(old) or _devices(new) != _devices(old):
        return new
    pages = with_concurrency(request, new.concurrency).kv_pages
    has_room = all(stage.kv_page_budget >= pages for stage in old.stages)
    if new.micro_batch != old.micro_batch or new.concurrency > old.concurrency or not has_room:
        return new
    return msgspec.structs.replace(old, concurrency=new.concurrency)


def _content(replica: Replica) -> Hashable:
    return tuple((stage.places, stage.layers, stage.format, stage.kv_bits) for stage in replica.stages)


def _devices(replica: Replica) -> Hashable:
    """With their memory, and how they share a layer."""
    return tuple((stage.slot, stage.devices, stage.strategies, stage.shares) for stage in replica.stages)


def _places(replica: Replica) -> frozenset[Hashable]:
    return frozenset(place for stage in replica.stages for place in stage.places)


def _shared(plan: Plan) -> Hashable:
    """What all roles of a plan have from it."""
    model = plan.model_uri, plan.architecture, plan.num_layers, plan.head_format, plan.compute_type
    kept = plan.page_tokens, plan.prefix_caching, plan.boundary_log_pages
    return *model, *kept, plan.max_model_len, plan.speculation
