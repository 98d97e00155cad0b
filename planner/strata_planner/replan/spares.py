"""Devices that serve nothing, in the place of those that a replica lost. Called by `repair`."""

import msgspec

from strata_planner.contract.plan import Place, Replica, Stage
from strata_planner.costs.shards import degrees_of
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.replan.repaired import Groups


def with_spares(request: PlanRequest, replica: Replica, groups: Groups, taken: frozenset[Place]) -> Groups | None:
    """The replica's stages, each lost one replaced by idle devices with as much memory, those most like its own first: what is left of
    them, then others of their type, then those with the most memory. None where nothing is idle.
    """
    lost = [at for at, each in enumerate(groups) if not each]
    held = {place for each in groups for group in each for place in group.places}
    own = {place for at in lost for place in replica.stages[at].places}
    idle = _idle(request, (taken - own) | held)
    filled, stages = list(groups), sum(map(len, groups))
    most = min(request.max_stages or request.model.num_layers, request.model.num_layers)
    for at in lost:
        stage, missing = replica.stages[at], replica.stages[at].total_bytes
        for group in sorted(idle, key=lambda group: _unlike(stage, group)):
            if missing <= 0 or stages >= most:
                break
            if not held & set(group.places):
                filled[at] += (group,)
                held |= set(group.places)
                missing -= group.usable_bytes * group.degree
                stages += 1
    return tuple(filled) if any(filled[at] for at in lost) else None


def _idle(request: PlanRequest, taken: frozenset[Place] | set[Place]) -> list[DeviceGroup]:
    """Groups of every degree that may be asked for, of equal devices of one node, in the cluster's order: names have no part in it."""
    kinds: dict[tuple[str, str, int, bytes], list[DeviceGroup]] = {}
    for device in request.cluster.accelerators():
        if device.place not in taken and device.usable_bytes > 0:
            kind = (device.node, device.type, device.usable_bytes, msgspec.json.encode(device.profile, order="sorted"))
            kinds.setdefault(kind, []).append(DeviceGroup((device,)))
    found: list[DeviceGroup] = []
    for equal in kinds.values():
        for degree, shares in degrees_of(request.model, request.tensor_parallel).items():
            found += [
                DeviceGroup(tuple(each.leader for each in equal[at : at + degree]), shares)
                for at in range(0, len(equal) - degree + 1, degree)
            ]
    return found


def _unlike(stage: Stage, group: DeviceGroup) -> tuple[bool, bool, bool, int]:
    """Of groups that are equally unlike the first is taken."""
    own = not set(group.places) & set(stage.places)
    return own, group.leader.type != stage.devices[0].type, group.degree != stage.tensor_parallel, -group.usable_bytes
