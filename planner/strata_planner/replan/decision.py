"""Whether and how a running plan is replaced: the least movement among plans that are nearly as good as the best.

Called by the operator when devices came or went, and by `strata plan --running`. Plans from scratch, the running plan's grouping of
devices among the starts; repairs what runs: replicas that are whole stay, and only the rest is dealt out anew; gives equal devices
back their names; then moves borders and bits towards what devices already hold, as long as the plan stays within `slack` of the best.
Nothing that serves moves for less than `min_gain`: neither a plan that is whole nor, where devices were lost, a replica that is.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from strata_planner.contract.judged import SearchEnded
from strata_planner.contract.plan import Plan
from strata_planner.errors import InfeasibleError, WorkloadError
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import ONE_PIPELINE, PlanRequest
from strata_planner.replan.holdings import Movement, holdings, movement
from strata_planner.replan.moves import Moves, weight
from strata_planner.replan.numbering import staying
from strata_planner.replan.running import keeps_to, running_replicas
from strata_planner.replan.steps import Step, steps
from strata_planner.search.exact.found import SearchStats
from strata_planner.search.exact.orders import Order, fleet_of
from strata_planner.search.layouts.goals import goal_of
from strata_planner.search.layouts.search import Layout, LayoutStats, Wish, replan_layout, value_of
from strata_planner.search.layouts.solved import SolvedReplica, nearly_solved
from strata_planner.search.metric import gain, value_of_plan, with_objective
from strata_planner.search.planning import PlanOutcome, make_plan
from strata_planner.search.strategies import with_strategies
from strata_planner.search.watch import Watch, unwatched

_SCRATCH_SHARE = 0.6  # of the time; the rest is for repairs
_REPAIR = Wish(seconds=2.0, stall=300)  # of what is left beside the replicas that stay


@dataclass(frozen=True)
class ReplanWishes:
    """`min_gain`: the least share by which a new plan must beat a running one that still fits (HexGen and kueue's users
    both know plans that flap); `slack`: how much worse than the best a plan may be to move less; `most_loaded_bytes`: a
    running plan that still fits is kept rather than read more than this.
    """

    min_gain: float = 0.1
    slack: float = 0.02
    most_loaded_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_gain < 1:
            raise WorkloadError(f"minGain {self.min_gain}: a share of at least 0 and below 1 is needed")
        if self.slack < 0:
            raise WorkloadError(f"slack {self.slack}: a share of at least 0 is needed")


@dataclass(frozen=True)
class Replanned:
    """The plan to go on with. `kept`: it is the running one, and there are no steps. Values by the request's metric, more is better."""

    plan: Plan
    kept: bool
    reason: str
    value: float
    scratch_value: float
    movement: Movement
    scratch_movement: Movement
    steps: tuple[Step, ...]
    stats: SearchStats
    seconds: float
    search: SearchEnded | None = None  # for the best plan
    gained: float | None = None  # by the best plan found, over the running one as it is; None: that cannot go on


@dataclass(frozen=True)
class _Choice:
    """`slack`: how much worse than the best it may be."""

    plan: Plan
    value: float
    movement: Movement
    slack: float


Further = Callable[[PlanRequest, PlanOutcome], PlanOutcome]  # an outcome that is no worse


def no_further(_: PlanRequest, outcome: PlanOutcome) -> PlanOutcome:
    """What the search has found."""
    return outcome


def replan(
    request: PlanRequest,
    running: Plan,
    wishes: ReplanWishes | None = None,
    watch: Watch = unwatched,
    further: Further = no_further,
) -> Replanned:
    """`watch` is told how far the search from scratch is; `further` looks on from what that has found. Raises InputError for a wrong request and
    InfeasibleError where nothing fits any more.
    """
    wishes = wishes or ReplanWishes()
    request.check()
    started = time.monotonic()
    limit = max(0.5, _SCRATCH_SHARE * request.time_limit_seconds)
    scratch = further(request, make_plan(replace(request, time_limit_seconds=limit), (running,), watch=watch))
    whole = running_replicas(request, running)
    choices = _choices(request, running, whole, scratch.replicas, wishes)
    best = max(each.value for each in choices)
    near = [each for each in choices if gain(each.value, best) >= -each.slack]
    chosen = min(near, key=lambda each: (weight(each.movement), -each.value))
    plan = staying(request, with_strategies(request, chosen.plan)[0], running)
    plan = with_objective(request, msgspec.structs.replace(plan, search=scratch.plan.search))
    outcome = Replanned(
        plan=plan,
        kept=False,
        reason="devices of the running plan are gone, or too small for it",
        value=chosen.value,
        scratch_value=value_of_plan(request, scratch.plan),
        movement=chosen.movement,
        scratch_movement=movement(holdings(running), scratch.plan, request.model),
        steps=steps(running, plan, request.model, serving=_serves(request, running)),
        stats=scratch.stats,
        search=scratch.plan.search,
        seconds=time.monotonic() - started,
    )
    if len(whole) < len(running.replicas):
        return outcome
    return _worthwhile(outcome, value_of(request, whole), running, wishes)


