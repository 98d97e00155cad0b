"""What is said about a deployment: its status and the events on it. Pure; called by `reconcile` at every look.

Status says what is; events say what has just changed in it, in the same words.
"""

from collections import Counter
from dataclasses import dataclass, field

from strata_operator.api import Condition, LLMDeploymentStatus, Phase
from strata_operator.api.status import (
    MAX_REPLANS,
    MAX_STAGES,
    AlternativeStatus,
    Performance,
    PlanStatus,
    Replan,
    StageStatus,
)
from strata_operator.decide.actions import Action, Emit, SetStatus
from strata_operator.decide.epochs import is_ready
from strata_operator.decide.exclusions import Memory
from strata_operator.decide.pod_troubles import PodTrouble
from strata_operator.decide.troubles import Trouble, progress
from strata_operator.decide.view import View
from strata_operator.decide.wishes import Wanted
from strata_operator.render.names import gateway_url
from strata_operator.render.records import EpochRecord, stamp
from strata_planner.contract.plan import Plan, Prediction, Stage

MOST_MESSAGE = 32_768  # characters that a condition takes

GOOD_NEWS = {"Planned", "Ready"}
NEWS = {"Inventoried": {"False"}, "Planned": {"True", "False"}, "Ready": {"True"}, "Degraded": {"True"}}

