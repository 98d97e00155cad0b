"""What is said about a deployment: its status and the events on it. Pure; called by `reconcile` at every look.

Status says what is; events say what has just changed in it, in the same words.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from strata_operator.api import Condition, LLMDeploymentStatus
from strata_operator.api.status import (
    MAX_REPLANS,
    MAX_SHADOWED,
    MAX_STAGES,
    RECONCILE_ERROR,
    AlternativeStatus,
    ChoiceStatus,
    Performance,
    PlanStatus,
    RepairStatus,
    Replan,
    ShadowStatus,
    SpeculationStatus,
    StageStatus,
)
from strata_operator.decide.actions import Action, Emit, SetStatus
from strata_operator.decide.conditions import Outcome, conditions_of, is_serving, phase_of, serves
from strata_operator.decide.troubles import progress
from strata_operator.decide.view import View
from strata_operator.render.names import gateway_url
from strata_operator.render.records import ORDERED, EpochRecord, Weighed, exact_stamp, stamp
from strata_planner.contract.control import EpochChange
from strata_planner.contract.draft_weights import draft_wish
from strata_planner.contract.formats import BITS_OF_FORMAT
from strata_planner.contract.plan import NO_SPECULATION, Prediction, Stage
from strata_planner.replan.repair import RepairNote

NEWS_OF_ACCEPTANCE = 0.05
CHOSEN = {"restart": "RestartChosen", "takeover": "TakeoverChosen"}
RESUMED = "RequestsResumed"
GOOD_NEWS = {"Planned", "Ready"}
NEWS = {
    "Inventoried": {"False"},
    "Planned": {"True", "False"},
    "Ready": {"True"},
    "Degraded": {"True"},
    RECONCILE_ERROR: {"True"},
}


def report(view: View, outcome: Outcome) -> tuple[Action, ...]:
    """The new status if it differs or still is to be written, and an event for every condition that turned."""
    old = view.deployment.status
    new = status_of(view, outcome)
    if new == old and not view.is_unsaid:
        return ()
    return (SetStatus(new), *_events(old, new))


def status_of(view: View, outcome: Outcome) -> LLMDeploymentStatus:
    newest = view.newest
    ready = is_serving(view)
    stages = tuple(_stage_status(view, stage) for stage in view.stages()[:MAX_STAGES])
    serving = sum(stage.ready for stage in stages)
    return LLMDeploymentStatus(
        phase=phase_of(view, outcome, ready=ready),
        observed_generation=view.deployment.metadata.generation,
        url=gateway_url(view.deployment),
        committed_epoch=outcome.committed,
        image=view.deployment.status.image,
        stages_ready=f"{serving}/{len(stages)}" if stages else None,
        gateways_ready=f"{view.gateways_ready}/{view.deployment.spec.gateway.replicas}" if stages else None,
        devices=_devices(view),
        conditions=conditions_of(view, outcome, ready=ready),
        plan=_plan_status(newest) if newest else None,
        stages=stages,
        shadows=_shadows(view),
        replans=_replans(view, outcome.committed, ready=ready),
        exclusions=outcome.memory.exclusions,
        backoff=outcome.memory.backoff,
        speculation=_speculation(view),
    )


def _stage_status(view: View, stage: Stage) -> StageStatus:
    status = view.seen.slots.get(stage.slot)
    pod = view.pod_of(stage.slot)
    far, took = progress(view, stage), _took(view, stage)
    replica = next(replica.replica for replica in view.plan.replicas if stage in replica.stages) if view.plan else 0
    return StageStatus(
        replica=replica,
        stage=stage.stage,
        slot=stage.slot,
        node=stage.node,
        devices=tuple(device.type for device in stage.devices),
        layers=stage.layers,
        bits={str(bits): count for bits, count in sorted(Counter(stage.bits).items(), reverse=True)},
        memory_predicted_bytes=stage.total_bytes,
        memory_measured_bytes=_grown(view, stage) if status else None,
        start_seconds=took[0],
        load_seconds=took[1],
        ready=serves(view, stage),
        restarts=pod.restarts if pod else 0,
        progress=far.reached,
        loaded=far.loaded,
        progress_at=stamp(far.since),
    )


def _grown(view: View, stage: Stage) -> int | None:
    """Measured when a stage starts to serve and kept then: a figure that changes at every look would write for ever."""
    before = next((s for s in view.deployment.status.stages if (s.slot, s.stage) == (stage.slot, stage.stage)), None)
    if before and before.ready and before.memory_measured_bytes:
        return before.memory_measured_bytes
    status = view.seen.slots[stage.slot]
    shadows = status.shadow.held_bytes if status.shadow else 0
    return max(0, status.private_bytes - status.idle_bytes - shadows) if serves(view, stage) else None


def _took(view: View, stage: Stage) -> tuple[float | None, float | None]:
    """Of its slot: start, and load of all its layers. What a process says of other layers is told in proportion; what is away has what it had."""
    status = view.seen.slots.get(stage.slot)
    if status is not None and status.took is not None and status.took.layers:
        own = sum(len(each.bits) for each in view.stages() if each.slot == stage.slot)
        return status.took.start_seconds, round(status.took.load_seconds * own / status.took.layers, 3)
    before = next((s for s in view.deployment.status.stages if (s.slot, s.stage) == (stage.slot, stage.stage)), None)
    return (before.start_seconds, before.load_seconds) if before and before.layers == stage.layers else (None, None)


def _shadows(view: View) -> tuple[ShadowStatus, ...]:
    """Bytes that a slot has read by now would write at every look: that it is done is told once."""
    plan = view.plan
    if plan is None or not plan.shadows:
        return ()
    largest = sorted(plan.shadows, key=lambda each: (-each.size_bytes, each.slot, each.against))
    states = {slot: status.shadow for slot, status in view.seen.slots.items()}
    return tuple(
        ShadowStatus(
            slot=each.slot,
            node=each.node,
            against=each.against,
            layers=each.layers[:MAX_SHADOWED],
            bits={
                str(bits): count
                for bits, count in sorted(Counter(BITS_OF_FORMAT[name] for name in each.format).items())
            },
            planned_bytes=each.size_bytes,
            held=(state := states.get(each.slot)) is not None and state.phase == "held",
        )
        for each in largest[:MAX_STAGES]
    )


def _plan_status(record: EpochRecord) -> PlanStatus:
    plan = record.epoch.plan
    return PlanStatus(
        epoch=record.epoch.number,
        inventory_hash=record.cause.inventory_digest,
        bound_by=plan.prediction.bound_by,
        objective=plan.objective.said() if plan.objective else "",
        search_ended=plan.search.ended if plan.search else "",
        predicted=_performance(plan.prediction),
        alternatives=tuple(
            AlternativeStatus(
                summary=each.summary,
                objective="" if each.value is None or plan.objective is None else plan.objective.said(each.value),
                predicted=_performance(each.prediction) if each.prediction else None,
                rejected_because=each.rejected_because,
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


def _speculation(view: View) -> SpeculationStatus | None:
    """An acceptance is told again when it is news: one that follows every count would write for ever."""
    wish = view.plan.speculation if view.plan else NO_SPECULATION
    if wish.mode == "none":
        return None
    bits, _ = draft_wish(wish)
    told = SpeculationStatus(
        mode=wish.mode, tokens=wish.tokens, draft_bits=bits or None, draft_model=wish.draft_uri or None
    )
    before = view.deployment.status.speculation
    if before and before.model_copy(update={"acceptance": None}) == told:
        told = before
    if not view.drafted.tells:
        return told
    now = view.drafted.acceptance
    is_news = told.acceptance is None or abs(now - told.acceptance) >= NEWS_OF_ACCEPTANCE
    return told.model_copy(update={"acceptance": round(now, 2)}) if is_news else told


def _devices(view: View) -> str | None:
    """`2 x T4, 1 x V100-32GB`."""
    held = {(stage.node, device) for stage in view.stages() for device in stage.devices}
    counts = Counter(device.type for _, device in held)
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or None


def _replans(view: View, committed: int, *, ready: bool) -> tuple[Replan, ...]:
    """One entry per epoch after the first; the newest gets its moments as it comes to them, and its seconds when it serves for the first
    time.
    """
    known = {replan.epoch: replan for replan in view.deployment.status.replans}
    for record in view.records[1:]:
        number = record.epoch.number
        known.setdefault(number, _replan(record))
        is_newest = record is view.newest
        if is_newest:
            known[number] = _come_further(view, known[number], committed)
        if ready and is_newest and known[number].seconds_to_ready is None:
            seconds = (view.now - record.at).total_seconds()
            known[number] = known[number].model_copy(update={"seconds_to_ready": round(max(0.0, seconds), 1)})
    return tuple(_with_cost(view, known[number]) for number in sorted(known)[-MAX_REPLANS:])


def _with_cost(view: View, replan: Replan) -> Replan:
    """Also of an epoch that is not the newest any more: the next may begin before the change to it is over."""
    if replan.requests_held is not None or not (changes := view.changes_to(replan.epoch)):
        return replan
    return replan.model_copy(update=_cost_of(changes))


def _come_further(view: View, replan: Replan, committed: int) -> Replan:
    """What is seen of the newest epoch for the first time; of a repair also what a search since found."""
    moments, now = dict[str, Any](), exact_stamp(view.now)
    if replan.prepared_at is None and committed == replan.epoch and not view.waiting:
        moments["prepared_at"] = now
    stages = view.stages()
    if replan.committed_at is None and stages and all(serves(view, stage) for stage in stages):
        moments["committed_at"] = now
    if replan.repair is not None and (found := _improvement(view)) is not None:
        moments["repair"] = replan.repair.model_copy(update={"improvement": found})
    return replan.model_copy(update=moments) if moments else replan


def _cost_of(changes: Sequence[EpochChange]) -> dict[str, Any]:
    """As fields of `Replan`: what all gateways tell of it together."""
    resumed = [each.resumed_at for each in changes if each.resumed_at > 0]
    return {
        "next_token_at": exact_stamp(datetime.fromtimestamp(min(resumed), UTC)) if resumed else None,
        "pause_ms": round(1e3 * max(each.pause_seconds for each in changes), 1),
        "tokens_recomputed": sum(each.recomputed_tokens for each in changes),
        "tokens_refilled": sum(each.refilled_tokens for each in changes),
        "requests_held": sum(each.held for each in changes),
        "requests_lost": sum(each.lost for each in changes),
    }


def _improvement(view: View) -> float | None:
    """Of the newest search for a better plan than the repair that serves; None while there was none."""
    looks = [each for each in view.failures.values() if each.kept and view.newest and each.at >= view.newest.at]
    newest = max(looks, key=lambda each: each.at, default=None)
    return round(newest.gain, 4) if newest else None


def _replan(record: EpochRecord) -> Replan:
    return Replan(
        epoch=record.epoch.number,
        at=stamp(record.at),
        reason=record.cause.reason,
        node=record.cause.node or None,
        seconds_to_plan=record.cause.seconds_to_plan,
        noticed_at=exact_stamp(record.cause.noticed) if record.cause.noticed else None,
        planned_at=exact_stamp(record.cause.planned) if record.cause.planned else None,
        gain=record.cause.gain,
        repair=_repair(record.cause.repair) if record.cause.repair else None,
        choice=_choice(record.cause.weighed) if record.cause.weighed else None,
    )


def _choice(weighed: Weighed) -> ChoiceStatus:
    return ChoiceStatus(
        chosen=weighed.chosen,
        restart_seconds=max(0.0, weighed.restart_seconds),
        takeover_seconds=max(0.0, weighed.takeover_seconds),
    )


def _repair(note: RepairNote) -> RepairStatus:
    return RepairStatus(
        kind=note.kind,
        layers_moved=note.layers_moved,
        bits_lowered=note.bits_lowered,
        loaded_bytes=note.loaded_bytes,
        shadowed_bytes=note.shadowed_bytes,
        kept_share=note.kept_share,
        milliseconds=note.milliseconds,
    )


def _events(old: LLMDeploymentStatus, new: LLMDeploymentStatus) -> tuple[Emit, ...]:
    """A plan made or not to be had, service begun, what once served missing, no devices: each once, when it becomes so."""
    before = {condition.type: condition for condition in old.conditions}
    known = {replan.epoch for replan in old.replans}
    ordered = tuple(
        Emit("Warning", ORDERED, f"epoch {replan.epoch} was made while no operator was there: {_what_was_done(replan)}")
        for replan in new.replans
        if replan.reason == ORDERED and replan.epoch not in known
    )
    chosen = tuple(
        Emit("Normal", CHOSEN[replan.choice.chosen], _what_was_chosen(replan, replan.choice))
        for replan in new.replans
        if replan.choice is not None and replan.epoch not in known
    )
    counted = {replan.epoch for replan in old.replans if replan.requests_held is not None}
    resumed = tuple(
        Emit("Warning" if replan.requests_lost else "Normal", RESUMED, _what_it_cost(replan))
        for replan in new.replans
        if replan.requests_held and replan.epoch not in counted
    )
    return ordered + chosen + resumed + tuple(
        Emit("Normal" if condition.type in GOOD_NEWS and condition.status == "True" else "Warning",
             condition.reason, f"{condition.type}: {condition.message}")
        for condition in new.conditions
        if condition.status in NEWS.get(condition.type, ()) and _has_changed(before.get(condition.type), condition)
    )  # fmt: skip


def _what_it_cost(replan: Replan) -> str:
    return (
        f"epoch {replan.epoch} ({replan.reason}): {replan.requests_held} requests waited for it, {replan.requests_lost} were lost; the longest pause "
        f"between two tokens was {replan.pause_ms or 0:.0f} ms; {replan.tokens_recomputed} tokens were computed again, and {replan.tokens_refilled} in lost layers"
    )


def _what_was_chosen(replan: Replan, choice: ChoiceStatus) -> str:
    seconds = f"a restart takes {choice.restart_seconds:g} s, a takeover {choice.takeover_seconds:g} s, as predicted"
    what = "its process was waited for" if choice.chosen == "restart" else "the slots that were left take over"
    return f"epoch {replan.epoch}: {'a slot' if replan.node is None else f'the slot on {replan.node}'} was lost: {seconds}: {what}"


def _what_was_done(replan: Replan) -> str:
    if replan.node is None:
        return "slots that were started anew got their parts again"
    return f"a slot on {replan.node} was lost, and those that were left took over"


def _has_changed(before: Condition | None, now: Condition) -> bool:
    if before is None or (before.status, before.reason) != (now.status, now.reason):
        return True
    return now.type == "Planned" and before.message != now.message  # another epoch of the same reason
