"""Which nodes' slots are away with their process alone, and whether they are waited for or taken over (`comeback`), as the operator sees it.

Called by wishes, hung and the controller. Pure. Nodes that are lost themselves are the brake's.
"""

from strata_operator.decide.brake import cordoned, losses, mass_loss
from strata_operator.decide.comeback import SWITCH_SECONDS, Pace, served_share, still_to_go, weigh
from strata_operator.decide.epochs import unheard
from strata_operator.decide.parts import holds
from strata_operator.decide.troubles import progress
from strata_operator.decide.view import View
from strata_operator.render.records import RENEWED, Weighed
from strata_planner.contract.control import Took
from strata_planner.contract.plan import Stage

# Of a cluster, as ours was measured (docs/kubernetes.md): a container is started again, a pod is made and scheduled, a process has imported what it needs.
CONTAINER_SECONDS, POD_SECONDS, START_SECONDS = 1.0, 2.0, 3.0


def fallen(view: View) -> frozenset[str]:
    """Nodes all of whose slots are without a process, or with one that only starts or loads, while the plan in force needs them. A node that others of its
    slots serve on is none: a repair would do without those too; and nobody takes over who does not answer.
    """
    if not (view.is_committed or is_renewing(view)) or view.is_replacing or losses(view).lost:
        return frozenset()
    missed = unheard(view.ledger, view.seen)
    down = {stage.node for stage in view.stages() if _is_down(view, stage, missed)}
    up = [stage for stage in view.stages() if not _is_down(view, stage, missed)]
    if not all(view.answers(stage.slot) for stage in up):
        return frozenset()
    found = frozenset(down - {stage.node for stage in up} - set(cordoned(view))) if up else frozenset()
    return frozenset() if mass_loss(view, found) else found


def is_renewing(view: View) -> bool:
    """Whether what was in force is formed anew: those that were started again load, and the others of their replicas wait for them."""
    newest, committed = view.newest, view.deployment.status.committed_epoch
    if newest is None or not committed or view.is_committed:
        return False
    return newest.cause.reason == RENEWED or newest.epoch.number == committed


def weighed(view: View) -> Weighed | None:
    """None while nothing is away, or the repair is not known: it is made as soon as something is."""
    nodes, told, plan = fallen(view), view.foretold, view.plan
    if not nodes or plan is None or told is None or told.nodes != nodes:
        return None
    lost = [stage for stage in view.stages() if stage.node in nodes]
    restart = max(_rest(view, stage) for stage in lost)
    takeover = pace(view).takeover_seconds(plan, told.repair)
    meanwhile = served_share(plan, frozenset(stage.slot for stage in lost))
    return weigh(restart, takeover, told.repair.kept_share, meanwhile)


def restart_seconds(view: View, slot: str) -> float:
    """From the end of its process until it serves again."""
    assert view.plan is not None
    pod = view.pod_of(slot)
    again = POD_SECONDS if pod is None or pod.is_ending else CONTAINER_SECONDS + pod.back_off_seconds
    return pace(view, again).restart_seconds(view.plan, slot)


def pace(view: View, again_seconds: float = 0.0) -> Pace:
    """As status has kept it, which outlasts the operator and every process that it tells of."""
    took = {
        stage.slot: Took(stage.start_seconds, stage.load_seconds, 0)
        for stage in view.deployment.status.stages
        if stage.start_seconds is not None and stage.load_seconds is not None
    }
    return Pace(took, START_SECONDS, again_seconds)


def _is_down(view: View, stage: Stage, missed: set[str]) -> bool:
    """Its kubelet says so; or nobody hears it, and its pod's kernel refuses the connection; or it loads. What is stopped has its connection taken, and may
    go on.
    """
    node, pod = view.nodes.get(stage.node), view.pod_of(stage.slot)
    if node is None or node.away_since:
        return False
    if view.newest and (status := view.seen.slots.get(stage.slot)):
        was_there = view.newest.cause.reason == RENEWED  # else it loads for the first time
        return was_there and is_renewing(view) and not status.committed_epoch and not holds(view.newest.epoch, status)
    if pod is None or pod.is_ending or not pod.is_running or pod.started_at is None:
        return True
    knocked = view.knocked.get(stage.slot)
    return (stage.slot in missed or is_renewing(view)) and knocked is not None and knocked.door == "refused"


def _rest(view: View, stage: Stage) -> float:
    """Until it serves again; of one that loads, by the layers that are left."""
    assert view.plan is not None
    far = progress(view, stage)
    if view.answers(stage.slot):
        left = 1 - min(1.0, max(0, far.reached - 1) / (stage.layers[1] - stage.layers[0] + 1))
        expected = left * pace(view).load_seconds(view.plan, stage.slot) + SWITCH_SECONDS
    else:
        expected = restart_seconds(view, stage.slot)
    return still_to_go(expected, (view.now - far.since).total_seconds())
