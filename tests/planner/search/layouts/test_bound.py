"""The bound: above every layout that is dealt at random, no lower with more devices or more sequences."""

import dataclasses
import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.errors import InfeasibleError
from strata_planner.question.cluster import LinkRate, Node
from strata_planner.question.request import PlanRequest
from strata_planner.search.layouts.bound import _sizes, most_tokens_per_second
from strata_planner.search.layouts.pool import Pool
from strata_planner.search.layouts.search import laid
from tests.laws import share
from tests.planner.search.layouts.layouts import a_device, a_pool, a_pool_request


def with_sequences(request: PlanRequest, count: int) -> PlanRequest:
    return dataclasses.replace(request, workload=msgspec.structs.replace(request.workload, concurrency=count))


def dealt(pool: Pool, draw: random.Random) -> tuple[tuple[int, ...], ...]:
    """Every device to one of a few replicas."""
    replicas = draw.randint(1, 4)
    genome = [[0] * len(pool.whole) for _ in range(replicas)]
    for c, count in enumerate(pool.whole):
        for _ in range(count):
            genome[draw.randrange(replicas)][c] += 1
    return tuple(tuple(each) for each in genome if any(each))


@settings(max_examples=share(40, 16), deadline=None)
@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda each: sum(each) > 1),
    sequences=st.integers(1, 40),
    seed=st.integers(0, 1000),
    latency=st.sampled_from((0.01, 1.0, 30.0)),
)
def test_no_layout_passes_it(counts: list[int], sequences: int, seed: int, latency: float) -> None:
    cluster = a_pool(**dict(zip("abc", counts, strict=False)))
    slow = LinkRate(gbps=1, latency_ms=latency)
    cluster = msgspec.structs.replace(cluster, default_link=slow, intra_node=slow)
    request = with_sequences(a_pool_request(cluster, theta=0.0, allowed_bits=(4, 16)), sequences)
    try:
        layout = laid(request, dealt(Pool(cluster), random.Random(seed)))
    except InfeasibleError:
        return
    assert sum(each.concurrency for each in layout.replicas) <= sequences
    assert layout.tokens_per_second <= most_tokens_per_second(request) * (1 + 1e-9)


def test_a_group_is_as_many_devices_as_it_has() -> None:
    """Two devices that share a layer do it no quicker than each half of the layers: with groups the bound is hardly above that without."""
    request = with_sequences(a_pool_request(a_pool(a=4, b=4), theta=0.0), 64)
    alone, groups = (
        most_tokens_per_second(dataclasses.replace(request, tensor_parallel=degrees)) for degrees in ((1,), (1, 2, 4))
    )
    assert alone <= groups <= 1.1 * alone


@given(sequences=st.integers(1, 100), more=st.integers(1, 100))
@settings(max_examples=share(20, 8), deadline=None)
def test_more_to_work_with_never_lowers_it(sequences: int, more: int) -> None:
    small, large = (a_pool_request(a_pool(a=4, b=count), theta=0.0) for count in (2, 3))
    base = most_tokens_per_second(with_sequences(small, sequences))
    # Ranges of micro-batches are cut anew where the largest changes, by a step at most.
    assert most_tokens_per_second(with_sequences(small, sequences + more)) >= base / 1.04
    assert most_tokens_per_second(with_sequences(large, sequences)) >= base * (1 - 1e-9)


def test_hops_and_the_memory_of_kv_lower_it() -> None:
    """Where a device alone holds the model no hop is needed, and none counts."""
    cluster = a_pool(a=4)
    near, far = (
        msgspec.structs.replace(cluster, intra_node=LinkRate(gbps=100, latency_ms=latency)) for latency in (0.01, 30.0)
    )
    few = with_sequences(a_pool_request(near, theta=0.0, tensor_parallel=(1,)), 4)
    bounds = [most_tokens_per_second(dataclasses.replace(few, cluster=each)) for each in (near, far)]
    assert bounds[1] < 0.5 * bounds[0]
    alone = [most_tokens_per_second(dataclasses.replace(few, cluster=each, allowed_bits=(4,))) for each in (near, far)]
    assert alone[0] == alone[1]
    many = with_sequences(a_pool_request(near, theta=0.0), 10_000)
    tight, roomy = (
        msgspec.structs.replace(cluster, nodes=(Node("a", (a_device(4, memory_mib=memory),)),))
        for memory in (1.2, 64.0)
    )
    with_tight, with_room = (most_tokens_per_second(dataclasses.replace(many, cluster=each)) for each in (tight, roomy))
    assert with_tight < 0.99 * with_room


def test_longer_sequences_allowed_do_not_change_it() -> None:
    request = a_pool_request(a_pool(a=4), theta=0.0)
    shorter = dataclasses.replace(request, max_model_len=request.workload.sequence_tokens)
    assert most_tokens_per_second(request) == most_tokens_per_second(shorter)


@given(most=st.integers(1, 5000))
def test_every_micro_batch_lies_in_one_range(most: int) -> None:
    ranges = _sizes(most)
    assert [low for low, _ in ranges] == [1, *(high + 1 for _, high in ranges[:-1])]
    assert ranges[-1][1] == most
