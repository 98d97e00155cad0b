"""Measured points: exact at themselves, linear between, flat below, proportional beyond."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.costs.interpolation import Axis

LINE = Axis.of([(4.0, 10.0), (8.0, 12.0), (16.0, 40.0)])

CASES = {
    "a point": (8, 12),
    "between two": (12, 26),
    "below the first": (1, 10),
    "beyond the last": (32, 80),
}


@pytest.mark.parametrize("case", CASES)
def test_one_axis(case: str) -> None:
    at, expected = CASES[case]
    assert LINE.at(at) == pytest.approx(expected)


def test_the_least_of_equal_coordinates_counts() -> None:
    assert Axis.of([(1.0, 5.0), (1.0, 3.0)]).at(1) == 3


def test_axes_may_have_points_of_their_own() -> None:
    """A grid without its largest corner: the inner axis of the outer's last point is extended in proportion."""
    ragged = Axis.of([(1.0, 1.0, 1.0), (1.0, 4.0, 4.0), (2.0, 1.0, 2.0)])
    assert ragged.at(2, 4) == pytest.approx(8)
    assert ragged.at(1.5, 4) == pytest.approx(6)


SIZES = st.floats(min_value=0, max_value=4096)


@given(n=SIZES, k=SIZES)
def test_sums_of_products_are_met_exactly_inside_the_grid(n: float, k: float) -> None:
    """Launch + bytes + operations: what a linear's time is made of at a given number of rows."""

    def time(n: float, k: float) -> float:
        return 3 + 0.5 * n + 0.25 * k + 0.125 * n * k

    grid = Axis.of([(n, k, time(n, k)) for n in (0.0, 7.0, 1024.0, 4096.0) for k in (0.0, 100.0, 4096.0)])
    assert grid.at(n, k) == pytest.approx(time(n, k))


@given(points=st.dictionaries(st.integers(1, 1000), st.floats(0.1, 100), min_size=1), at=st.integers(1, 1000))
def test_never_outside_the_measured_range_between_the_ends(points: dict[int, float], at: int) -> None:
    axis = Axis.of([(float(x), y) for x, y in points.items()])
    if at <= max(points):
        assert min(points.values()) - 1e-9 <= axis.at(at) <= max(points.values()) + 1e-9


@given(points=st.dictionaries(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.floats(0.1, 100), min_size=1))
def test_the_measured_points_can_be_read_again(points: dict[tuple[int, int], float]) -> None:
    axis = Axis.of([(float(x), float(y), value) for (x, y), value in points.items()])
    assert dict(axis.leaves()) == points
    assert all(axis.at(*at) == value for at, value in points.items())


def test_a_point_left_out_is_read_from_its_neighbours() -> None:
    assert LINE.without(1).at(8) == pytest.approx(20)


@given(points=st.dictionaries(st.tuples(st.integers(1, 3), st.integers(1, 99)), st.floats(0.1, 100), min_size=1))
def test_rising_values_are_the_largest_that_rise_and_are_no_larger_than_measured(
    points: dict[tuple[int, int], float],
) -> None:
    rising = dict(Axis.of([(float(x), float(y), value) for (x, y), value in points.items()]).rising().leaves())
    for (x, y), value in rising.items():
        assert value == min(other for (a, b), other in points.items() if a == x and b >= y)
