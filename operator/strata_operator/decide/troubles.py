"""Slots of the newest plan that cannot do what it asks of them: refused, stuck, without a place or an image, without end, or gone.

Called by reconcile; what is found is remembered (exclusions) and leads to a plan without the slot's node. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from strata_operator.decide.brake import losses
from strata_operator.decide.epochs import PlanWithout, Step, missed_leaders, progress_of, why_broken
from strata_operator.decide.parts import holds
from strata_operator.decide.view import View
from strata_operator.render.records import moment, stamp
from strata_planner.contract.control import SlotStatus
from strata_planner.contract.plan import Stage

# So long a slot may wait for a place, for its pod, for its image, or for the end of the pod before.
UNSCHEDULABLE = timedelta(seconds=60)
STALLED = "PrepareStalled"
SILENT = "NodeSilent"
PARTED = "PeersUnreachable"
FORMED_IN_VAIN = 3  # epochs in a row in which slots that all answer lost each other: what is between them does not heal
TOLD_TIMES = 10  # so often at most within the time that it may make no progress, that of a download is written


@dataclass(frozen=True, slots=True)
class Trouble:
    """`reason` in CamelCase; `message` says of which slot and what."""

    node: str
    reason: str
    message: str


def troubles(view: View, steps: Iterable[Step]) -> tuple[Trouble, ...]:
    """At most one of a node, in the order of the plan."""
    refused = {step.slot: step.reason for step in steps if isinstance(step, PlanWithout)}
    silent = losses(view).silent
    found: dict[str, Trouble] = {}
    for stage in view.stages():
        if stage.node in silent:  # Kubernetes would offer it for the next plan
            told = f"node {stage.node} is lost: slot {stage.slot} is missed, and nobody answers a knock, neither there nor at its kubelet"
            found.setdefault(stage.node, Trouble(stage.node, SILENT, told))
        for trouble in _of(view, stage, refused):
            found.setdefault(stage.node, trouble)
    if parted := _parted(view):
        found.setdefault(parted.node, parted)
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a slot is: `reached` as `progress_of` tells, `loaded` of tensors and MiB within it, and since when."""

    reached: int
    loaded: int
    since: datetime


def progress(view: View, stage: Stage) -> Progress:
    """The furthest that its slot has come with the newest epoch: as status keeps it, brought up to date. A download is told now and then: each is written."""
    before, reached, loaded = _kept(view, stage), 0, 0
    everything = 2 + stage.layers[1] - stage.layers[0]
    if view.newest is not None:
        epoch, status = view.newest.epoch, view.seen.slots.get(stage.slot)
        reached = max(progress_of(epoch.number, status), everything if holds(epoch, status) else 0)
        loaded = status.prepare.progress if status and 0 < reached < everything else 0
        loaded = loaded if status and status.prepare.epoch == epoch.number else 0
    if before is None or reached > before.reached or before.reached >= everything > reached:
        return Progress(reached, loaded, view.now)  # who had everything and was started anew begins anew
    every = view.deployment.spec.replanning.prepare_timeout_seconds / TOLD_TIMES
    if reached == before.reached and loaded > before.loaded and (view.now - before.since).total_seconds() >= every:
        return Progress(reached, loaded, view.now)
    return before


def _parted(view: View) -> Trouble | None:
    """Of slots that serve an epoch and lose each other in each one, whom most have lost; of equals the one further back. Its node is done without, for all
    answer their controller: only their network is to blame, and forming them anew has not helped.
    """
    newest = view.newest
    if newest is None or not view.is_committed or newest.cause.renewals < FORMED_IN_VAIN:
        return None
    number = newest.epoch.number
    serving = {slot: each for slot, each in view.seen.slots.items() if each.committed_epoch == number}
    missed = {
        stage.slot: [name for name, each in serving.items() if _misses(each, stage.slot)] for stage in view.stages()
    }
    stage = max(view.stages(), key=lambda each: (each.slot in serving, len(missed[each.slot]), each.stage, each.slot))
    if stage.slot not in serving or not missed[stage.slot]:
        return None
    who = " and ".join(sorted(missed[stage.slot]))
    told = f"slot {stage.slot} answers, and {who} lost it in {newest.cause.renewals} epochs in a row: see to the network between their nodes"
    return Trouble(stage.node, PARTED, told)


def _misses(status: SlotStatus, slot: str) -> bool:
    return any(peer.slot == slot for peer in status.lost_peers)


