"""Routing over replicas: by planned capacity and live load."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.gateway.routing.routing import KV_NEARLY_FULL, ReplicaLoad, choose

loads = st.lists(
    st.builds(
        ReplicaLoad,
        replica=st.integers(0, 5),
        tokens_per_second=st.floats(0.0, 1e4),
        outstanding=st.integers(0, 100),
        kv_usage=st.floats(0.0, 1.0),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda load: load.replica,
)


def test_nothing_to_choose_from() -> None:
    assert choose([]) is None


@settings(deadline=None)  # the machine may be busy
@given(loads)
def test_one_is_chosen_whatever_the_order(replicas: list[ReplicaLoad]) -> None:
    chosen = choose(replicas)
    assert chosen in {load.replica for load in replicas}
    assert choose(reversed(replicas)) == chosen


@settings(deadline=None)  # the machine may be busy
@given(loads)
def test_full_replicas_come_last(replicas: list[ReplicaLoad]) -> None:
    free = {load.replica for load in replicas if load.kv_usage < KV_NEARLY_FULL}
    assert not free or choose(replicas) in free


def test_requests_spread_in_proportion_to_capacity() -> None:
    capacity = {0: 10.0, 1: 30.0}
    given_to: Counter[int] = Counter()
    for _ in range(40):
        replica = choose(ReplicaLoad(r, tps, given_to[r], 0.0) for r, tps in capacity.items())
        assert replica is not None
        given_to[replica] += 1
    assert given_to == {0: 10, 1: 30}
