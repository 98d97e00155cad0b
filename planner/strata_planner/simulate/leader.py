"""One replica in motion: its leader's loop, its stages as a line of servers, its links. Driven by `simulation`.

As runtime/strata_runtime/slot/leader.py: each pass takes one result and what requests have come, then runs stage 0 on the next step, which
keeps the leader busy; at most as many steps as stages are under way. Stages and links work first in first out, so that a
step's way through all of them is known when it starts.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from strata_planner.simulate.replica import ReplicaModel
from strata_planner.simulate.scheduler import Scheduler, Sequence
from strata_planner.simulate.stage import Batch


class _Result(NamedTuple):
    """Of a step: when it reaches the leader, whose tokens it has, what was computed, and the seconds of the slowest stage."""

    at: float
    sampled: list[Sequence]
    batch: Batch
    seconds: float


class Leader:
    """`wake_at`: when the loop's next pass is; None while there is nothing to wait for."""

    def __init__(self, model: ReplicaModel, finished: Callable[[Sequence], None]) -> None:
        count = len(model.stages)
        self.model = model
        self.under_way = model.limits.micro_batch.under_way(count)
        self.scheduler = Scheduler(model.limits, self.under_way)
        self.wake_at: float | None = None
        self.kv_usage = 0.0  # as the coordinator was told last
        self.steps = 0
        self.busy_seconds = [0.0] * count
        self.most_pages = 0
        self._finished = finished
        self._inbox: deque[Sequence] = deque()
        self._results: deque[_Result] = deque()
        self._stage_free = [0.0] * count
        self._link_free = [0.0] * count

    def submit(self, sequence: Sequence, now: float) -> None:
        self._inbox.append(sequence)
        wake = max(now, self._stage_free[0])
        if self.wake_at is None or wake < self.wake_at:
            self.wake_at = wake

    def act(self, now: float) -> None:
        """One pass: a result, all requests that have come, a step."""
        if self._results and self._results[0].at <= now:
            self._take(self._results.popleft(), now)
        while self._inbox:
            self.scheduler.add(self._inbox.popleft())
        self.wake_at = self._step(now)

    def _step(self, now: float) -> float | None:
        """Start a step if there is one and the pipeline has room for it; when to look again."""
        if len(self._results) < self.under_way:
            chosen = self.scheduler.next_batch()
            if chosen is not None:
                batch, sampled = chosen
                self._results.append(self._pass_through(batch, sampled, now))
                return self._stage_free[0]
        return max(now, self._results[0].at) if self._results else None

    def _pass_through(self, batch: Batch, sampled: list[Sequence], now: float) -> "_Result":
        """Book the step on every stage and link."""
        self.steps += 1
        self.most_pages = max(self.most_pages, self.scheduler.held_blocks)
        stages, at, slowest = self.model.stages, now, 0.0
        last = len(stages) - 1
        for place, stage in enumerate(stages):
            seconds = stage.seconds(batch)
            at = max(at, self._stage_free[place]) + seconds
            self._stage_free[place] = at
            self.busy_seconds[place] += seconds
            slowest = max(slowest, seconds)
            if last:
                hop, units = stage.hop, batch.sampled if place == last else batch.tokens
                sending = units * hop.seconds_per_token + batch.tokens * hop.seconds_per_row
                at = max(at, self._link_free[place]) + sending
                self._link_free[place] = at
                at += hop.latency_seconds
        return _Result(at, sampled, batch, slowest)

    def _take(self, result: "_Result", now: float) -> None:
        batch, sampled = result.batch, result.sampled
        self.scheduler.pace.learn(batch.decoding, batch.tokens - batch.decoding, result.seconds)
        for sequence in sampled:
            sequence.produced += 1
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            if sequence.produced == sequence.request.output_tokens:
                sequence.finished_at = now
                self.scheduler.remove(sequence)
                self._finished(sequence)
            else:
                self.scheduler.take(sequence)
        if sampled:
            self.kv_usage = self.scheduler.held_blocks / max(self.model.limits.page_budget, 1)