Told = tuple[str, str, str]  # status, reason, message of a condition


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was decided. `committed`: as recorded from now on; `braked`: why a loss is not believed; `is_updating`: slots wait for
    another template.
    """

    committed: int
    memory: Memory
    wanted: Wanted = field(default_factory=Wanted)
    found: tuple[Trouble, ...] = ()
    braked: str = ""
    is_updating: bool = False


def report(view: View, outcome: Outcome) -> tuple[Action, ...]:
    """The new status if it differs, and an event for every condition that turned."""
    old = view.deployment.status
    new = status_of(view, outcome)
    if new == old:
        return ()
    return (SetStatus(new), *_events(old, new))


def status_of(view: View, outcome: Outcome) -> LLMDeploymentStatus:
    newest = view.newest
    ready = is_serving(view)
    stages = tuple(_stage_status(view, stage) for stage in view.stages()[:MAX_STAGES])
    serving = sum(stage.ready for stage in stages)
    return LLMDeploymentStatus(
        phase=_phase(view, outcome, ready=ready),
        observed_generation=view.deployment.metadata.generation,
        url=gateway_url(view.deployment),
        committed_epoch=outcome.committed,
        image=view.deployment.status.image,
        stages_ready=f"{serving}/{len(stages)}" if stages else None,
        devices=_devices(view),
        conditions=_conditions(view, outcome, ready=ready),
        plan=_plan_status(newest) if newest else None,
        stages=stages,
        replans=_replans(view, ready=ready),
        exclusions=outcome.memory.exclusions,
        backoff=outcome.memory.backoff,
    )


def is_serving(view: View) -> bool:
    """Every slot serves the newest plan, every gateway has reached its leaders, and clients reach a gateway."""
    newest = view.newest
    if newest is None or not view.is_committed or not view.gateway_ready:
        return False
    return is_ready(newest.epoch.plan, view.ledger, view.seen)


def _phase(view: View, outcome: Outcome, *, ready: bool) -> Phase:
    newest = view.newest
    if view.deployment.spec.paused:
        return "Paused"
    if newest is None:
        return "Failed" if outcome.wanted.failure else "Planning"
    if ready:
        return "Ready"
    if not _has_served(view):
        return "Failed" if _is_stuck(outcome) else "Loading"
    return "Replanning" if outcome.committed < newest.epoch.number and not _is_stuck(outcome) else "Degraded"


def _is_stuck(outcome: Outcome) -> bool:
    """What is needed cannot be planned, or not yet. That another spec cannot stops nothing that runs or loads."""
    wish = outcome.wanted.wish
    if wish is not None and wish.reason not in {"SpecChanged", "Drain"}:
        return True
    return bool(outcome.found) and outcome.wanted.plan is None


def _has_served(view: View) -> bool:
    """Before it served for the first time it is loading, not degraded."""
    return view.deployment.status.phase in {"Ready", "Replanning", "Degraded"}


def _conditions(view: View, outcome: Outcome, *, ready: bool) -> tuple[Condition, ...]:
    told = {
        "Inventoried": _inventoried(view),
        "Planned": _planned(view, outcome),
        "Rendered": _rendered(view),
        "StagesReady": _stages_ready(view),
        "Updated": _updated(view, outcome, ready=ready),
        "Ready": ("True", "Serving", f"epoch {outcome.committed} serves at {gateway_url(view.deployment)}")
        if ready
        else ("False", *_why_not_ready(view, outcome)),
        "Degraded": _degraded(view, outcome, ready=ready),
    }
    before = {condition.type: condition for condition in view.deployment.status.conditions}
    return tuple(_condition(view, name, said, before.get(name)) for name, said in told.items())


def _condition(view: View, name: str, said: Told, before: Condition | None) -> Condition:
    status, reason, message = said
    turned = before is None or before.status != status
    return Condition.model_validate(
        {
            "type": name,
            "status": status,
            "reason": reason,
            "message": message,
            "last_transition_time": stamp(view.now) if turned or before is None else before.last_transition_time,
            "observed_generation": view.deployment.metadata.generation,
        }
    )


def _inventoried(view: View) -> Told:
    left_out = "".join(f"; {sentence}" for sentence in view.refused)
    if not view.devices:
        return "False", "NoDevices", f"no node has a device that may be used{left_out}"
    return "True", "DevicesFound", f"{view.devices} devices may be used{left_out}"


def _planned(view: View, outcome: Outcome) -> Told:
    """Of the object as it is now: a plan that cannot be had leaves the last one in force."""
    failure, wish = outcome.wanted.failure, outcome.wanted.wish
    if failure and wish:
        return "False", failure.reason, _not_planned(view, outcome, failure.message, wish.reason)
    if view.newest is None:
        return "Unknown", "Planning", "no plan has been made yet"
    if view.newest.cause.spec_digest != view.spec_digest:
        return "Unknown", "Planning", f"the spec has no plan yet; epoch {outcome.committed} goes on"
    epoch = view.newest.epoch
    return "True", view.newest.cause.reason or "Planned", f"epoch {epoch.number}: {summary(epoch.plan)}"


def _not_planned(view: View, outcome: Outcome, message: str, reason: str) -> str:
    """What failed, for what it was wanted, what goes on meanwhile, and which nodes are left out for a while."""
    wanted_for = f"{reason}: {message}" if view.newest else message
    goes_on = f"; epoch {outcome.committed} goes on" if outcome.committed and view.newest else ""
    excluded = outcome.memory.excluded(view.now)
    left_out = "".join(
        f"; node {each.node} is left out until {each.until}: {each.message}"
        for each in outcome.memory.exclusions
        if each.node in excluded
    )
    return f"{wanted_for}{goes_on}{left_out}"[:MOST_MESSAGE]


def summary(plan: Plan) -> str:
    """One line: who runs which layers at which bits, and what is predicted."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    parts = [f"{stage.slot} layers {stage.layers[0]}-{stage.layers[1]} at {_bits_text(stage)} bits" for stage in stages]
    return f"{'; '.join(parts)}; predicted {plan.prediction.tokens_per_second:.1f} tokens/s"


def _bits_text(stage: Stage) -> str:
    return "/".join(str(bits) for bits in sorted(set(stage.bits), reverse=True))


def _rendered(view: View) -> Told:
    if view.newest is None:
        return "False", "NoPlan", "there is nothing to render before there is a plan"
    return "True", "Applied", f"{len(view.manifests)} objects serve epoch {view.newest.epoch.number}"


def _updated(view: View, outcome: Outcome, *, ready: bool) -> Told:
    """False until all slots serve with the template that is asked for."""
    before = next((each for each in view.deployment.status.conditions if each.type == "Updated"), None)
    if outcome.is_updating or (before and before.status == "False" and not ready):
        return (
            "False",
            "RollingOut",
            "slots are ended and started again, to get what spec.runtime or the plan asks of their pods",
        )
    return "True", "UpToDate", "all slots have what is asked of their pods"


