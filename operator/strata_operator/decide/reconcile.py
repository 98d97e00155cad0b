"""The operator's decision: what is seen of a deployment -> what to do now. Pure and level-triggered.

`reconcile` is called by the controller after every change and every few seconds; the first rule that has something to do
wins, and status is reported in any case. Doing the actions twice, or by another controller, changes nothing. What must be
remembered is written into status first, and acted on at the next look.
"""

import hashlib
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

from strata_operator.decide.actions import (
    Action,
    Apply,
    DeleteEpoch,
    DeletePod,
    DeleteStatefulSet,
    Emit,
    GiveOrders,
    MakePlan,
    RecordOrder,
    RenewEpoch,
)
from strata_operator.decide.brake import is_overdue, losses
from strata_operator.decide.conditions import Outcome, is_serving
from strata_operator.decide.epochs import CreateEpoch, PlanWithout, RecordCommit, Step, next_steps
from strata_operator.decide.exclusions import LOST, PEACE, Memory, delay, remember
from strata_operator.decide.formation import is_broken_again
from strata_operator.decide.hung import HUNG_GRACE_SECONDS, hung, stuck
from strata_operator.decide.planning import order_terms_of
from strata_operator.decide.report import report
from strata_operator.decide.rollout import outdated, replaced, speakable
from strata_operator.decide.standing_orders import carried_out
from strata_operator.decide.troubles import Trouble, troubles
from strata_operator.decide.view import PodView, View
from strata_operator.decide.wishes import Wanted, foreseen, wanted
from strata_operator.decide.withdrawal import withdrawal
from strata_operator.once import once_of_each
from strata_operator.render.epoch import Formation

RENEWALS_AT_ONCE = 3  # so many epochs of a plan in a row that did not last; further ones wait, each twice as long
LONGEST_PAUSE = timedelta(seconds=300)
KEPT_EPOCHS = 3  # records before the committed one that stay to be looked at
MOST_EPOCHS = 10  # records in all, beside the committed one
RUN_PODS = {"StatefulSet", "Deployment"}
GOES_ON = {
    "SpecChanged",
    "Drain",
    "BetterPlan",
}  # while such plans are made, which may take minutes, the old one is served


def reconcile(view: View) -> tuple[Action, ...]:
    """What to do, then what to say."""
    steps = converse(view)
    found = troubles(view, steps)
    memory = remember(view, found)
    if view.deployment.spec.paused:
        return report(view, Outcome(view.deployment.status.committed_epoch, memory))
    if served := carried_out(view.ledger, view.seen):  # all else is decided once this is on record
        return RecordOrder(served), *report(view, Outcome(view.deployment.status.committed_epoch, memory))
    if not any(isinstance(step, RecordCommit) for step in steps) and (back := withdrawal(view)):
        return back, *report(view, Outcome(view.deployment.status.committed_epoch, memory))
    wish = wanted(view, memory, found, steps)
    planning = _plan(view, wish, memory)
    replaces = (
        planning and not planning[0].early and planning[0].reason not in GOES_ON
    )  # nobody is told anything of the plan in force any more
    going_on = _roll_out(view) if replaces else _go_on(view, steps)
    committed = _committed(view, steps)
    outcome = Outcome(committed, memory, wish, found, losses(view).braked, bool(outdated(view)))
    return (*planning, *_freed(view, memory), *_ended(view, found), *going_on, *report(view, outcome), *_orders(view))


def _orders(view: View) -> tuple[GiveOrders, ...]:
    """Where there are any, and the spec still wants them."""
    terms, newest = order_terms_of(view.deployment), view.newest
    if terms is None or newest is None or not view.is_committed or not newest.epoch.has_orders:
        return ()
    return (GiveOrders(terms),)


def _go_on(view: View, steps: tuple[Step, ...]) -> tuple[Action, ...]:
    """With the plan in force."""
    return (
        _roll_out(view)
        or _carry_out(view, steps)
        or replaced(view, ready=is_serving(view))
        or _retire(view)
        or _forget(view)
    )


def converse(view: View) -> tuple[Step, ...]:
    """The next steps of the epochs; nobody is told anything before its objects are in the cluster."""
    return speakable(view, next_steps(view.plan, view.ledger, view.seen)) if view.plan else ()


def _committed(view: View, steps: tuple[Step, ...]) -> int:
    """As it is to be recorded."""
    recorded = view.deployment.status.committed_epoch
    return next((step.number for step in steps if isinstance(step, RecordCommit)), recorded)


def _plan(view: View, wish: Wanted, memory: Memory) -> tuple[MakePlan, ...]:
    """Taken not before status says what is remembered: a plan that was made and not counted could be made again for ever. That of a loss is made meanwhile."""
    status = view.deployment.status
    is_recorded = (memory.exclusions, memory.backoff) == (status.exclusions, status.backoff)
    if wish.plan is None:
        early = foreseen(view, memory)
        return (early,) if early else ()
    if is_recorded:
        return (wish.plan,)
    return (replace(wish.plan, early=True),) if wish.plan.reason == LOST else ()


