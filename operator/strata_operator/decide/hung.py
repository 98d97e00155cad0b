"""Slots whose process is there and is of no use: it does not answer, stopped or stuck in a driver, or says that a step does not get on. Kubernetes sees
nothing of it; a new process may do better.

Called by reconcile, which ends their pods. Pure.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from strata_operator.decide.epochs import hung_slots, unheard
from strata_operator.decide.silence import silent_nodes
from strata_operator.decide.troubles import STALLED, Trouble, progress
from strata_operator.decide.view import PodView, View
from strata_operator.decide.weighing import restart_seconds
from strata_planner.contract.plan import Stage

HUNG_GRACE_SECONDS = 1  # a process that hangs does not end by itself: the kubelet kills it after so long
LEAST_SECONDS = 2  # of silence where knocks are taken: a connection is made anew within these
# So long before it fell silent its process was there: silence is noticed late, clocks differ.
SERVED = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Silence:
    """A slot of a served epoch that does not answer its controller. `since`: by the operator's clock. `started`: its process, by its node's;
    None: it is to end, or others see to that.
    """

    since: datetime
    is_accused: bool  # another slot of its replica, or every gateway, has lost it too
    started: datetime | None
    reached: datetime | None = (
        None  # since when it could be heard again: before that its node, or the way there, was away
    )


def is_hung(silence: Silence, now: datetime, patience: timedelta) -> bool:
    """Whether a process that has served is heard by nobody for so long. One that was started since is only starting."""
    served = silence.started is not None and silence.since - silence.started >= SERVED
    waited = now - max(silence.since, silence.reached or silence.since)
    return served and silence.is_accused and waited >= patience


def hung(view: View, found: Iterable[Trouble]) -> tuple[PodView, ...]:
    """Pods to be ended: of slots that served and are heard by nobody any more, that got no further and no plan does without, or that say of themselves that a
    step hangs. What is on a node that is away, or that nobody reaches, is the brake's.
    """
    told, silent = stuck(view), silent_nodes(view)
    accused, stalled = unheard(view.ledger, view.seen), _nodes_without_another_plan(view, found)
    useless = {stage.slot: stage for stage in view.stages() if stage.slot in told or not view.answers(stage.slot)}
    pods = (
        (stage, view.pod_of(slot))
        for slot, stage in useless.items()
        if view.is_there(stage.node) and stage.node not in silent
    )
    return tuple(
        pod
        for stage, pod in pods
        if pod is not None
        and not pod.is_ending
        and (
            stage.slot in told
            or _fell_silent(view, stage, pod, accused)
            or (stage.node in stalled and _had_its_time(view, pod))
        )
    )


def stuck(view: View) -> dict[str, str]:
    """Slots with a step that does not get on, each with why. They have waited for longer than it could take: no grace is added."""
    return hung_slots(view.newest.epoch, view.seen) if view.newest else {}


def _fell_silent(view: View, stage: Stage, pod: PodView, accused: Collection[str]) -> bool:
    """For the owner's bound; for less where the kernel of its pod takes connections to a port that nobody reads: that is no partition, and who may go on
    by itself is waited for as long as a restart would take, so that nobody waits twice as long as was best. The way there may only just be whole again,
    and its own connection is made anew: so it counts from the first knock that is taken on.
    """
    since, knocked = progress(view, stage).since, view.knocked.get(stage.slot)
    started = pod.started_at if pod.is_running else None
    silence = Silence(since, stage.slot in accused, started, view.nodes[stage.node].ready_since)
    if is_hung(silence, view.now, timedelta(seconds=view.deployment.spec.replanning.grace_period_seconds)):
        return True
    if knocked is None or knocked.door != "taken":
        return False
    deaf = replace(silence, reached=max(knocked.since, silence.reached or knocked.since))
    return is_hung(deaf, view.now, timedelta(seconds=max(LEAST_SECONDS, restart_seconds(view, stage.slot))))


def _nodes_without_another_plan(view: View, found: Iterable[Trouble]) -> frozenset[str]:
    """Where slots got no further, and a plan without them was not found."""
    newest = view.newest
    if newest is None or not any(each.wish == STALLED and each.at >= newest.at for each in view.failures.values()):
        return frozenset()
    return frozenset(trouble.node for trouble in found if trouble.reason == STALLED)


def _had_its_time(view: View, pod: PodView) -> bool:
    """A pod that is younger than what a slot may take has not."""
    return view.now - pod.made_at >= timedelta(seconds=view.deployment.spec.replanning.prepare_timeout_seconds)