def _stages_ready(view: View) -> Told:
    stages = view.stages()
    if not stages:
        return "False", "NoPlan", "there are no stages before there is a plan"
    waiting = [stage for stage in stages if not _serves(view, stage)]
    if not waiting:
        return "True", "AllServing", f"all {len(stages)} stages serve"
    return "False", "Loading", "; ".join(_stage_state(view, stage) for stage in waiting)


def _stage_state(view: View, stage: Stage) -> str:
    status = view.seen.slots.get(stage.slot)
    pod = view.pod_of(stage.slot)
    if pod and pod.trouble and pod.trouble.is_there(view.now):
        return f"{stage.slot}: {pod.trouble.message}"
    if status is not None:
        prepare = status.prepare
        why = status.failure or prepare.reason
        done = f"{prepare.phase} epoch {prepare.epoch}, {prepare.layers_loaded}/{prepare.layers_total} layers"
        return f"{stage.slot}: {why or done}"
    if pod is None:
        return f"{stage.slot}: has no pod yet"
    return f"{stage.slot}: {pod.waiting_for or f'does not answer on node {pod.node}'}"


def _why_not_ready(view: View, outcome: Outcome) -> tuple[str, str]:
    newest, failure = view.newest, outcome.wanted.failure
    if failure and (newest is None or _is_stuck(outcome)):
        return failure.reason, failure.message
    if newest is None:
        return "NoPlan", "no plan has been made yet"
    if hindrance := _hindrance(view, outcome):
        return hindrance
    if outcome.committed < newest.epoch.number:
        return "Loading", f"epoch {newest.epoch.number} is being prepared"
    return _why_not_reached(view)


def _hindrance(view: View, outcome: Outcome) -> tuple[str, str] | None:
    """What keeps the newest epoch from being served, where it is more than time."""
    if outcome.found:
        return outcome.found[0].reason, _what_was_found(outcome)
    if outcome.braked:
        return "ManyNodesNotReady", outcome.braked
    trouble = _pod_trouble(view)
    return (trouble.reason, trouble.message) if trouble else None


def _what_was_found(outcome: Outcome) -> str:
    told = "; ".join(trouble.message for trouble in outcome.found)
    backoff = outcome.memory.backoff
    waits = f"; the next plan is made at {backoff.retry_at}" if backoff and not outcome.wanted.plan else ""
    return f"{told}{waits}"[:MOST_MESSAGE]


def _why_not_reached(view: View) -> tuple[str, str]:
    """The newest epoch is committed, and clients do not get to it."""
    status, _, message = _stages_ready(view)
    if status != "True":
        return "StagesNotReady", message
    what = "has not reached every leader yet" if view.gateway_ready else "has no pod that is ready yet"
    return "GatewayNotReady", f"the gateway {what}"


def _pod_trouble(view: View) -> PodTrouble | None:
    """The first of a slot of the plan that does not serve, or of the gateway."""
    pods = [view.pod_of(stage.slot) for stage in view.stages() if not _serves(view, stage)]
    found = [pod.trouble for pod in pods if pod] + ([] if view.gateway_ready else [view.gateway_trouble])
    return next((trouble for trouble in found if trouble and trouble.is_there(view.now)), None)


def _degraded(view: View, outcome: Outcome, *, ready: bool) -> Told:
    newest = view.newest
    if ready or newest is None or not _has_served(view):
        return "False", "AsPlanned", "nothing that once served is missing"
    reason, message = _why_not_ready(view, outcome)
    return "True", newest.cause.reason if reason == "Loading" else reason, message


def _serves(view: View, stage: Stage) -> bool:
    status = view.seen.slots.get(stage.slot)
    return status is not None and view.newest is not None and status.committed_epoch == view.newest.epoch.number


