"""The regression: what no coefficient below zero can do better, and hats as straight lines between knots."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.costs.regression import hats, nonnegative, relative_fit

SEEDS = st.integers(0, 10_000)


@settings(deadline=None)  # a busy machine is no failure
@given(seed=SEEDS, rows=st.integers(1, 12), terms=st.integers(1, 8))
def test_no_coefficient_is_negative_and_none_could_be_moved_to_gain(seed: int, rows: int, terms: int) -> None:
    random = np.random.default_rng(seed)
    matrix, target = random.standard_normal((rows, terms)), random.standard_normal(rows)
    found = nonnegative(matrix, target)
    gradient = matrix.T @ (matrix @ found - target)
    assert np.all(found >= 0)
    assert np.all(gradient >= -1e-6)  # growing any does not help
    assert np.all(np.abs(gradient[found > 0]) <= 1e-6)  # nor does shrinking


@settings(deadline=None)  # a busy machine is no failure
@given(seed=SEEDS)
def test_what_is_a_sum_of_the_terms_is_found_again(seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix, truth = random.random((20, 5)) + 0.1, random.random(5) * (random.random(5) > 0.3) + 1e-3
    assert relative_fit(matrix, matrix @ truth) == pytest.approx(truth, rel=1e-5, abs=1e-7)


def test_errors_are_relative() -> None:
    """One constant for 1 and 3 seconds: the least relative error lies nearer to the short one."""
    assert relative_fit(np.ones((2, 1)), np.array([1.0, 3.0]))[0] == pytest.approx((1 + 1 / 3) / (1 + 1 / 9))


@settings(deadline=None)  # a busy machine is no failure
@given(values=st.lists(st.floats(-5, 20), min_size=1, max_size=6), slope=st.floats(-3, 3), start=st.floats(-3, 3))
def test_hats_are_exact_on_lines_and_beyond_the_ends(values: list[float], slope: float, start: float) -> None:
    knots = np.array([0.0, 1.0, 4.0, 10.0])
    weights = hats(np.array(values), knots)
    assert weights.sum(axis=1) == pytest.approx(np.ones(len(values)))
    assert weights @ (start + slope * knots) == pytest.approx(start + slope * np.array(values), abs=1e-9)


def test_a_single_knot_is_a_constant() -> None:
    assert hats(np.array([1.0, 7.0]), np.array([3.0])).tolist() == [[1.0], [1.0]]
