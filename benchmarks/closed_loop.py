"""Clients that each send their next request as soon as the last is answered: one replica under a closed loop, in virtual time.

Part of `benchmarks.silicon`. Drives the simulator's leader; knows nothing of prices.
"""

import random
from collections import deque
from collections.abc import Iterator

from strata_planner.simulate import Outcome, ReplicaModel, Request, Served
from strata_planner.simulate.leader import Leader
from strata_planner.simulate.scheduler import Sequence


def drawn(count: int, prompt_tokens: int, output_tokens: int, shortest: float, seed: int) -> Iterator[Request]:
    """Requests whose lengths are drawn evenly from `shortest` of the nominal ones to all of them."""
    draw = random.Random(seed)
    for _ in range(count):
        lengths = (draw.randint(int(shortest * tokens), tokens) for tokens in (prompt_tokens, output_tokens))
        yield Request(0.0, *lengths)


def closed_loop(replica: ReplicaModel, requests: Iterator[Request], clients: int) -> Outcome:
    """All clients start at once; each request's arrival is the moment that it was sent. Ends when all are answered."""
    served: list[Sequence] = []
    done: deque[Sequence] = deque()
    leader = Leader(replica, done.append)

    def send(now: float) -> None:
        request = next(requests, None)
        if request is not None:
            sequence = Sequence(len(served), request._replace(arrival_seconds=now))
            served.append(sequence)
            leader.submit(sequence, now)

    for _ in range(clients):
        send(0.0)
    now = 0.0
    while leader.wake_at is not None:
        now = leader.wake_at
        leader.act(now)
        while done:
            done.popleft()
            send(now)
    answered = (Served(each.request, 0, each.first_token_at, each.finished_at, each.produced) for each in served)
    return Outcome(tuple(answered), (), now)