def _stage_status(view: View, stage: Stage) -> StageStatus:
    status = view.seen.slots.get(stage.slot)
    pod = view.pod_of(stage.slot)
    reached, since = progress(view, stage)
    replica = next(replica.replica for replica in view.plan.replicas if stage in replica.stages) if view.plan else 0
    return StageStatus(
        replica=replica,
        stage=stage.stage,
        slot=stage.slot,
        node=stage.node,
        devices=tuple(device.type for device in stage.devices),
        layers=stage.layers,
        bits={str(bits): count for bits, count in sorted(Counter(stage.bits).items(), reverse=True)},
        memory_predicted_bytes=stage.memory.total_bytes - stage.memory.overhead_bytes,
        memory_measured_bytes=_grown(view, stage) if status else None,
        ready=_serves(view, stage),
        restarts=pod.restarts if pod else 0,
        progress=reached,
        progress_at=stamp(since),
    )


def _grown(view: View, stage: Stage) -> int | None:
    """Measured when a stage starts to serve and kept then: a figure that changes at every look would write for ever."""
    before = next((s for s in view.deployment.status.stages if (s.slot, s.stage) == (stage.slot, stage.stage)), None)
    if before and before.ready and before.memory_measured_bytes:
        return before.memory_measured_bytes
    status = view.seen.slots[stage.slot]
    return max(0, status.private_bytes - status.idle_bytes) if _serves(view, stage) else None


def _plan_status(record: EpochRecord) -> PlanStatus:
    plan = record.epoch.plan
    return PlanStatus(
        epoch=record.epoch.number,
        inventory_hash=record.cause.inventory_digest,
        bound_by=plan.prediction.bound_by[:1024],
        predicted=_performance(plan.prediction),
        alternatives=tuple(
            AlternativeStatus(
                summary=each.summary,
                predicted=_performance(each.prediction) if each.prediction else None,
                rejected_because=each.rejected_because[:1024],
            )
            for each in plan.alternatives
        ),
    )


def _performance(prediction: Prediction) -> Performance:
    return Performance(
        tokens_per_second=round(prediction.tokens_per_second, 1),
        ttft_ms=round(prediction.ttft_ms, 1),
        tpot_ms=round(prediction.tpot_ms, 2),
        perplexity_increase=_rounded(prediction.perplexity_increase),
    )


def _rounded(increase: float | None) -> float | None:
    return None if increase is None else max(0.0, round(increase, 4))


def _devices(view: View) -> str | None:
    """`2 x T4, 1 x V100-32GB`."""
    held = {(stage.node, device) for stage in view.stages() for device in stage.devices}
    counts = Counter(device.type for _, device in held)
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))[:1024] or None


def _replans(view: View, *, ready: bool) -> tuple[Replan, ...]:
    """One entry per epoch after the first; the newest gets its seconds when it serves for the first time."""
    known = {replan.epoch: replan for replan in view.deployment.status.replans}
    for record in view.records[1:]:
        number = record.epoch.number
        known.setdefault(number, _replan(record))
        is_newest = record is view.newest
        if ready and is_newest and known[number].seconds_to_ready is None:
            seconds = (view.now - record.at).total_seconds()
            known[number] = known[number].model_copy(update={"seconds_to_ready": round(max(0.0, seconds), 1)})
    return tuple(known[number] for number in sorted(known)[-MAX_REPLANS:])


def _replan(record: EpochRecord) -> Replan:
    return Replan(
        epoch=record.epoch.number,
        at=stamp(record.at),
        reason=record.cause.reason,
        node=record.cause.node or None,
        seconds_to_plan=record.cause.seconds_to_plan,
    )


def _events(old: LLMDeploymentStatus, new: LLMDeploymentStatus) -> tuple[Emit, ...]:
    """A plan made or not to be had, service begun, what once served missing, no devices: each once, when it becomes so."""
    before = {condition.type: condition for condition in old.conditions}
    return tuple(
        Emit("Normal" if condition.type in GOOD_NEWS and condition.status == "True" else "Warning",
             condition.reason, f"{condition.type}: {condition.message}")
        for condition in new.conditions
        if condition.status in NEWS.get(condition.type, ()) and _has_changed(before.get(condition.type), condition)
    )  # fmt: skip


def _has_changed(before: Condition | None, now: Condition) -> bool:
    if before is None or (before.status, before.reason) != (now.status, now.reason):
        return True
    return now.type == "Planned" and before.message != now.message  # another epoch of the same reason
