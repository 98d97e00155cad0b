"""Making a plan: the planner's front door, called by `strata plan`, `strata up` and the operator.

check the request -> search -> assemble the Plan, or say why nothing fits. Pure: no file, no network, no clock but the time
limit's.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from strata_planner.contract.judged import SearchEnd, SearchEnded
from strata_planner.contract.plan import Plan
from strata_planner.costs.prompts import most_prompts
from strata_planner.errors import InfeasibleError, OutOfTimeError
from strata_planner.question.request import ONE_PIPELINE, Objective, PlanRequest
from strata_planner.search.assembly import assemble
from strata_planner.search.canonical import canonical
from strata_planner.search.exact.blocks import mixed_widths
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.feasibility import reasons
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.problem import SolutionStatus, StopReason
from strata_planner.search.exact.search import Search, SearchStats
from strata_planner.search.exact.widths import narrowings
from strata_planner.search.layouts.genetic import Genome
from strata_planner.search.layouts.goals import goal_of
from strata_planner.search.layouts.pool import Pool
from strata_planner.search.layouts.search import Layout, LayoutStats, Wish, best_layout, layout_plan
from strata_planner.search.layouts.solved import SolvedReplica
from strata_planner.search.metric import with_objective
from strata_planner.search.prediction import predict
from strata_planner.search.strategies import with_strategies
from strata_planner.search.watch import Watch, best_of_all, part_of, unwatched

__all__ = ["PlanOutcome", "PlanRequest", "make_plan"]

IDLE = "devices stay idle: they would not help this goal"
_PROVEN = "layers and bits are proven for each replica's devices; which devices form one is searched, not proven"
_ENDED = (
    "proving layers and bits took more than its limit: they, and which devices form a replica, are searched, not proven"
)
_SEARCHED = "layers and bits and which devices form a replica are searched, not proven"
_PROOF_NOTES = (_PROVEN, _ENDED, _SEARCHED)
_PROVEN_GAP = 1e-5  # what is left between a plan and its bound when nothing better is to be found
_PROVEN_DEVICES = 6  # with so many, one pipeline of them is proven within a second or two
_PROOF_SECONDS, _LEAST_PROOF_SECONDS, _PROOF_WORK = 10.0, 0.5, 300e6  # the last in numbers: half a second to one
_MANY_PRICES = 3  # times that work, where a bound of the penalty is kept by its price
_ENDS: dict[StopReason, SearchEnd] = {
    StopReason.PROVED: "proved",
    StopReason.TIME_LIMIT: "timeLimit",
    StopReason.SETTLED: "settled",
    StopReason.WORK_LIMIT: "workLimit",
    StopReason.ORDER_LIMIT: "orderLimit",
}
_QUICK_SECONDS, _QUICK_STALL = 5.0, 100


@dataclass(frozen=True)
class PlanOutcome:
    """The plan, what finding it took, and what its reader should know (`notes`: assumptions it rests on)."""

    plan: Plan
    stats: SearchStats
    notes: tuple[str, ...]
    replicas: tuple[SolvedReplica, ...] = ()
    improvements: tuple[tuple[float, float], ...] = ()  # seconds since the start, the value by the request's metric


def make_plan(
    request: PlanRequest,
    hints: Sequence[Plan] = (),
    *,
    quick: bool = False,
    proven: bool = True,
    watch: Watch = unwatched,
) -> PlanOutcome:
    """The best plan by the request's metric that is found; `hints`: plans whose grouping of devices is tried too, a running one say.
    `quick`: after one short search that proves little, for plans that are only compared. Not `proven`: layers and bits of each replica are the best that
    were found, at a quarter less work. `watch` is told how far it is.

    Raises InputError for a wrong request and InfeasibleError, with reasons, where nothing fits.
    """
    request.check()
    request = replace(request, cluster=canonical(request.cluster))
    if request.solver in ONE_PIPELINE:
        return _pipeline(replace(request, time_limit_seconds=_limit(request, quick=quick)), watch)
    return _outcome(request, _searched(request, hints, best_of_all(watch), quick=quick, proven=proven), proven=proven)


def _limit(request: PlanRequest, *, quick: bool) -> float:
    return min(_QUICK_SECONDS, request.time_limit_seconds) if quick else request.time_limit_seconds


def _searched(request: PlanRequest, hints: Sequence[Plan], watch: Watch, *, quick: bool, proven: bool) -> Layout:
    """Replicas; and beside them, where the devices are few, the pipeline that is proven to be the least by LLM-PQ's objective. Cut by the clock if any
    part of it was.
    """
    started, pool = time.monotonic(), Pool(request.cluster)
    alone = replace(request, solver="pipeline", objective=Objective(), tensor_parallel=(1,))
    if not pool.classes:
        raise InfeasibleError(reasons(alone))
    starts = [start for plan in hints if (start := _start(pool, plan))]
    asked = narrowings(request)
    seconds = _limit(request, quick=quick) / len(asked)
    wish = Wish(seconds=seconds, thorough=not quick, stall=_QUICK_STALL if quick else None, proves=proven)
    wishes = [
        replace(wish, watch=part_of(watch, place, len(asked)), thorough=not (quick or place))
        for place in range(len(asked))
    ]
    tried = (_laid_out(each, starts, wished) for each, wished in zip(asked, wishes, strict=True))
    found = [_of_all(layout, _limit(request, quick=quick)) for layout in tried if layout is not None]
    few = not quick and sum(pool.whole) <= _PROVEN_DEVICES and request.objective.goal == "throughput"
    if request.solver == "auto" and 1 in request.tensor_parallel and (few or not found or _mixes(request)):
        limit = _limit(request, quick=quick)
        left = min(limit, max(_LEAST_PROOF_SECONDS, limit - (time.monotonic() - started)))
        prices = _MANY_PRICES if _mixes(request) else 1
        work = prices * _PROOF_WORK if found else math.inf  # nothing else may find what holds the model
        layout, stop = _pipeline_as_layout(request, min(_PROOF_SECONDS, left), work)
        found += [_of_all(layout, limit)] if layout is not None else []
        if not found and stop is StopReason.TIME_LIMIT:
            raise _nothing_in_time(limit)
    if not found and 1 not in request.tensor_parallel:
        degrees = ", ".join(map(str, request.tensor_parallel))
        held = "no groups of so many equal devices of one node, which divide the model's heads, hold"
        raise InfeasibleError([f"tensorParallel [{degrees}]: {held} {request.model_uri}; allow 1 too"])
    if not found:
        raise InfeasibleError(reasons(alone))
    best = max(found, key=lambda each: each.value(request))
    cuts = [each.stats.cut_after_seconds for each in found if each.stats.cut_after_seconds is not None]
    if best.stats.cut_after_seconds is None and cuts:
        best = replace(best, stats=replace(best.stats, cut_after_seconds=max(cuts)))
    return best


def _of_all(layout: Layout, seconds: float) -> Layout:
    """One that the clock has cut was so by the limit of the whole question, of which it had a part."""
    stats = layout.stats
    return (
        layout if stats.cut_after_seconds is None else replace(layout, stats=replace(stats, cut_after_seconds=seconds))
    )


def _mixes(request: PlanRequest) -> bool:
    """Whether layers can have to have unlike bits, which only the exact search sees to: estimates give a replica's layers the same, or two."""
    return request.penalty_bound is not None or len(set(request.model.stored_formats or ())) > 1


