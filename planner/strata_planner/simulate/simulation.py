"""The simulator: arrivals go to replicas, replicas' leaders act, until nothing is left to do. Called by everyone who judges plans.

Its loop is that of Vidur (MLSys 2024): the earliest event, whatever it is. Time is the leaders'; the gateway's own work (HTTP,
tokenizer, its link to the leaders) is not part of it.
"""

import heapq
from collections import deque
from collections.abc import Sequence as Many

from strata_planner.errors import WorkloadError
from strata_planner.simulate.leader import Leader
from strata_planner.simulate.outcome import Outcome, ReplicaUse, Served
from strata_planner.simulate.replica import ReplicaModel
from strata_planner.simulate.routing import ReplicaLoad, Routing, least_loaded
from strata_planner.simulate.scheduler import Sequence
from strata_planner.simulate.trace import Request


def simulate(
    replicas: Many[ReplicaModel],
    trace: Many[Request],
    routing: Routing = least_loaded,
    horizon: float | None = None,
    in_flight: int | None = None,
) -> Outcome:
    """Serve the trace; `horizon`: the second after which nothing is looked at any more. Raises WorkloadError.

    `in_flight`: a closed loop of so many clients: requests arrive in the trace's order, each as soon as an earlier one has its answer,
    whatever the trace says of times. None: an open loop, as the trace says. A request that no replica could hold even alone is
    refused and counts as unserved.
    """
    if not replicas:
        raise WorkloadError("a simulation needs at least one replica")
    if in_flight is not None and in_flight < 1:
        raise WorkloadError(f"{in_flight} requests in flight: a closed loop needs at least 1")
    return _Simulation(replicas, trace, routing, in_flight).run(float("inf") if horizon is None else horizon)


class _Simulation:
    def __init__(
        self, replicas: Many[ReplicaModel], trace: Many[Request], routing: Routing, in_flight: int | None
    ) -> None:
        self._leaders = [Leader(model, self._finished) for model in replicas]
        self._routing = routing
        self._outstanding = [0] * len(replicas)
        self._most_tokens = min(model.limits.most_tokens for model in replicas)  # what the gateway takes
        self._sequences = [Sequence(number, request) for number, request in enumerate(trace)]
        self._due, self._later = self._sorted(in_flight)
        self._wakes: list[tuple[float, int]] = []  # a heap; out of date where a leader's own wake_at differs

    def run(self, horizon: float) -> Outcome:
        now = 0.0
        while self._due or self._wakes:
            wakes_at = self._wakes[0][0] if self._wakes else float("inf")
            arrives_at = self._due[0].request.arrival_seconds if self._due else float("inf")
            if min(wakes_at, arrives_at) > horizon:
                now = horizon
                break
            if arrives_at <= wakes_at:
                now = arrives_at
                self._arrive(self._due.popleft(), now)
            else:
                at, replica = heapq.heappop(self._wakes)
                if at == self._leaders[replica].wake_at:
                    now = at
                    self._leaders[replica].act(now)
                    self._remember(replica)
        return self._outcome(now)

    def _sorted(self, in_flight: int | None) -> tuple[deque[Sequence], deque[Sequence]]:
        """Those whose arrival is known, the next first, and those that come as others end."""
        if in_flight is None:
            return deque(sorted(self._sequences, key=lambda each: each.request.arrival_seconds)), deque()
        for sequence in self._sequences[:in_flight]:
            sequence.request = sequence.request._replace(arrival_seconds=0.0)
        return deque(self._sequences[:in_flight]), deque(self._sequences[in_flight:])

    def _arrive(self, sequence: Sequence, now: float) -> None:
        if sequence.request.longest > self._most_tokens:
            self._ended(now)
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
        assert sequence.finished_at is not None, "the leader said so"
        self._ended(sequence.finished_at)

    def _ended(self, now: float) -> None:
        """In a closed loop the next one arrives."""
        if self._later:
            sequence = self._later.popleft()
            sequence.request = sequence.request._replace(arrival_seconds=now)
            self._due.append(sequence)

    def _outcome(self, seconds: float) -> Outcome:
        there = (each for each in self._sequences if each.request.arrival_seconds <= seconds)
        waiting = set(self._later)
        requests = tuple(_served(each) for each in there if each not in waiting)
        uses = tuple(
            ReplicaUse(
                requests=sum(each.replica == place for each in self._sequences),
                steps=leader.steps,
                busy_seconds=tuple(leader.busy_seconds),
                kv_peak=leader.most_pages / max(leader.model.limits.page_budget, 1),
                preemptions=leader.scheduler.preemptions,
            )
            for place, leader in enumerate(self._leaders)
        )
        return Outcome(requests, uses, seconds)


def _served(sequence: Sequence) -> Served:
    replica = None if sequence.replica < 0 else sequence.replica
    return Served(sequence.request, replica, sequence.first_token_at, sequence.finished_at, sequence.produced)
