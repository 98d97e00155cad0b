"""Ranks of one stage as threads of a test: collectives wait outside of Python's lock."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from strata_runtime.ranks.shared_memory import SharedMemory, make_segment

T = TypeVar("T")


def together(ranks: int, body: Callable[[SharedMemory], T], patience: float = 20.0) -> list[T]:
    """What `body` gives on each rank. Raises what the first one raised; the others are let go."""
    segment = make_segment(ranks)
    raised: list[BaseException] = []

    def alone(rank: int) -> T:
        collectives = SharedMemory(segment, rank, ranks, patience)
        try:
            return body(collectives)
        except BaseException as error:
            raised.append(error)
            collectives.end()
            raise

    try:
        with ThreadPoolExecutor(ranks) as threads:
            answers = [threads.submit(alone, rank) for rank in range(ranks)]
        if raised:
            raise raised[0]
        return [each.result() for each in answers]
    finally:
        os.close(segment)
