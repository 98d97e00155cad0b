"""Layers dealt as fractions: all of them, within what stages hold, the slowest as quick as can be."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.search.layouts.clusters import kmeans
from strata_planner.search.layouts.groups import splits
from strata_planner.search.layouts.stages import Floats
from strata_planner.search.layouts.water import capped, cheapest_first, level

STAGES = st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 40)), min_size=1, max_size=6)


@given(stages=STAGES, share=st.floats(0.3, 1.0))
def test_all_layers_are_dealt_within_what_stages_hold(stages: list[tuple[float, int]], share: float) -> None:
    seconds, most = (np.array([[each[i]] for each in stages], dtype=float) for i in (0, 1))
    layers = max(len(stages), int(share * most.sum()))
    packed = cheapest_first(seconds, most, layers)
    even = level(seconds, np.zeros_like(seconds), most, layers)
    assert np.isclose(packed.sum(), layers)
    assert np.isclose(even.sum(), layers)
    for dealt in (packed, even):
        assert (dealt <= most + 1e-9).all()
        assert (dealt >= np.minimum(1.0, most) - 1e-9).all()
    roomy = even < most - 1e-9
    at_least_one = even > 1 + 1e-9
    times = (even * seconds)[roomy & at_least_one]
    assert times.size == 0 or np.ptp(times) < 1e-6 * times.max()


@given(
    stages=st.lists(
        st.tuples(st.floats(0.1, 10), st.integers(1, 40), st.sampled_from([0.0, 1.0, 5.0, 60.0])),
        min_size=1,
        max_size=6,
    ),
    share=st.floats(0.1, 1.0),
)
def test_seconds_beside_layers_are_levelled_too(stages: list[tuple[float, int, float]], share: float) -> None:
    """Who has one layer and no more may take longer, who is full less; all others take equally long."""
    seconds, most, fixed = (np.array([[each[i]] for each in stages], dtype=float) for i in range(3))
    layers = max(len(stages), int(share * most.sum()))
    even = level(seconds, fixed, most, layers)
    assert np.isclose(even.sum(), layers)
    assert ((even >= 1 - 1e-9) & (even <= most + 1e-9)).all()
    times = even * seconds + fixed
    full, least = even > most - 1e-9, even < 1 + 1e-9
    between = times[~full & ~least]
    if between.size:
        assert np.ptp(between) <= 1e-6 * between.max()
        assert (times[full & ~least] <= between.max() * (1 + 1e-6)).all()
        assert (times[least & ~full] >= between.min() * (1 - 1e-6)).all()
    elif (full & ~least).any() and (least & ~full).any():
        assert times[full & ~least].max() <= times[least & ~full].min() * (1 + 1e-6)


@given(
    loads=st.lists(st.lists(st.tuples(st.floats(0.1, 10), st.integers(2, 40)), min_size=3, max_size=3), min_size=2),
    share=st.floats(0.2, 1.0),
)
def test_loads_are_levelled_each_by_itself(loads: list[list[tuple[float, int]]], share: float) -> None:
    seconds, most = (np.array([[stage[i] for stage in load] for load in loads], dtype=float).T for i in (0, 1))
    layers = max(3, int(share * most.sum(axis=0).min()))
    fixed = 5 * seconds[::-1]
    together = level(seconds, fixed, most, layers)
    for at in range(len(loads)):
        one = (each[:, at : at + 1] for each in (seconds, fixed, most))
        assert np.allclose(together[:, at : at + 1], level(*one, layers))


@given(stages=STAGES, share=st.floats(0.3, 1.0), parts=st.integers(1, 6))
def test_between_the_two_a_round_is_no_longer_than_with_either(
    stages: list[tuple[float, int]], share: float, parts: int
) -> None:
    seconds, most = (np.array([[each[i]] for each in stages], dtype=float) for i in (0, 1))
    fixed = np.zeros_like(seconds)
    layers = max(len(stages), int(share * most.sum()))

    def of_a_round(dealt: Floats) -> float:
        times = dealt * seconds
        return max(parts * float(times.max()), float(times.sum()))

    dealt = capped(seconds, fixed, most, layers, np.array([parts]))
    assert np.isclose(dealt.sum(), layers)
    assert (dealt <= most + 1e-9).all()
    either = min(of_a_round(level(seconds, fixed, most, layers)), of_a_round(cheapest_first(seconds, most, layers)))
    assert of_a_round(dealt) <= either * 1.02  # the cap is halved eight times


@given(count=st.integers(1, 16))
def test_splits_use_every_device_once(count: int) -> None:
    ways = splits(count, (8, 4, 2, 1))
    assert all(sum(way) == count for way in ways)
    assert len(set(ways)) == len(ways)
    assert (1,) * count in ways


def test_kmeans_finds_what_lies_apart() -> None:
    points = np.array([[0.0, 0.0], [0.1, 0.0], [9.0, 9.0], [9.0, 9.1]])
    labels, inertia = kmeans(points, 2, seed=1)
    assert labels[0] == labels[1] != labels[2] == labels[3]
    assert inertia < 0.1
