"""The best plan over all pools and micro-batch pairs of a model whose layers cost alike: best bound first.

Called by `search`. A job is a pool with a pair; all its device orders are looked at together. Each job in turn gets better
shares, then is searched ever further above its bound, as long as that bound is the least of all: what is proven is proven for
every candidate.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from strata_planner.search.exact.blocks import Blocks
from strata_planner.search.exact.bounds import pooled_bound
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.decomposition import Decomposition, Pipeline
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.exact import FIRST_SLACK, ROUNDS, WIDER, counts_of
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.lattice import Floats
from strata_planner.search.exact.orders import Fleet
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.pools import Pool, Prices
from strata_planner.search.exact.problem import Solution, SolutionStatus, StopReason

ORDER_LIMIT = 5000  # different device orders looked at; only large fleets of unlike devices have more
_DIVING_SHARE = 0.25
Step = Callable[[float], None]  # is called now and then with the objective of the best plan so far
ENUMERATION_SHARE = 0.3  # of the effort that there is
WORK_OF_BOUND = 30_000  # numbers weighed for a candidate's first bound


@dataclass
class _Job:
    pool: Pool
    pair: Pair
    bound: float
    solver: Decomposition | None = None
    slack: float = FIRST_SLACK
    searched: bool = False


@dataclass
class PoolSearch:
    """One search. `theta`: the weight of omega. `tolerance`: plans that are better by less are not looked for."""

    pricer: Pricer
    fleet: Fleet
    theta: float
    tolerance: float
    effort: Effort
    step: Step | None = None
    stop: StopReason = StopReason.PROVED
    bound: float = math.inf
    jobs: list[_Job] = field(default_factory=list)
    orders: int = 0

    def __post_init__(self) -> None:
        rows = [
            [self.theta * run.omega[bits] for bits in self.pricer.request.bits]
            for run in self.pricer.runs
            for _ in range(run.units)
        ]
        self._penalty = np.array(rows)
        self._blocks = Blocks(self._penalty)
        self._prices = Prices(self.pricer, self.fleet)
        self._portions: dict[Pool, Floats] = {}
        self._best: tuple[_Job, Pipeline] | None = None
        self._unseen = False  # whether orders were left out

    @property
    def candidates(self) -> int:
        return sum(job.pool.orders for job in self.jobs)

    @property
    def solved(self) -> int:
        return sum(job.pool.orders for job in self.jobs if job.searched)

    @property
    def objective(self) -> float:
        return self._best[1].objective if self._best else math.inf

    @property
    def _cutoff(self) -> float:
        return self.objective * (1 - self.tolerance)

    def run(self, pools: Iterable[Pool]) -> Found | None:
        """The best plan found; `bound` and `stop` say what is known of it."""
        self._enumerate(pools)
        if self.jobs and self.effort.ended_by is None:
            self._dive(min(self.jobs, key=lambda job: job.bound))
        queue = [(job.bound, number, job) for number, job in enumerate(self.jobs)]
        heapq.heapify(queue)
        while queue and queue[0][0] < self._cutoff:
            ended_by = self.effort.ended_by
            if ended_by is not None:
                self.stop = ended_by
                break
            _, number, job = heapq.heappop(queue)
            self._advance(job)
            if job.bound < self._cutoff:
                heapq.heappush(queue, (job.bound, number, job))
        self.bound = min([self.objective, *(job.bound for job in self.jobs)])
        self.bound = 0.0 if self._unseen else self.bound
        return self._found()

    def _enumerate(self, pools: Iterable[Pool]) -> None:
        enough = self.effort.until(ENUMERATION_SHARE)
        for pool in pools:
            limited = pool.sequence is not None and self.orders >= ORDER_LIMIT
            if limited or enough():
                self.stop = StopReason.ORDER_LIMIT if limited else self.effort.share_ended_by
                self._unseen = True
                break
            self.orders += pool.orders
            if pool.usable_bytes < self.pricer.least_weight_bytes:
                continue
            for pair in self.pricer.pairs(pool.stages):
                self.effort.spend(WORK_OF_BOUND)
                bound = pooled_bound(pool.lattice(self._prices, pair, self._penalty))
                if math.isfinite(bound):
                    self.jobs.append(_Job(pool, pair, bound))

    def _advance(self, job: _Job) -> None:
        """Better shares first; then a search, each time further above the bound."""
        if job.solver is None:
            job.solver = Decomposition(
                job.pool.lattice(self._prices, job.pair, self._penalty), self._blocks, self.effort
            )
            self._tune(job, job.solver)
        else:
            job.searched = True
            ceiling = min(self._cutoff, job.bound + job.slack * max(abs(job.bound), 1e-9))
            job.solver.solve(ceiling, self.tolerance)
            job.slack *= WIDER
        job.bound = max(job.bound, job.solver.bound)
        if job.solver.best is not None and job.solver.objective < self.objective:
            self._best = (job, job.solver.best)
        if self.step is not None:
            self.step(self.objective)

    def _dive(self, job: _Job) -> None:
        """Solve the most promising job at once: the better the first plan, the sooner the others are ruled out."""
        self._advance(job)
        enough = self.effort.until(_DIVING_SHARE)
        while job.bound < self._cutoff and not enough():
            self._advance(job)

    def _tune(self, job: _Job, solver: Decomposition) -> None:
        """From the shares that the pool had with another pair."""
        weights = np.array(solver.lattice.weights[:2])
        start = self._portions.get(job.pool)
        shares = solver.tune(self._cutoff, ROUNDS, None if start is None else start * weights)
        if weights.all():
            self._portions[job.pool] = shares / weights

    def _found(self) -> Found | None:
        if self._best is None:
            return None
        job, pipeline = self._best
        assert job.solver is not None, "a pipeline comes from a solver"
        order = job.pool.order([part.step for part in pipeline.parts])
        candidate = Candidate(order, job.pair)
        problem = self.pricer.problem(candidate)
        runs = [r for r, run in enumerate(problem.runs) for _ in range(run.units)]
        counts = counts_of(job.solver, pipeline, runs)
        status = SolutionStatus.OPTIMAL if self.stop is StopReason.PROVED else SolutionStatus.FEASIBLE
        return Found(candidate, problem, Solution(status, self.stop, counts, problem.objective(counts), self.bound))
