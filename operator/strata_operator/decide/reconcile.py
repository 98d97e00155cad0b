"""The operator's decision: what is seen of a deployment -> what to do now. Pure and level-triggered.

`reconcile` is called by the controller after every change and every few seconds; the first rule that has something to do
wins, and status is reported in any case. Doing the actions twice, or by another controller, changes nothing.
"""

import hashlib
import json
from datetime import datetime, timedelta
from typing import Any

from strata_operator.decide.actions import (
    Action,
    Apply,
    DeleteEpoch,
    DeletePod,
    DeleteStatefulSet,
    MakePlan,
    RenewEpoch,
)
from strata_operator.decide.epochs import CreateEpoch, PlanWithout, RecordCommit, Step, next_steps
from strata_operator.decide.report import report
from strata_operator.decide.view import View
from strata_operator.render.records import RENEWED

UNSCHEDULABLE = timedelta(seconds=60)  # so long a slot may wait for a place, or for its pod to be created
RENEWALS, RENEWAL_PERIOD = 5, timedelta(seconds=60)  # at most so many epochs of an unchanged plan within this time
KEPT_EPOCHS = 3  # records before the committed one that stay to be looked at


def reconcile(view: View) -> tuple[Action, ...]:
    """What to do, then what to say."""
    if view.deployment.spec.paused:
        return report(view, committed=view.deployment.status.committed_epoch)
    steps = _converse(view)
    actions = _plan(view, steps) or _roll_out(view) or _carry_out(view, steps) or _retire(view) or _forget(view)
    committed = next(
        (step.number for step in steps if isinstance(step, RecordCommit)), view.deployment.status.committed_epoch
    )
    return (*actions, *report(view, committed))


def _converse(view: View) -> tuple[Step, ...]:
    """The next steps of the epochs; nobody is told anything before its objects are in the cluster."""
    return next_steps(view.plan, view.ledger, view.seen) if view.plan else ()


def _plan(view: View, steps: tuple[Step, ...]) -> tuple[Action, ...]:
    wish = _first_plan(view) or _spec_changed(view) or _node_lost(view) or _no_place(view) or _refused(view, steps)
    if wish is None or (view.failure and view.failure.key == plan_key(view, wish)):
        return ()
    return (wish,)


def plan_key(view: View, wish: MakePlan) -> str:
    """Planning the same again would give the same."""
    return f"{view.spec_digest}/{view.inventory_digest}/{','.join(sorted(wish.without))}"


def _first_plan(view: View) -> MakePlan | None:
    return MakePlan("Created") if view.newest is None else None


def _spec_changed(view: View) -> MakePlan | None:
    made_for = view.newest.cause.spec_digest if view.newest else ""
    return MakePlan("SpecChanged") if made_for != view.spec_digest else None


def _node_lost(view: View) -> MakePlan | None:
    lost = lost_nodes(view)
    return MakePlan("NodeLost", frozenset(lost), lost[0]) if lost else None


def lost_nodes(view: View) -> list[str]:
    """Nodes of the plan that are gone, or not Ready for longer than the grace period and silent: a slot that answers
    its controller is not lost, whatever the node's condition says.
    """
    grace = timedelta(seconds=view.deployment.spec.replanning.grace_period_seconds)
    lost = set()
    for stage in view.stages():
        node = view.nodes.get(stage.node)
        overdue = node is not None and node.away_since is not None and view.now - node.away_since >= grace
        if (node is None or overdue) and not view.answers(stage.slot):
            lost.add(stage.node)
    return sorted(lost)


def _no_place(view: View) -> MakePlan | None:
    """A slot that waits for a place too long, or for its pod to be created (a quota)."""
    for stage in view.stages():
        since = _waiting_since(view, stage.slot)
        if since is not None and view.now - since >= UNSCHEDULABLE:
            return MakePlan("Unschedulable", frozenset({stage.node}), stage.node)
    return None


def _waiting_since(view: View, slot: str) -> datetime | None:
    """A pod that is missing for a moment in a served epoch is being replaced: that is no waiting."""
    newest, pod, made = view.newest, view.pod_of(slot), view.stateful_sets.get(slot)
    if pod is not None:
        return pod.waiting_since
    if newest is None or made is None or view.deployment.status.committed_epoch == newest.epoch.number:
        return None
    return max(newest.at, made)


def _refused(view: View, steps: tuple[Step, ...]) -> MakePlan | None:
    refusing = {step.slot for step in steps if isinstance(step, PlanWithout)}
    nodes = sorted({stage.node for stage in view.stages() if stage.slot in refusing})
    return MakePlan("PrepareRefused", frozenset(nodes), nodes[0]) if nodes else None


def _roll_out(view: View) -> tuple[Action, ...]:
    return tuple(
        Apply(manifest, digest)
        for manifest in view.manifests
        if (digest := manifest_digest(manifest)) not in view.postponed
        and (digest not in view.applied or _is_missing(view, manifest))
    )


def manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _is_missing(view: View, manifest: dict[str, Any]) -> bool:
    return manifest["kind"] == "StatefulSet" and manifest["metadata"]["name"] not in view.stateful_sets


def _carry_out(view: View, steps: tuple[Step, ...]) -> tuple[Action, ...]:
    """Messages as they are; a broken epoch is renewed; that an epoch is committed is recorded by the report."""
    actions: list[Action] = []
    for step in steps:
        match step:
            case CreateEpoch(number=number, reason=reason):
                actions += [RenewEpoch(number, reason)] if _may_renew(view) else []
            case RecordCommit() | PlanWithout():
                pass
            case _:
                actions.append(step)
    return tuple(actions)


def _may_renew(view: View) -> bool:
    """Epochs that never last are made with pauses: each costs every slot its KV."""
    recent = [record for record in view.records if view.now - record.at < RENEWAL_PERIOD]
    return sum(record.cause.reason == RENEWED for record in recent) < RENEWALS


def _retire(view: View) -> tuple[Action, ...]:
    """Slots without a role, once the plan that does without them serves: the StatefulSet first, then the pod that nobody
    else can end, because its node is away.
    """
    newest = view.newest
    if newest is None or view.deployment.status.committed_epoch != newest.epoch.number:
        return ()
    wanted = {stage.slot for stage in view.stages()}
    gone = tuple(DeleteStatefulSet(name) for name in sorted(set(view.stateful_sets) - wanted))
    return gone or tuple(
        DeletePod(pod.name, pod.uid)
        for pod in view.pods
        if pod.stateful_set not in wanted and (pod.node not in view.nodes or view.nodes[pod.node].away_since)
    )


def _forget(view: View) -> tuple[Action, ...]:
    committed = view.deployment.status.committed_epoch
    return tuple(
        DeleteEpoch(record.epoch.number)
        for record in view.records
        if record.epoch.number < committed - KEPT_EPOCHS and view.now - record.at >= RENEWAL_PERIOD
    )