def _roll_out(view: View) -> tuple[Action, ...]:
    """No pod is started that would read a key which somebody else has chosen (as the controller does where that shows only now)."""
    missing = [
        Apply(manifest, digest)
        for manifest in view.manifests
        if (digest := manifest_digest(manifest)) not in view.applied or _is_missing(view, manifest)
    ]
    unsafe = any(each.manifest["kind"] == "Secret" and each.digest in view.postponed for each in missing)
    return tuple(
        each
        for each in missing
        if each.digest not in view.postponed and not (unsafe and each.manifest["kind"] in RUN_PODS)
    )


@once_of_each
def manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _is_missing(view: View, manifest: dict[str, Any]) -> bool:
    return bool(manifest["kind"] == "StatefulSet" and manifest["metadata"]["name"] not in view.stateful_sets)


def _carry_out(view: View, steps: tuple[Step, ...]) -> tuple[Action, ...]:
    """Messages as they are; a broken epoch is renewed; that an epoch is committed is recorded by the report."""
    actions: list[Action] = []
    for step in steps:
        match step:
            case CreateEpoch(number=number, reason=reason, formations=formations):
                renewals = _renewals(view, formations)
                actions += [RenewEpoch(number, reason, renewals)] if _may_renew(view, renewals) else []
            case RecordCommit() | PlanWithout():
                pass
            case _:
                actions.append(step)
    return tuple(actions)


def _renewals(view: View, formations: tuple[Formation, ...]) -> int:
    """How many epochs of this plan in a row did not last, with the one to be made. A replica that breaks for the first time pays for no other one."""
    newest = view.newest
    if (
        newest is None
        or view.is_replacing
        or view.now - newest.at >= PEACE
        or not is_broken_again(newest.epoch, formations)
    ):
        return 1
    return newest.cause.renewals + 1


def _may_renew(view: View, renewals: int) -> bool:
    """Epochs that never last are made with pauses: each costs the replicas that it forms anew their KV."""
    pause = delay(renewals - RENEWALS_AT_ONCE + 1, LONGEST_PAUSE)
    return view.newest is None or view.now - view.newest.at >= pause


def _retire(view: View) -> tuple[Action, ...]:
    """Slots without a role, once the plan that does without them serves: the StatefulSet first, then the pod that nobody
    else can end, because its node is away.
    """
    if not view.is_committed:
        return ()
    wanted_slots = {stage.slot for stage in view.stages()}
    gone = tuple(DeleteStatefulSet(name) for name in sorted(set(view.stateful_sets) - wanted_slots))
    return gone or tuple(
        DeletePod(pod.name, pod.uid, grace_seconds=0)
        for pod in view.pods
        if pod.stateful_set not in wanted_slots and (pod.node not in view.nodes or view.nodes[pod.node].away_since)
    )


def _freed(view: View, memory: Memory) -> tuple[DeletePod, ...]:
    """A gateway that is to end on a node that cannot end it, or that ran on one that is lost: nobody else confirms that."""
    silent = memory.silent(view.now)
    return tuple(
        DeletePod(pod.name, pod.uid, grace_seconds=0)
        for pod in view.gateway_pods
        if (
            pod.node in silent and pod.started_at
        )  # one that the scheduler sends there is left: another would follow it
        or (pod.is_ending and pod.node and (pod.node not in view.nodes or is_overdue(view, pod.node)))
    )


def _ended(view: View, found: tuple[Trouble, ...]) -> tuple[Action, ...]:
    """Slots that hang, as a liveness probe would see to it: the kubelet knows nothing of epochs."""
    told = stuck(view)

    def why(pod: PodView) -> str:
        return f"hangs ({told[pod.stateful_set]})" if pod.stateful_set in told else "runs and answers nobody"

    return tuple(
        action
        for pod in hung(view, found)
        for action in (
            DeletePod(pod.name, pod.uid, grace_seconds=HUNG_GRACE_SECONDS),
            Emit("Warning", "SlotHung", f"slot {pod.stateful_set} {why(pod)}: its pod {pod.name} is ended"),
        )
    )


def _forget(view: View) -> tuple[Action, ...]:
    """By count as well as by commit: epochs that never come to serve are records too."""
    committed = view.deployment.status.committed_epoch
    surplus = {record.epoch.number for record in view.records[:-MOST_EPOCHS]}
    return tuple(
        DeleteEpoch(number)
        for number in (record.epoch.number for record in view.records)
        if number < committed - KEPT_EPOCHS or (number in surplus and number != committed)
    )