def _laid_out(request: PlanRequest, starts: Sequence[Genome], wish: Wish) -> Layout | None:
    try:
        return best_layout(request, wish, starts)
    except InfeasibleError:
        return None


def _nothing_in_time(seconds: float, looked_at: str = "") -> OutOfTimeError:
    return OutOfTimeError(
        f"no plan within {seconds:g} s{looked_at}: raise planning.timeLimitSeconds, or lower placement.maxStages"
    )


def _pipeline_as_layout(request: PlanRequest, limit: float, work: float) -> tuple[Layout | None, StopReason]:
    """None where none is found; and how the search ended."""
    search = Search(replace(request, solver="pipeline", time_limit_seconds=limit), work=work)
    one, stats = search.run()
    if one is None:
        return None, stats.stop
    replica = _never_empty(_replica(search, one), request)
    cut = limit if stats.stop is StopReason.TIME_LIMIT else None
    is_open = stats.stop is StopReason.PROVED and stats.gap > _PROVEN_GAP  # between two prices of the penalty
    proof = StopReason.SETTLED if is_open else stats.stop
    told = LayoutStats(stats.orders, stats.candidates, stats.seconds, 0.0, cut, proof=proof)
    idle = len(request.cluster.accelerators()) - len(replica.order)
    return Layout(goal_of(request), (replica,), idle, told), stats.stop


def _never_empty(replica: SolvedReplica, request: PlanRequest) -> SolvedReplica:
    """The same layers on the same devices, told in the steady state; steps of as many tokens, also of several prompts' parts."""
    asked, found = replace(replica.request, solver=request.solver, objective=request.objective), replica.found
    pair, prompt = found.candidate.pair, asked.workload.prompt_tokens
    chunk = min(pair.chunk, pair.prefill * prompt)
    most = most_prompts(asked.workload, chunk)
    candidate = Candidate(found.candidate.order, replace(pair, prefill=most, chunk=chunk))
    pricer = Pricer(asked)
    told = Found(candidate, pricer.problem(candidate), found.solution)
    return SolvedReplica(asked, told, predict(pricer, told))


def _start(pool: Pool, plan: Plan) -> Genome | None:
    """Its replicas, and the devices that it leaves idle as one more. None where the plan names a device twice."""
    parts = pool.parts_of(plan)
    taken = tuple(map(sum, zip(*parts, strict=True)))
    rest = tuple(whole - used for whole, used in zip(pool.whole, taken, strict=True))
    return tuple(part for part in (*parts, rest) if any(part)) if min(rest, default=0) >= 0 else None


