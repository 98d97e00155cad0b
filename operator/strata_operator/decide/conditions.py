"""What is said of a deployment in words: its phase and its conditions, each with a reason and a sentence. Pure.

Called by report, which puts them into status beside the figures; `is_serving` is what reconcile, too, means by Ready.
"""

from dataclasses import dataclass, field

from strata_operator.api import Condition, Phase
from strata_operator.api.status import RECONCILE_ERROR
from strata_operator.decide.epochs import is_ready
from strata_operator.decide.exclusions import Memory
from strata_operator.decide.pod_troubles import PodTrouble
from strata_operator.decide.troubles import Trouble
from strata_operator.decide.view import View
from strata_operator.decide.wishes import Wanted
from strata_operator.render.names import gateway_url
from strata_operator.render.records import stamp
from strata_planner.contract.plan import Plan, Stage

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


def is_serving(view: View) -> bool:
    """Every slot serves the newest plan, a gateway has reached its leaders, and clients reach a gateway."""
    newest = view.newest
    if newest is None or not view.is_committed or not view.gateway_ready:
        return False
    return is_ready(newest.epoch.plan, view.ledger, view.seen)


def phase_of(view: View, outcome: Outcome, *, ready: bool) -> Phase:
    newest = view.newest
    if view.deployment.spec.paused:
        return "Paused"
    if newest is None:
        failure = outcome.wanted.failure
        return "Failed" if failure and not failure.passing else "Planning"
    if ready:
        return "Ready"
    if not _has_served(view):
        return "Failed" if _is_stuck(outcome) else "Loading"
    is_loading = outcome.committed < newest.epoch.number or view.waiting
    return "Replanning" if is_loading and not _is_stuck(outcome) else "Degraded"


def _is_stuck(outcome: Outcome) -> bool:
    """What is needed cannot be planned, or not yet. That another spec cannot stops nothing that runs or loads."""
    wish = outcome.wanted.wish
    if wish is not None and wish.reason not in {"SpecChanged", "Drain"}:
        return True
    return bool(outcome.found) and outcome.wanted.plan is None


def _has_served(view: View) -> bool:
    """Before it served for the first time it is loading, not degraded."""
    return view.deployment.status.phase in {"Ready", "Replanning", "Degraded"}


def conditions_of(view: View, outcome: Outcome, *, ready: bool) -> tuple[Condition, ...]:
    told = {
        "Inventoried": _inventoried(view),
        "Planned": _planned(view, outcome),
        "Rendered": _rendered(view),
        "StagesReady": _stages_ready(view),
        "Updated": _updated(view, outcome, ready=ready),
        "Ready": ("True", "Serving", _serving(view, outcome)) if ready else ("False", *_why_not_ready(view, outcome)),
        "Degraded": _degraded(view, outcome, ready=ready),
    }
    if view.troubles:
        told[RECONCILE_ERROR] = ("True", "Unreadable", "; ".join(view.troubles))
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
    search = epoch.plan.search
    cut = f"; {search.warning}" if search is not None and search.was_cut else ""
    return "True", view.newest.cause.reason or "Planned", f"epoch {epoch.number}: {summary(epoch.plan)}{cut}"


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
    return f"{wanted_for}{goes_on}{left_out}"


def summary(plan: Plan) -> str:
    """One line: who runs which layers at which bits, and what is predicted."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    parts = [f"{stage.slot} layers {stage.layers[0]}-{stage.layers[1]} at {_bits_text(stage)} bits" for stage in stages]
    return f"{'; '.join(parts)}; predicted {plan.prediction.tokens_per_second:.1f} tokens/s"


def _bits_text(stage: Stage) -> str:
    return "/".join(str(bits) for bits in sorted(set(stage.bits), reverse=True))


def _rendered(view: View) -> Told:
    if view.refusals:
        return "False", "ApplyRefused", "; ".join(view.refusals)
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
    waiting = [stage for stage in stages if not serves(view, stage)]
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
        why = status.failure or next((f"it hangs: {each.reason}" for each in status.hung), "") or prepare.reason
        done = f"{prepare.phase} epoch {prepare.epoch}, {prepare.layers_loaded}/{prepare.layers_total} layers"
        return f"{stage.slot}: {why or done}"
    if pod is None:
        return f"{stage.slot}: has no pod yet"
    return f"{stage.slot}: {pod.waiting_for or f'does not answer on node {pod.node}'}"


def _serving(view: View, outcome: Outcome) -> str:
    told = f"epoch {outcome.committed} serves at {gateway_url(view.deployment)}"
    ready, wanted_ready = view.gateways_ready, view.deployment.spec.gateway.replicas
    trouble = view.gateway_trouble
    why = f": {trouble.message}" if trouble and trouble.is_there(view.now) else ""
    return told if ready >= wanted_ready else f"{told}; {ready} of {wanted_ready} gateways{why}"


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
    if view.waiting:
        number, told = newest.epoch.number, _stages_ready(view)[2]
        serves = any(each.epoch == number and each.leaders_connected for each in view.seen.gateways.values())
        return "Loading", f"epoch {number} {'serves, and replicas are added to it' if serves else 'is begun'}: {told}"
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
    return f"{told}{waits}"


def _why_not_reached(view: View) -> tuple[str, str]:
    """The newest epoch is committed, and clients do not get to it."""
    status, _, message = _stages_ready(view)
    if status != "True":
        return "StagesNotReady", message
    what = "has not reached every leader yet" if view.gateway_ready else "has no pod that is ready yet"
    return "GatewayNotReady", f"the gateway {what}"


def _pod_trouble(view: View) -> PodTrouble | None:
    """The first of a slot of the plan that does not serve, or of the gateway."""
    pods = [view.pod_of(stage.slot) for stage in view.stages() if not serves(view, stage)]
    found = [pod.trouble for pod in pods if pod] + ([] if view.gateway_ready else [view.gateway_trouble])
    return next((trouble for trouble in found if trouble and trouble.is_there(view.now)), None)


def _degraded(view: View, outcome: Outcome, *, ready: bool) -> Told:
    newest = view.newest
    if ready or newest is None or not _has_served(view):
        return "False", "AsPlanned", "nothing that once served is missing"
    reason, message = _why_not_ready(view, outcome)
    return "True", newest.cause.reason if reason == "Loading" else reason, message


def serves(view: View, stage: Stage) -> bool:
    status = view.seen.slots.get(stage.slot)
    if status is None or view.newest is None or status.hung:
        return False
    return status.committed_epoch == view.newest.epoch.number
