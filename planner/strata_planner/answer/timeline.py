"""When each stage works on which micro-batch: the schedule behind a plan's predicted times.

Called by `picture`. A stage takes micro-batches in turn, a micro-batch goes to the next stage when its hop is over, and in
decoding a micro-batch starts its next token when the last one is back. Stages wait in between: the bubbles.
"""

from dataclasses import dataclass

from strata_planner.contract.plan import Replica


@dataclass(frozen=True)
class Work:
    """Seconds from the beginning of the phase; `round` counts the tokens of a decoding micro-batch."""

    stage: int
    micro_batch: int
    round: int
    start: float
    end: float


def prefill_timeline(replica: Replica, micro_batches: int) -> list[Work]:
    times = [stage.times for stage in replica.stages]
    return _schedule(
        [each.prefill_seconds for each in times], [each.prefill_transfer_seconds for each in times], micro_batches, 1
    )


def decode_timeline(replica: Replica, micro_batches: int, rounds: int) -> list[Work]:
    times = [stage.times for stage in replica.stages]
    return _schedule(
        [each.decode_seconds for each in times], [each.decode_transfer_seconds for each in times], micro_batches, rounds
    )


def busy_share(work: list[Work], stage: int) -> float:
    """How much of the time until the last work's end a stage works."""
    span = max(each.end for each in work) - min(each.start for each in work)
    return sum(each.end - each.start for each in work if each.stage == stage) / span if span else 1.0


def _schedule(seconds: list[float], hops: list[float], micro_batches: int, rounds: int) -> list[Work]:
    free = [0.0] * len(seconds)  # when each stage is free again
    ready = [0.0] * micro_batches  # when each micro-batch is at the first stage again
    done = []
    for turn in range(rounds):
        for batch in range(micro_batches):
            at = ready[batch]
            for j, duration in enumerate(seconds):
                start = max(at, free[j])
                free[j] = start + duration
                done.append(Work(j, batch, turn, start, free[j]))
                at = free[j] + hops[j]
            ready[batch] = at
    return done
