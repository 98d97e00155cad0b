"""From chosen groups to a plan: the exact solver decides layers, bits and micro-batches of each replica, assembly the rest.

Called by `search`. Each replica is planned alone for its share of the workload's sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from strata_planner.contract.plan import Plan, Prediction
from strata_planner.question.request import PlanRequest
from strata_planner.search.assembly import assemble, combined
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.exact import solve
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.orders import Order
from strata_planner.search.exact.problem import SolutionStatus
from strata_planner.search.layouts.stages import with_concurrency
from strata_planner.search.prediction import predict

Place = tuple[str, str, int]  # node, type, index

_PREFILL_TOKENS = (256, 512, 2048)  # of the prefill micro-batches that are tried, about


@dataclass(frozen=True)
class SolvedReplica:
    """`found`: its candidate has the groups in order; `concurrency`: its share of the sequences in flight."""

    concurrency: int
    found: Found
    prediction: Prediction

    @property
    def order(self) -> Order:
        return self.found.candidate.order

    @property
    def layers(self) -> tuple[int, ...]:
        """Of each stage, in units of the solver (layers, where they are not grouped)."""
        counts = self.found.solution.counts
        return tuple(sum(n for (_, j, _), n in counts.items() if j == place) for place in range(len(self.order)))

    @property
    def places(self) -> frozenset[Place]:
        return frozenset(place for group in self.order for place in group.places)


def solved(request: PlanRequest, order: Order, concurrency: int) -> SolvedReplica | None:
    """The pair of micro-batches with the highest predicted rate; None where nothing fits."""
    share = with_concurrency(request, concurrency)
    pricer = Pricer(share)
    best: SolvedReplica | None = None
    for candidate in _candidates(pricer, order):
        problem = pricer.problem(candidate)
        if any(stage.capacity_bytes < 0 for stage in problem.stages):
            continue
        solution = solve(problem, time_limit_seconds=request.time_limit_seconds)
        if solution.status not in {SolutionStatus.OPTIMAL, SolutionStatus.FEASIBLE}:
            continue
        found = Found(candidate, problem, solution)
        one = SolvedReplica(concurrency, found, predict(share, found))
        if best is None or one.prediction.tokens_per_second > best.prediction.tokens_per_second:
            best = one
    return best


def _candidates(pricer: Pricer, order: Order) -> Iterator[Candidate]:
    """Every pair is too many for large loads: prefills of a few sizes, decodes split evenly."""
    prompt = pricer.request.workload.prompt_tokens
    decode = -(-pricer.request.workload.concurrency // len(order))
    for prefill in dict.fromkeys(min(decode, max(1, tokens // prompt)) for tokens in _PREFILL_TOKENS):
        yield Candidate(order, prefill, decode)


def plan_of(request: PlanRequest, replicas: tuple[SolvedReplica, ...]) -> Plan:
    """One plan of all replicas."""
    plans = []
    for each in replicas:
        share = with_concurrency(request, each.concurrency)
        plans.append(assemble(share, each.found, Pricer(share)))
    return combined(plans)
