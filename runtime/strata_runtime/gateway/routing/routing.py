"""Which replica gets the next request: a pure function of planned capacity, live load and prefixes.

Called by `dispatcher` with one `ReplicaLoad` per leader that answers. Weighted least outstanding requests: a replica
planned for twice the tokens per second carries twice the requests; one whose KV pages are nearly all in use only gets
what no other can take, since requests would queue there. One that has lost a stage gets what no whole one is there for. A request whose prefix a replica has computed goes there, unless
that one is far more loaded than the least (the rule of SGLang's router: cache-aware while loads are balanced).
"""

from collections.abc import Iterable
from dataclasses import dataclass

KV_NEARLY_FULL = 0.95
FOUND_ENOUGH = 0.5  # of a prompt: less is not worth a longer queue
# A replica is crowded with so many requests more, and so many times the load, of the least loaded.
MOST_AHEAD, MOST_TIMES = (
    8,
    1.5,
)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """`outstanding` counts requests that run or wait there; `kv_usage` is the share of its page budget in use.

    `found`: the share of the request's prompt, from its beginning, that the replica is likely to have computed. `whole`: none of its stages is
    lost; where one is, nothing gets through before the replica is mended.
    """

    replica: int
    tokens_per_second: float
    outstanding: int
    kv_usage: float
    found: float = 0.0
    whole: bool = True

    @property
    def nearly_full(self) -> bool:
        return self.kv_usage >= KV_NEARLY_FULL

    @property
    def capacity(self) -> float:
        return max(self.tokens_per_second, 1e-9)  # a plan without a prediction still routes

    @property
    def after(self) -> float:
        """The load with one more request."""
        return (self.outstanding + 1) / self.capacity


def choose(loads: Iterable[ReplicaLoad]) -> int | None:
    """Of those that are whole, or of all where none is, the replica with the request's prefix, or the one with the least load after taking it.

    None when there is none at all.
    """
    there = tuple(loads)
    whole = tuple(load for load in there if load.whole)
    listed = sorted(whole or there, key=lambda load: (load.nearly_full, load.after, load.replica))
    if not listed:
        return None
    least = listed[0]
    nearest = max(listed, key=lambda load: load.found)  # of equals the least loaded
    return nearest.replica if nearest.found >= FOUND_ENOUGH and not _is_crowded(nearest, least) else least.replica


def _is_crowded(load: ReplicaLoad, least: ReplicaLoad) -> bool:
    ahead = (load.after - least.after) * load.capacity
    return load.nearly_full > least.nearly_full or (ahead > MOST_AHEAD and load.after > MOST_TIMES * least.after)
