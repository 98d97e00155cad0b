"""The simulator: arrivals go to replicas, replicas' leaders act, until nothing is left to do. Called by everyone who judges plans.

Its loop is that of Vidur (MLSys 2024): the earliest event, whatever it is. Time is the leaders'; the gateway's own work (HTTP,
tokenizer, its link to the leaders) is not part of it.
"""

import heapq
from collections.abc import Sequence as Many

from strata_planner.errors import WorkloadError
from strata_planner.simulate.leader import Leader
from strata_planner.simulate.outcome import Outcome, ReplicaUse, Served
from strata_planner.simulate.replica import ReplicaModel
from strata_planner.simulate.routing import ReplicaLoad, Routing, least_loaded
from strata_planner.simulate.scheduler import Sequence
from strata_planner.simulate.trace import Request


def simulate(
    replicas: Many[ReplicaModel], trace: Many[Request], routing: Routing = least_loaded, horizon: float | None = None
) -> Outcome:
    """Serve the trace; `horizon`: the second after which nothing is looked at any more. Raises WorkloadError.

    A request that no replica could hold even alone is refused and counts as unserved.
    """
    if not replicas:
        raise WorkloadError("a simulation needs at least one replica")
    return _Simulation(replicas, trace, routing).run(float("inf") if horizon is None else horizon)


class _Simulation:
    def __init__(self, replicas: Many[ReplicaModel], trace: Many[Request], routing: Routing) -> None:
        self._leaders = [Leader(model, self._finished) for model in replicas]
        self._routing = routing
        self._outstanding = [0] * len(replicas)
        self._most_tokens = min(model.limits.most_tokens for model in replicas)  # what the gateway takes
        self._sequences = [Sequence(number, request) for number, request in enumerate(trace)]
        self._arrivals = sorted(self._sequences, key=lambda sequence: sequence.request.arrival_seconds)
        self._wakes: list[tuple[float, int]] = []  # a heap; out of date where a leader's own wake_at differs

    def run(self, horizon: float) -> Outcome:
        arrivals, now = iter(self._arrivals), 0.0
        arriving = next(arrivals, None)
        while arriving is not None or self._wakes:
            wakes_at = self._wakes[0][0] if self._wakes else float("inf")
            arrives_at = arriving.request.arrival_seconds if arriving else float("inf")
            if min(wakes_at, arrives_at) > horizon:
                now = horizon
                break
            if arriving is not None and arrives_at <= wakes_at:
                now = arrives_at
                self._arrive(arriving, now)
                arriving = next(arrivals, None)
            else:
                at, replica = heapq.heappop(self._wakes)
                if at == self._leaders[replica].wake_at:
                    now = at
                    self._leaders[replica].act(now)
                    self._remember(replica)
        return self._outcome(now)

    def _arrive(self, sequence: Sequence, now: float) -> None:
        if sequence.request.longest > self._most_tokens:
            return
        loads = [
            ReplicaLoad(place, leader.model.tokens_per_second, self._outstanding[place], leader.kv_usage)
            for place, leader in enumerate(self._leaders)
        ]
        sequence.replica = self._routing(loads)
        self._outstanding[sequence.replica] += 1
        before = self._leaders[sequence.replica].wake_at
        self._leaders[sequence.replica].submit(sequence, now)
        if self._leaders[sequence.replica].wake_at != before:
            self._remember(sequence.replica)

    def _remember(self, replica: int) -> None:
        wake_at = self._leaders[replica].wake_at
        if wake_at is not None:
            heapq.heappush(self._wakes, (wake_at, replica))

    def _finished(self, sequence: Sequence) -> None:
        self._outstanding[sequence.replica] -= 1

    def _outcome(self, seconds: float) -> Outcome:
        requests = tuple(_served(each) for each in self._sequences if each.request.arrival_seconds <= seconds)
        uses = tuple(
            ReplicaUse(
                requests=sum(each.replica == place for each in self._sequences),
                steps=leader.steps,
                busy_seconds=tuple(leader.busy_seconds),
                kv_peak=leader.most_pages / max(leader.model.limits.page_budget, 1),
            )
            for place, leader in enumerate(self._leaders)
        )
        return Outcome(requests, uses, seconds)


def _served(sequence: Sequence) -> Served:
    replica = None if sequence.replica < 0 else sequence.replica
    return Served(sequence.request, replica, sequence.first_token_at, sequence.finished_at, sequence.produced)
