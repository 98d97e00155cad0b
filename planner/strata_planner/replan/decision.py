"""Whether and how a running plan is replaced: the least movement among plans that are nearly as good as the best.

Called by the operator when devices came or went. Plans from scratch; tries the running order without what is lost and with what
is new; gives equal devices back their names; then moves borders and bits towards what devices already hold, as long as
the objective stays within `slack` of the best. Nothing moves for less than `min_gain`.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from strata_planner.contract.plan import Plan, Stage
from strata_planner.errors import InfeasibleError, PlannerError, WorkloadError
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.replan.holdings import NOTHING, Held, Movement, holdings, movement, movement_to
from strata_planner.replan.matching import closest
from strata_planner.replan.placement import Placement, Units, arranged, placement_of
from strata_planner.replan.steps import Step, steps
from strata_planner.search.assembly import assemble
from strata_planner.search.exact.bounds import lower_bound
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.exact import solve
from strata_planner.search.exact.feasibility import reasons
from strata_planner.search.exact.orders import Order, fleet_of
from strata_planner.search.exact.problem import Problem, Solution, SolutionStatus, StopReason
from strata_planner.search.exact.search import Found, Search, SearchStats


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
    """The plan to go on with. `kept`: it is the running one, and there are no steps. Objectives in seconds (LLM-PQ's)."""

    plan: Plan
    kept: bool
    reason: str
    objective: float
    scratch_objective: float
    movement: Movement
    scratch_movement: Movement
    steps: tuple[Step, ...]
    stats: SearchStats
    seconds: float


def replan(request: PlanRequest, running: Plan, wishes: ReplanWishes | None = None) -> Replanned:
    """Raises InputError for a wrong request and InfeasibleError where nothing fits any more."""
    wishes = wishes or ReplanWishes()
    request.check()
    started = time.monotonic()
    search = Search(request)
    scratch, stats = search.run()
    if scratch is None:
        if stats.stop is StopReason.PROVED:
            raise InfeasibleError(reasons(request))
        raise PlannerError(f"no plan within {request.time_limit_seconds:g} s: raise planning.timeLimitSeconds")
    deadline = started + request.time_limit_seconds
    context = _Context(search.pricer.request, search.pricer, running, deadline)
    chosen = context.least_moving(scratch, wishes.slack)
    plan = context.plan_of(chosen)
    now = _running_choice(request, running, deadline)
    scratch_plan = assemble(request, scratch, search.pricer)
    outcome = Replanned(
        plan=plan,
        kept=False,
        reason="devices of the running plan are gone, or too small for it",
        objective=chosen.objective,
        scratch_objective=scratch.solution.objective,
        movement=movement(context.before, plan, request.model),
        scratch_movement=movement(context.before, scratch_plan, request.model),
        steps=steps(running, plan, request.model, serving=context.serving),
        stats=stats,
        seconds=time.monotonic() - started,
    )
    return outcome if now is None else _worthwhile(outcome, now, running, wishes)


def _running_choice(request: PlanRequest, running: Plan, deadline: float) -> "_Choice | None":
    """The running plan, charged for the widths that it has; None where it answers another request or fits no longer."""
    used = {bits for stage in running.stages for bits in stage.bits}
    if not used <= set(request.bits):
        return None
    own = replace(request, allowed_bits=tuple(sorted(used)))
    return _Context(own, Pricer(own), running, deadline).running_choice()


def _worthwhile(outcome: Replanned, now: "_Choice", running: Plan, wishes: ReplanWishes) -> Replanned:
    """The running plan, unless the new one is enough better and near enough."""
    gain = 1 - outcome.objective / now.objective
    most = wishes.most_loaded_bytes
    if gain < wishes.min_gain or gain <= 0:
        reason = f"the best plan gains {max(gain, 0):.1%}, less than minGain {wishes.min_gain:.0%}"
    elif most is not None and outcome.movement.loaded_bytes > most:
        reason = f"a gain of {gain:.1%} would read {outcome.movement.loaded_bytes} bytes; the budget is {most}"
    else:
        return replace(outcome, reason=f"gains {gain:.1%}")
    return replace(
        outcome, plan=running, kept=True, reason=reason, objective=now.objective, movement=Movement(), steps=()
    )


@dataclass(frozen=True)
class _Choice:
    """A candidate with names and borders."""

    candidate: Candidate
    problem: Problem
    placement: Placement
    objective: float
    movement: Movement


class _Context:
    """One replanning: the request, and what the devices hold."""

    def __init__(self, request: PlanRequest, pricer: Pricer, running: Plan, deadline: float) -> None:
        self.before = holdings(running)
        self._request, self._pricer, self._running, self._deadline = request, pricer, running, deadline
        self._units = Units.of(pricer.layer_runs)
        self._fleet = fleet_of(request.cluster)
        self.serving = all(self._group(stage) for stage in running.stages)

    def least_moving(self, scratch: Found, slack: float) -> _Choice:
        """Over all candidates within the slack: the least bytes to read, then the fewest layers moved."""
        founds = [scratch]
        for order in self._repaired_orders():
            founds += self._solved(order, scratch.solution.objective * (1 + slack))
        best = min(each.solution.objective for each in founds)
        ceiling = best * (1 + slack)
        choices = [self._towards(found, ceiling) for found in founds if found.solution.objective <= ceiling]
        return min(choices, key=_cost)

    def running_choice(self) -> _Choice | None:
        """The running plan under today's costs; None if a device is gone or it fits no longer."""
        replica = self._running.replicas[0]
        groups = [self._group(stage) for stage in replica.stages]
        if len(self._running.replicas) > 1 or None in groups or not self._same_question():
            return None
        batch = replica.micro_batch
        candidate = Candidate(tuple(each for each in groups if each), batch.prefill, batch.decode)
        problem = self._pricer.problem(candidate)
        placement = self._placement_of(replica.stages)
        if placement is None or not problem.is_feasible(placement.counts(self._units)):
            return None
        objective = problem.objective(placement.counts(self._units))
        return _Choice(candidate, problem, placement, objective, Movement())

    def _same_question(self) -> bool:
        """Whether the running plan answers this request at all: its model, its type of activations, its length."""
        running, request = self._running, self._request
        asked = (request.model_uri, request.compute_type, request.max_model_len, request.model.num_layers)
        answered = (running.model_uri, running.compute_type, running.max_model_len, running.num_layers)
        return asked == answered

    def _placement_of(self, stages: Sequence[Stage]) -> Placement | None:
        bits = [each for stage in stages for each in stage.bits]
        edges = {stage.layers[0] for stage in stages}
        placed: list[tuple[int, ...]] = []
        for layers in self._units.layers:
            mine = {bits[layer] for layer in layers}
            if len(mine) > 1 or edges & set(layers[1:]):
                return None
            if layers[0] in edges:
                placed.append(())
            placed[-1] += (mine.pop(),)
        return Placement(tuple(placed))

    def _group(self, stage: Stage) -> DeviceGroup | None:
        return self._request.cluster.group(stage.places)

    def _repaired_orders(self) -> Iterator[Order]:
        """The running order without what is lost; and with one new device of each kind, at every place."""
        replica = self._running.replicas[0]
        kept = tuple(group for stage in replica.stages if (group := self._group(stage)))
        used = {place for group in kept for place in group.places}
        if kept:
            yield kept
        for members in self._fleet.devices:
            new = next((device for device in members if device.place not in used), None)
            if new is not None:
                for at in range(len(kept) + 1):
                    yield (*kept[:at], DeviceGroup((new,)), *kept[at:])

    def _solved(self, order: Order, ceiling: float) -> list[Found]:
        request = self._request
        most = request.max_stages or len(order)
        if not request.min_stages <= len(order) <= min(most, request.model.num_layers):
            return []
        found = []
        for candidate in self._pricer.micro_batches(order):
            problem = self._pricer.problem(candidate)
            left = self._deadline - time.monotonic()
            if left <= 0:
                break
            if lower_bound(problem) <= ceiling:
                solution = solve(problem, ceiling, left)
                if solution.counts:
                    found.append(Found(candidate, problem, solution))
        return found

    def _towards(self, found: Found, ceiling: float) -> _Choice:
        """The candidate on the devices that hold most of it, its borders and bits moved towards what they hold."""
        placement = placement_of(found.solution.counts, len(found.candidate.order))
        order = closest(
            found.candidate.order,
            self._fleet,
            lambda j, group: _weight(self._stage_movement(self._arranged(placement, j, group), j, group)),
        )
        candidate = replace(found.candidate, order=order)
        for j, group in enumerate(order):
            placement = self._arranged(placement, j, group)
        problem = self._pricer.problem(candidate)
        choice = self._choice(candidate, problem, placement)
        while (better := self._better(choice, ceiling)) is not None:
            choice = better
        return choice

    def _better(self, choice: _Choice, ceiling: float) -> _Choice | None:
        """The first small change that moves less and keeps to the ceiling and to memory."""
        order, problem = choice.candidate.order, choice.problem
        allowed = [sorted(set.intersection(*map(set, stage.seconds))) for stage in problem.stages]
        for placement in choice.placement.neighbours(allowed):
            moved = self._movement(placement, order)
            if _weight(moved) >= _weight(choice.movement):
                continue
            counts = placement.counts(self._units)
            if problem.objective(counts) <= ceiling and problem.is_feasible(counts):
                return self._choice(choice.candidate, problem, placement)
        return None

    def _choice(self, candidate: Candidate, problem: Problem, placement: Placement) -> _Choice:
        objective = problem.objective(placement.counts(self._units))
        return _Choice(candidate, problem, placement, objective, self._movement(placement, candidate.order))

    def _movement(self, placement: Placement, order: Order) -> Movement:
        total = Movement()
        for j, group in enumerate(order):
            total += self._stage_movement(placement, j, group)
        return total

    def _stage_movement(self, placement: Placement, j: int, group: DeviceGroup) -> Movement:
        tables = (j == 0, j == len(placement.stages) - 1)
        wanted = placement.held(j, self._units, self._pricer.formats(group), tables=tables)
        request = self._request
        return movement_to(self._held(group), wanted, request.model, request.compute_type, group.degree)

    def _arranged(self, placement: Placement, j: int, group: DeviceGroup) -> Placement:
        return arranged(placement, j, self._units, self._pricer.formats(group), self._held(group))

    def _held(self, group: DeviceGroup) -> Held:
        return self.before.get(group.places, NOTHING)

    def plan_of(self, choice: _Choice) -> Plan:
        counts = choice.placement.counts(self._units)
        solution = Solution(SolutionStatus.FEASIBLE, StopReason.PROVED, counts, choice.objective)
        found = Found(choice.candidate, choice.problem, solution)
        bits = tuple(self._layer_bits(choice.placement, j) for j in range(len(choice.placement.stages)))
        return assemble(self._request, found, self._pricer, bits)

    def _layer_bits(self, placement: Placement, j: int) -> tuple[int, ...]:
        first = placement.firsts()[j]
        return tuple(bits for k, bits in enumerate(placement.stages[j]) for _ in self._units.layers[first + k])


def _weight(moved: Movement) -> float:
    """Bytes to read decide; a layer that only changes its owner counts as a byte."""
    return moved.loaded_bytes + moved.moved_layers


def _cost(choice: _Choice) -> tuple[float, float]:
    return _weight(choice.movement), choice.objective if math.isfinite(choice.objective) else math.inf
