"""Nodes that are lost before Kubernetes says so: their slots fell silent, who worked with them misses them, and nobody answers a knock there.

Called by the brake and by troubles. Pure. Each of the three alone is no loss: a slot that only its controller does not hear serves on, one that only its
neighbours miss may be beside a cut cable, and a host that answers a knock has a process that died or hangs, which its kubelet or a new process mends.
"""

from strata_operator.decide.epochs import missed_leaders, slots_of
from strata_operator.decide.view import View
from strata_planner.contract.plan import Replica


def silent_nodes(view: View) -> frozenset[str]:
    """Nodes of the plan that are there as far as Kubernetes knows, and are lost all the same. Of a replica that misses anybody all that cannot
    be reached are: who is lost between two others that are has nobody left to say so.
    """
    missing = {stage.node for replica in _broken(view) for stage in replica.stages}
    return unreached_nodes(view) & missing


def unreached_nodes(view: View) -> frozenset[str]:
    """Nodes of the plan that its controller alone cannot reach, whoever else does."""
    return frozenset(node for node in {stage.node for stage in view.stages()} if _is_unreached(view, node))


def suspects(view: View) -> frozenset[str]:
    """Slots to knock at: somebody misses them, and it is not known yet whether anybody is there."""
    return (accused(view) & (slots_of(view.plan) if view.plan else set())) - view.unreachable


def accused(view: View) -> frozenset[str]:
    """Slots that others of the epoch in force have lost: their neighbours, or all gateways as leaders of theirs. Whether or not they answer."""
    number, in_force = view.deployment.status.committed_epoch, view.ledger.in_force
    if number == 0:
        return frozenset()
    members = slots_of(in_force.plan) if in_force else set()
    # Who waits to pass into it may serve as it was formed before.
    witnesses = (each for slot, each in view.seen.slots.items() if each.committed_epoch == number or slot in members)
    missed = {peer.slot for status in witnesses for peer in status.lost_peers}
    return frozenset(missed | (missed_leaders(in_force, view.seen.gateways) if in_force else set()))


def _broken(view: View) -> tuple[Replica, ...]:
    """Replicas of the newest plan that miss somebody; all of them while it is prepared in place of one that does."""
    missed, replicas = accused(view), view.plan.replicas if view.plan else ()
    if missed and view.newest and view.newest.epoch.number != view.deployment.status.committed_epoch:
        return replicas
    return tuple(each for each in replicas if any(stage.slot in missed for stage in each.stages))


def _is_unreached(view: View, name: str) -> bool:
    """Nobody is reached on it, and its kubelet has told of nothing: a container that ended, a pod that is to end or has gone."""
    node, slots = view.nodes.get(name), [stage.slot for stage in view.stages() if stage.node == name]
    pods = [view.pod_of(slot) for slot in slots]
    return (
        node is not None
        and all(slot in view.unreachable and not view.answers(slot) for slot in slots)
        and all(pod is not None and pod.is_running and not pod.is_ending for pod in pods)
    )
