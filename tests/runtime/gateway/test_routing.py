"""Routing over replicas: by planned capacity and live load."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.gateway.routing.prefixes import CHUNK_TOKENS, MOST_CHUNKS, Prefixes, chunks_of
from strata_runtime.gateway.routing.routing import KV_NEARLY_FULL, ReplicaLoad, choose

loads = st.lists(
    st.builds(
        ReplicaLoad,
        replica=st.integers(0, 5),
        tokens_per_second=st.floats(0.0, 1e4),
        outstanding=st.integers(0, 100),
        kv_usage=st.floats(0.0, 1.0),
        found=st.sampled_from([0.0, 0.0, 0.3, 0.5, 1.0]),
        whole=st.booleans(),
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
    free = {load.replica for load in replicas if load.whole and load.kv_usage < KV_NEARLY_FULL}
    assert not free or choose(replicas) in free


@settings(deadline=None)  # the machine may be busy
@given(loads)
def test_one_that_lost_a_stage_gets_nothing_while_another_is_whole(replicas: list[ReplicaLoad]) -> None:
    whole = [load for load in replicas if load.whole]
    assert choose(replicas) == choose(whole or replicas)


def test_requests_spread_in_proportion_to_capacity() -> None:
    capacity = {0: 10.0, 1: 30.0}
    given_to: Counter[int] = Counter()
    for _ in range(40):
        replica = choose(ReplicaLoad(r, tps, given_to[r], 0.0) for r, tps in capacity.items())
        assert replica is not None
        given_to[replica] += 1
    assert given_to == {0: 10, 1: 30}


WHOLE = {  # (outstanding, kv_usage, found, whole) of replicas of equal capacity -> the chosen one
    "the one that is whole": ([(0, 0.0, 0.0, False), (9, 0.5, 0.0, True)], 1),
    "be it full": ([(0, 0.0, 0.0, False), (9, 1.0, 0.0, True)], 1),
    "wherever its prefix is": ([(0, 0.0, 1.0, False), (9, 0.5, 0.0, True)], 1),
    "of two the less loaded": ([(0, 0.0, 0.0, False), (9, 0.5, 0.0, True), (8, 0.5, 0.0, True)], 2),
    "where none is it waits where least do": ([(2, 0.0, 0.0, False), (1, 0.0, 0.0, False)], 1),
    "the only one": ([(2, 0.0, 0.0, False)], 0),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_request_goes_to_a_replica_that_is_whole(case: str) -> None:
    loads, expected = WHOLE[case]
    assert choose(ReplicaLoad(number, 1.0, *load) for number, load in enumerate(loads)) == expected


ROUTED = {  # (outstanding, found) of two replicas of equal capacity -> the chosen one
    "where its prefix is": ([(0, 0.0), (3, 0.9)], 1),
    "a small part is not worth a longer queue": ([(0, 0.0), (3, 0.4)], 0),
    "unless that one is crowded": ([(2, 0.0), (20, 1.0)], 0),
    "a few more are no crowd": ([(0, 0.0), (8, 1.0)], 1),
    "nor are some of very many": ([(100, 0.0), (120, 1.0)], 1),
    "the least loaded of those that have it": ([(5, 1.0), (4, 1.0)], 1),
}


@pytest.mark.parametrize("case", ROUTED)
def test_a_request_goes_where_its_prefix_is_unless_load_says_otherwise(case: str) -> None:
    loads, expected = ROUTED[case]
    assert (
        choose(ReplicaLoad(r, 1.0, outstanding, 0.5, found) for r, (outstanding, found) in enumerate(loads)) == expected
    )


def test_a_replica_without_room_gets_no_request_for_its_prefix() -> None:
    assert choose([ReplicaLoad(0, 1.0, 0, 0.99, 1.0), ReplicaLoad(1, 1.0, 5, 0.5)]) == 1


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 3)), max_size=20),
    st.tuples(st.integers(0, 2), st.integers(0, 6)),
)
def test_what_is_found_is_the_longest_common_beginning(
    said: list[tuple[int, int, int]], asked: tuple[int, int]
) -> None:
    def prompt(kind: int, chunks: int) -> list[int]:
        """Kinds differ in their third chunk."""
        tokens = list(range(chunks * CHUNK_TOKENS + 5))
        return [token + kind if token >= 2 * CHUNK_TOKENS else token for token in tokens]

    prefixes = Prefixes()
    for kind, chunks, replica in said:
        prefixes.sent(chunks_of(prompt(kind, chunks)), replica)
    own_kind, own = asked
    expected: dict[int, int] = {}
    for kind, chunks, replica in said:
        common = min(own, chunks) if kind == own_kind else min(own, chunks, 2)
        if common:
            expected[replica] = max(expected.get(replica, 0), common)
    assert prefixes.found(chunks_of(prompt(own_kind, own))) == expected


def test_what_is_remembered_is_bounded() -> None:
    long = chunks_of(range(10 * MOST_CHUNKS * CHUNK_TOKENS))
    assert len(long) == MOST_CHUNKS
    prefixes = Prefixes(most=4)
    prefixes.sent(chunks_of(range(3 * CHUNK_TOKENS)), 0)
    prefixes.sent(chunks_of(range(7, 7 + 3 * CHUNK_TOKENS)), 1)
    assert prefixes.found(chunks_of(range(3 * CHUNK_TOKENS))) == {}, "its beginning was forgotten first"
    assert prefixes.found(chunks_of(range(7, 7 + 3 * CHUNK_TOKENS))) == {1: 3}


def test_other_salts_are_other_prefixes() -> None:
    prefixes = Prefixes()
    prefixes.sent(chunks_of(range(CHUNK_TOKENS), "a"), 0)
    assert prefixes.found(chunks_of(range(CHUNK_TOKENS), "b")) == {}