def _of(view: View, stage: Stage, refused: dict[str, str]) -> Iterator[Trouble]:
    since = _waiting_since(view, stage.slot)
    if since is not None and view.now - since >= UNSCHEDULABLE:
        pod = view.pod_of(stage.slot)
        why = (
            pod.waiting_for if pod else ""
        ) or "its pod is not created; a quota or an admission webhook may forbid it"
        yield Trouble(stage.node, "Unschedulable", f"slot {stage.slot} finds no place: {why}")
    if unusable := _image_unusable(view, stage):
        yield Trouble(stage.node, "ImageUnusable", f"slot {stage.slot} cannot start: {unusable}")
    if unending := _unending(view, stage):
        yield Trouble(stage.node, "EndStalled", unending)
    if stage.slot in refused:
        yield Trouble(stage.node, "PrepareRefused", f"slot {stage.slot} refused: {refused[stage.slot]}")
    if (not view.has_begun(stage.slot) or _is_missed(view, stage)) and (stalled := _stalled(view, stage)):
        yield Trouble(stage.node, STALLED, stalled)


def _image_unusable(view: View, stage: Stage) -> str:
    """What keeps this node alone from running an image that another node of the plan runs: another architecture, say."""
    pod = view.pod_of(stage.slot)
    if view.has_begun(stage.slot) or pod is None or pod.trouble is None or pod.trouble.image_since is None:
        return ""
    if view.now - pod.trouble.image_since < UNSCHEDULABLE:
        return ""
    others = (view.pod_of(other.slot) for other in view.stages() if other.node != stage.node)
    runs = any(other and other.image == pod.image and view.answers(other.stateful_set) for other in others)
    return pod.trouble.message if runs else ""


def _unending(view: View, stage: Stage) -> str:
    """A process that not even SIGKILL ends hangs in its kernel, and nothing can take its place before it ends. Nodes that are away are the brake's."""
    pod, node = view.pod_of(stage.slot), view.nodes.get(stage.node)
    if pod is None or pod.to_end_by is None or node is None or node.away_since or view.answers(stage.slot):
        return ""
    if view.now - pod.to_end_by < UNSCHEDULABLE:
        return ""
    return f"slot {stage.slot} does not end: pod {pod.name} was to be gone at {stamp(pod.to_end_by)}; its process may hang in a driver"


def _is_missed(view: View, stage: Stage) -> bool:
    """Whether a served epoch waits for a slot that is silent on a Ready node. One that only its controller does not hear goes on
    serving: neither the slots that answer, nor a gateway, nor the kubelet knows of a loss. Nodes that are away are the brake's.
    """
    newest, node, pod = view.newest, view.nodes.get(stage.node), view.pod_of(stage.slot)
    if newest is None or node is None or node.away_since or view.answers(stage.slot):
        return False
    epoch = newest.epoch
    routed = [each for each in view.seen.gateways.values() if each.epoch == epoch.number]
    unreached = stage.slot in missed_leaders(epoch, view.seen.gateways)
    unserved = bool(view.seen.gateways) and not routed  # all were started anew: none knows whom it has lost
    return unreached or unserved or pod is None or not pod.is_running or bool(why_broken(epoch, view.seen))


def _waiting_since(view: View, slot: str) -> datetime | None:
    """A pod that is missing for a moment in a served epoch is being replaced: that is no waiting."""
    newest, pod, made = view.newest, view.pod_of(slot), view.stateful_sets.get(slot)
    if pod is not None:
        return pod.waiting_since
    if newest is None or made is None or view.has_begun(slot):
        return None
    return max(newest.at, made)


def _stalled(view: View, stage: Stage) -> str:
    """Not where its StatefulSet could not be made: that is no node's trouble, and Rendered names whose it is."""
    status, newest = view.seen.slots.get(stage.slot), view.newest
    if (
        newest is None
        or stage.slot not in view.stateful_sets
        or (status and status.prepare.epoch == newest.epoch.number and status.prepare.phase != "loading")
    ):
        return ""
    seconds = view.deployment.spec.replanning.prepare_timeout_seconds
    far = progress(view, stage)
    if view.now - far.since < timedelta(seconds=seconds):
        return ""
    where = f"{far.reached - 1} layers are loaded" if far.reached else "it does not answer"
    return (
        f"slot {stage.slot} made no progress with epoch {newest.epoch.number} for {seconds} s "
        f"(replanning.prepareTimeoutSeconds): {where}; see its log"
    )


def _kept(view: View, stage: Stage) -> Progress | None:
    status = view.deployment.status
    if view.newest is None or status.plan is None or status.plan.epoch != view.newest.epoch.number:
        return None
    place = (stage.slot, stage.stage)
    kept = next((each for each in status.stages if (each.slot, each.stage) == place and each.progress_at), None)
    return Progress(kept.progress, kept.loaded, moment(kept.progress_at)) if kept and kept.progress_at else None