def _worthwhile(outcome: Replanned, now: float, running: Plan, wishes: ReplanWishes) -> Replanned:
    """The running plan, which has this value today, unless the new one is enough better and near enough."""
    more, most = gain(outcome.value, now), wishes.most_loaded_bytes
    outcome = replace(outcome, gained=more)
    if more < wishes.min_gain or more <= 0:
        reason = f"the best plan gains {max(more, 0):.1%}, less than minGain {wishes.min_gain:.0%}"
    elif most is not None and outcome.movement.loaded_bytes > most:
        reason = f"a gain of {more:.1%} would read {outcome.movement.loaded_bytes} bytes; the budget is {most}"
    else:
        return replace(outcome, reason=f"gains {more:.1%}")
    return replace(outcome, plan=running, kept=True, reason=reason, value=now, movement=Movement(), steps=())


def _choices(
    request: PlanRequest,
    running: Plan,
    whole: tuple[SolvedReplica, ...],
    scratch: tuple[SolvedReplica, ...],
    wishes: ReplanWishes,
) -> list[_Choice]:
    """The plan from scratch, and what repairs give, each moved towards what devices hold."""
    moves, before = Moves(request, running), value_of(request, scratch)
    spared = max(wishes.slack, wishes.min_gain) if 0 < len(whole) < len(running.replicas) else wishes.slack
    found: list[_Choice] = []
    for replicas in (scratch, *_repaired(request, running, whole)):
        slack = spared if found else wishes.slack
        if gain(value_of(request, replicas), before) < -slack:  # and what moves less is no better
            continue
        plan = moves.towards(replicas, wishes.slack)
        if not found or keeps_to(request, plan):
            moved = movement(moves.before, plan, request.model)
            found.append(_Choice(plan, value_of_plan(request, plan), moved, slack))
    return found


def _repaired(
    request: PlanRequest, running: Plan, whole: tuple[SolvedReplica, ...]
) -> Iterator[tuple[SolvedReplica, ...]]:
    if len(running.replicas) == 1 and keeps_to(request, running):
        for order in _repaired_orders(request, running):
            if one := nearly_solved(request, order, request.workload.concurrency):
                yield (one,)
    elif whole and request.solver not in ONE_PIPELINE:
        layout = Layout(goal_of(request), whole, 0, LayoutStats(0, 0, 0.0, 0.0))
        try:
            yield replan_layout(request, layout, _REPAIR).replicas
        except InfeasibleError:
            return


def _repaired_orders(request: PlanRequest, running: Plan) -> Iterator[Order]:
    """The one running order without what is lost; and with one new device of each kind at either end, or beside those of its node."""
    kept = tuple(group for stage in running.stages if (group := request.cluster.group(stage.places, stage.shares)))
    used = {place for group in kept for place in group.places}
    most = min(request.max_stages or request.model.num_layers, request.model.num_layers)
    orders = [kept]
    for members in fleet_of(request.cluster).devices:
        new = next((device for device in members if device.place not in used), None)
        if new is not None:
            beside = [at + 1 for at, group in enumerate(kept) if group.node == new.node][-1:]
            orders += [(*kept[:at], DeviceGroup((new,)), *kept[at:]) for at in dict.fromkeys((0, *beside, len(kept)))]
    yield from (order for order in orders if max(1, request.min_stages) <= len(order) <= most)


def _serves(request: PlanRequest, running: Plan) -> bool:
    return all(request.cluster.group(stage.places, stage.shares) for stage in running.stages)
