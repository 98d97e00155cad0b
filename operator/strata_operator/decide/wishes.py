"""Which plan is wanted now, if any: the wishes in their order, and which of them may be tried.

Called by reconcile. A wish that gave nothing is not tried again before what it rests on changes, and does not mask those after
it; plans that the operator makes of itself wait longer and longer (exclusions). Pure.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from strata_operator.decide.actions import MakePlan
from strata_operator.decide.brake import closed, cordoned, losses
from strata_operator.decide.epochs import CreateEpoch, Step
from strata_operator.decide.exclusions import LOST, PEACE, TAKEN_OVER, Memory
from strata_operator.decide.silence import unreached_nodes
from strata_operator.decide.troubles import SILENT, Trouble
from strata_operator.decide.view import PlanFailure, PlanKey, View
from strata_operator.decide.weighing import fallen, weighed
from strata_operator.render.records import moment

STEADY = timedelta(seconds=60)  # so long a node is Ready, and an epoch serves, before a better plan is looked for
HOUR = timedelta(hours=1)
LOOK_AGAIN = timedelta(seconds=300)  # between two looks for a better plan
OOM_RENEWALS = 3  # epochs in a row that a lack of memory ended, before a plan leaves more of it free
MARGIN_STEP, MOST_MARGIN = 0.1, 0.5  # shares of each device's memory
BETTER = "BetterPlan"
OUT_OF_MEMORY = "OutOfMemory"


@dataclass(frozen=True, slots=True)
class Wanted:
    """`plan`: to be made now. `failure`: of the first wish that has none, for status; `wish`: that one."""

    plan: MakePlan | None = None
    failure: PlanFailure | None = None
    wish: MakePlan | None = None


def wanted(view: View, memory: Memory, found: tuple[Trouble, ...], steps: tuple[Step, ...]) -> Wanted:
    """The first wish that may be tried now. What failed is told until the same wish has another answer: not every move of the
    cluster is news.
    """
    failed: tuple[PlanFailure, MakePlan] | None = None
    for wish in _wishes(view, memory, found, steps):
        failure = view.failures.get(plan_key(view, wish))
        if not wish.optional and (told := failure or _last_failure(view, wish)):
            failed = failed or (told, wish)
        if (failure is None or failure.passing) and memory.may_plan(view.now, wish.reason):
            return Wanted(wish, *(failed or ()))
    return Wanted(None, *(failed or ()))


def foreseen(view: View, memory: Memory) -> MakePlan | None:
    """The repair of a loss that only the operator knows of so far, or of slots whose processes may be back sooner: it is made while nobody can say yet
    whether it is wanted.
    """
    known = losses(view)
    doubted = {name for name in unreached_nodes(view) - set(known.lost) if not view.nodes[name].away_since}
    if view.newest is None or known.braked:
        return None
    if not doubted or not view.is_committed:
        return _takeover(view, memory, early=True)
    without = memory.excluded(view.now) | closed(view) | doubted
    margin = view.newest.cause.margin
    return MakePlan(LOST, without, min(doubted), recorded=True, margin=margin, repair=True, early=True)


def _takeover(view: View, memory: Memory, *, early: bool) -> MakePlan | None:
    """The nodes stay in the inventory: what comes back there is of the next better plan."""
    nodes = fallen(view)
    if view.newest is None or not nodes:
        return None
    wish = MakePlan(TAKEN_OVER, memory.excluded(view.now) | closed(view) | nodes, min(nodes), recorded=True)
    return replace(wish, margin=view.newest.cause.margin, repair=True, taken_over=nodes, early=early)


def _last_failure(view: View, wish: MakePlan) -> PlanFailure | None:
    """Of the same question, whatever the cluster was then."""
    asked = plan_key(view, wish)
    failures = (each for each in view.failures.values() if each.key._replace(inventory=asked.inventory) == asked)
    return max((each for each in failures if each.wish == wish.reason), key=lambda each: each.at, default=None)


def plan_key(view: View, wish: MakePlan) -> PlanKey:
    return PlanKey(
        spec=planned_digest(view, wish),
        inventory=view.inventory_digest,
        without=without_digest(view, wish.without),
        margin=wish.margin,
        optional=wish.optional,
    )


def planned_digest(view: View, wish: MakePlan) -> str:
    """Of the spec that the plan is made from: the newest epoch's, or the object's as it is now."""
    return view.newest.cause.spec_digest if wish.recorded and view.newest else view.spec_digest


def without_digest(view: View, without: frozenset[str]) -> str:
    """Of those that the inventory has; empty for none."""
    names = ",".join(sorted(without & view.usable))
    return hashlib.sha256(names.encode()).hexdigest()[:16] if names else ""


def _wishes(view: View, memory: Memory, found: tuple[Trouble, ...], steps: tuple[Step, ...]) -> Iterator[MakePlan]:
    """A loss comes before a wish, and what must change before what could be better."""
    lost = losses(view).lost
    without = memory.excluded(view.now) | closed(view) | frozenset(lost)
    if view.newest is None:
        yield MakePlan("Created", without)
        return
    margin = view.newest.cause.margin
    again = MakePlan("", without, recorded=True, margin=margin)
    if lost:
        yield replace(again, reason=LOST, node=lost[0], repair=True)
    if (choice := weighed(view)) and choice.chosen == "takeover" and (taken := _takeover(view, memory, early=False)):
        yield taken
    if view.newest.cause.spec_digest != view.spec_digest:
        yield MakePlan("SpecChanged", without)
    if others := [trouble for trouble in found if trouble.reason != SILENT]:
        yield replace(again, reason=others[0].reason, node=others[0].node)
    if short := _short_of_memory(view, steps):
        yield replace(again, reason=OUT_OF_MEMORY, node=short, margin=min(MOST_MARGIN, round(margin + MARGIN_STEP, 2)))
    if leaving := cordoned(view):
        yield replace(again, reason="Drain", node=leaving[0])
    yield from _better(view, again)


def _short_of_memory(view: View, steps: tuple[Step, ...]) -> str:
    """A node whose slot was ended for more memory than it has, again and again, while its epoch lasted or was loaded."""
    newest = view.newest
    if newest is None or newest.cause.margin >= MOST_MARGIN:
        return ""
    is_vain = newest.cause.renewals >= OOM_RENEWALS and any(isinstance(step, CreateEpoch) for step in steps)
    for stage in view.stages():
        begun = view.has_begun(stage.slot)
        if begun and not is_vain:
            continue
        since = newest.at if not begun else view.now - PEACE
        pod, status = view.pod_of(stage.slot), view.seen.slots.get(stage.slot)
        killed = pod is not None and pod.out_of_memory_at is not None and pod.out_of_memory_at >= since
        lasted = begun or view.now - newest.at >= STEADY
        failed = status is not None and "out of memory" in status.failure.lower()
        if (killed and lasted) or (failed and begun):
            return stage.node
    return ""


def _better(view: View, again: MakePlan) -> Iterator[MakePlan]:
    """When the cluster offers something else than the plan was made for, or it was made in a hurry, and all is at rest; or while a repair serves."""
    newest = view.newest
    repaired = _is_repaired(view)
    if newest is None or not (_is_steady(view) or repaired) or _are_many(view):
        return
    unsteady = view.usable - {stage.node for stage in view.stages()}
    unsteady = frozenset(name for name in unsteady if not _has_been_ready(view, name))
    wish = replace(again, reason=BETTER, without=again.without | unsteady, optional=True)
    offered = (view.inventory_digest, without_digest(view, wish.without))
    is_as_planned = offered == (newest.cause.inventory_digest, newest.cause.without)
    if is_as_planned and not newest.cause.hurried and not repaired:
        return
    since = newest.at if repaired else None
    looks = (each.at for each in view.failures.values() if each.wish == BETTER)
    looked = max((at for at in looks if since is None or at >= since), default=None)
    if looked is None or view.now - looked >= LOOK_AGAIN:
        yield wish


def _are_many(view: View) -> bool:
    """Whether so many plans were made within the hour, whatever for, that one more is not worth its pause."""
    made = [each for each in view.deployment.status.replans if view.now - moment(each.at) < HOUR]
    return len(made) >= view.deployment.spec.replanning.max_per_hour


def _is_repaired(view: View) -> bool:
    """Whether what serves is the repair of a loss, made without any search."""
    return view.newest is not None and view.newest.cause.repair is not None and _ready_since(view) is not None


def _is_steady(view: View) -> bool:
    """Nor is one of its nodes away, and may be lost."""
    ready = _ready_since(view)
    if ready is None or view.newest is None or not all(view.is_there(stage.node) for stage in view.stages()):
        return False
    return view.now - max(view.newest.at, ready) >= STEADY


def _ready_since(view: View) -> datetime | None:
    """None while the newest plan does not serve."""
    conditions = view.deployment.status.conditions
    ready = next((each for each in conditions if each.type == "Ready" and each.status == "True"), None)
    return moment(ready.last_transition_time) if ready and view.is_committed else None


def _has_been_ready(view: View, name: str) -> bool:
    node = view.nodes.get(name)
    return (
        node is not None and not node.away_since and (node.ready_since is None or view.now - node.ready_since >= STEADY)
    )
