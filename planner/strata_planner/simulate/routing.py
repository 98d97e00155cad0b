"""Which replica a request goes to, as the gateway's coordinator decides it. Called once per arrival.

A second writing of the gateway's rule, since the planner and the runtime import nothing of each other; a test compares them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

KV_NEARLY_FULL = 0.95


class ReplicaLoad(NamedTuple):
    """`outstanding` requests run or wait there; `kv_usage` is the share of pages in use that its leader told last."""

    replica: int
    tokens_per_second: float
    outstanding: int
    kv_usage: float


Routing = Callable[[Sequence[ReplicaLoad]], int]


def least_loaded(loads: Sequence[ReplicaLoad]) -> int:
    """Weighted least outstanding requests; a replica whose pages are nearly all in use only if no other has room."""
    return min(loads, key=_cost).replica


def _cost(load: ReplicaLoad) -> tuple[bool, float, int]:
    capacity = max(load.tokens_per_second, 1e-9)
    return (load.kv_usage >= KV_NEARLY_FULL, (load.outstanding + 1) / capacity, load.replica)