def _pipeline(request: PlanRequest, watch: Watch) -> PlanOutcome:
    search = Search(request, watch)
    found, stats = search.run()
    if found is None and stats.stop is StopReason.PROVED:
        raise InfeasibleError(reasons(request))
    if found is None:
        raise _nothing_in_time(request.time_limit_seconds, f" ({stats.orders} device orders looked at)")
    plan = with_objective(request, assemble(request, found, search.pricer))
    notes = _notes(request, plan)
    if search.narrower:
        notes.append(
            "memory is scarce for kernels of many widths: searched with each one and two widths alone, and with all in every stage"
        )
    groups = {run.layers_per_unit for run in search.pricer.layer_runs}
    if groups != {1}:
        notes.append(f"layers decided in groups of {max(groups)}: one by one they are too many for the solver")
    restricted = search.narrower or groups != {1} or _mixed(request) < len(request.bits)
    known = 0 < stats.bound < math.inf and not restricted  # of a part of all plans it is no bound
    ended_by = _ended(stats, request.time_limit_seconds)
    plan = msgspec.structs.replace(plan, search=msgspec.structs.replace(ended_by, bound=stats.bound if known else None))
    if stats.stop is not StopReason.PROVED or stats.gap > _PROVEN_GAP:
        ended = f"the search ended at its {stats.stop.value}: " if stats.stop is not StopReason.PROVED else ""
        by = f", at most {stats.gap:.2%} better by the objective" if math.isfinite(stats.gap) else ""
        notes.append(f"{ended}a better plan may exist{by}")
    return PlanOutcome(plan, stats, tuple(notes), (_replica(search, found),))


def _replica(search: Search, found: Found) -> SolvedReplica:
    """With the widths that it was found among."""
    asked = search.pricer.request
    return SolvedReplica(asked, found, predict(search.pricer, found))


def _outcome(request: PlanRequest, found: Layout, *, proven: bool) -> PlanOutcome:
    stats = SearchStats(
        orders=found.stats.evaluations,
        candidates=found.stats.mutations,
        pruned=0,
        solved=len(found.replicas),
        seconds=found.stats.seconds,
        stop=_stop(found.stats),
        status=SolutionStatus.FEASIBLE,
    )
    plan, of_strategies = with_strategies(request, layout_plan(found))
    ended = _ended(stats, found.stats.cut_after_seconds)
    plan = msgspec.structs.replace(with_objective(request, plan), search=ended)
    notes = [*_notes(request, plan), *of_strategies]
    notes.append(_proof_note(found.stats.proof) if proven else _SEARCHED)
    if ended.was_cut:
        notes.append(ended.warning)
    if found.idle:
        notes.append(f"{found.idle} {IDLE}")
    return PlanOutcome(plan, stats, tuple(notes), found.replicas, found.stats.improvements)


def exchanged(request: PlanRequest, outcome: PlanOutcome, better: Layout) -> PlanOutcome:
    """The outcome of the same search with a better layout, and what is proven of that."""
    plan = msgspec.structs.replace(layout_plan(better), search=outcome.plan.search)
    notes = [_proof_note(better.stats.proof) if note in _PROOF_NOTES else note for note in outcome.notes]
    return replace(outcome, plan=with_objective(request, plan), notes=tuple(notes), replicas=better.replicas)


def _proof_note(proof: StopReason) -> str:
    if proof is StopReason.PROVED:
        return _PROVEN
    return _ENDED if proof in {StopReason.WORK_LIMIT, StopReason.TIME_LIMIT} else _SEARCHED


def _ended(stats: SearchStats, cut_after_seconds: float | None) -> SearchEnded:
    cut = stats.stop is StopReason.TIME_LIMIT
    return SearchEnded(_ENDS[stats.stop], cut_after_seconds if cut else None)


def _stop(stats: LayoutStats) -> StopReason:
    if stats.cut_after_seconds is not None:
        return StopReason.TIME_LIMIT
    if stats.ended_by_work:
        return StopReason.WORK_LIMIT
    return StopReason.SETTLED if stats.proof is StopReason.PROVED else stats.proof


def _mixed(request: PlanRequest) -> int:
    """Neighbouring widths that a stage of a proven pipeline mixes at most."""
    most = len(request.bits)
    return mixed_widths(request.model.num_layers, most) if request.solver == "pipeline" else most


def _notes(request: PlanRequest, plan: Plan) -> list[str]:
    notes = []
    if request.sensitivity is None and len(request.bits) > 1:
        notes.append(f"sensitivity: {request.omega.source}")
    assumed = sorted({stage.devices[0].type for stage in plan.stages if "assumed" in stage.times.source})
    if assumed:
        notes.append(f"rates or efficiencies of {', '.join(assumed)} are assumed: measure them for a better prediction")
    mixed = _mixed(request)
    if mixed < len(request.bits):
        notes.append(f"proven among plans whose stages mix at most {mixed} neighbouring widths")
    left_out = [] if request.model.quantization else sorted(set(request.allowed_bits) - set(request.bits))
    if left_out:
        notes.append(f"bits {left_out} left out: the fused experts of this model have no any-precision form")
    return notes
