"""Which replica gets the next request: a pure function of planned capacity and live load.

Called by `dispatcher` with one `ReplicaLoad` per leader that answers. Weighted least outstanding requests: a replica
planned for twice the tokens per second carries twice the requests; one whose KV pages are nearly all in use only gets
what no other can take, since requests would queue there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

KV_NEARLY_FULL = 0.95


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """`outstanding` counts requests that run or wait there; `kv_usage` is the share of its page budget in use."""

    replica: int
    tokens_per_second: float
    outstanding: int
    kv_usage: float


def choose(loads: Iterable[ReplicaLoad]) -> int | None:
    """The replica with the least load after taking one more request; None when there is none."""
    best = min(loads, key=_cost, default=None)
    return None if best is None else best.replica


def _cost(load: ReplicaLoad) -> tuple[bool, float, int]:
    capacity = max(load.tokens_per_second, 1e-9)  # a plan without a prediction still routes
    return (load.kv_usage >= KV_NEARLY_FULL, (load.outstanding + 1) / capacity, load.replica)
