"""Ranks of one stage as threads of a test: collectives wait outside of Python's lock."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from strata_runtime.ranks.collectives import Collectives
from strata_runtime.ranks.process_group import ProcessGroup, make_meeting
from strata_runtime.ranks.shared_memory import SharedMemory, make_segment

T = TypeVar("T")
C = TypeVar("C", bound=Collectives)
PATIENCE = 20.0


def together(ranks: int, body: Callable[[SharedMemory], T], patience: float = PATIENCE) -> list[T]:
    """What `body` gives on each rank. Raises what the first one raised; the others are let go."""
    return _on_each(make_segment(ranks), ranks, lambda file, rank: SharedMemory(file, rank, ranks, patience), body)


def distributed(
    ranks: int, body: Callable[[ProcessGroup], T], patience: float = PATIENCE, device: str = "cpu"
) -> list[T]:
    """The same over torch.distributed, once all have joined: Gloo, or NCCL on the devices `cuda`, one a rank."""

    def made(file: int, rank: int) -> ProcessGroup:
        place = torch.device(device) if device == "cpu" else torch.device(device, rank)
        return ProcessGroup(file, rank, ranks, place, patience)

    def joined(group: ProcessGroup) -> T:
        group.join()
        return body(group)

    return _on_each(make_meeting(), ranks, made, joined)


def _on_each(file: int, ranks: int, make: Callable[[int, int], C], body: Callable[[C], T]) -> list[T]:
    raised: list[BaseException] = []

    def alone(rank: int) -> T:
        collectives = make(file, rank)
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
        os.close(file)
