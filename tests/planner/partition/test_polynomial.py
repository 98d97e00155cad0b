"""Polynomials compute like the numbers that they stand for."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.partition.polynomial import SYMBOLS, Polynomial, constant, is_never_negative, symbol

sizes = st.fixed_dictionaries({name: st.integers(1, 50) for name in SYMBOLS})


@st.composite
def polynomials(draw: st.DrawFn) -> Polynomial:
    terms = draw(st.lists(st.tuples(st.integers(-5, 5), *[st.integers(0, 2)] * 5, st.integers(-2, 2)), max_size=4))
    total = constant(0)
    for coefficient, *powers in terms:
        total += Polynomial(((tuple(powers), coefficient),)) if coefficient else constant(0)
    return total


def _value(polynomial: Polynomial, at: dict[str, int]) -> Fraction:
    return next((Fraction(value) for _, value in polynomial.at(**at).terms), Fraction(0))


@given(polynomials(), polynomials(), sizes)
def test_values_add_and_multiply_as_numbers_do(left: Polynomial, right: Polynomial, at: dict[str, int]) -> None:
    assert _value(left + right, at) == _value(left, at) + _value(right, at)
    assert _value(left - right, at) == _value(left, at) - _value(right, at)
    assert _value(left * right, at) == _value(left, at) * _value(right, at)
    assert left.value(**at) == pytest.approx(float(_value(left, at)))
    assert left + right - right == left


@given(polynomials(), sizes, st.integers(0, 40), st.integers(2, 40))
def test_what_is_said_never_to_be_negative_is_not(
    polynomial: Polynomial, at: dict[str, int], wider: int, devices: int
) -> None:
    if is_never_negative(polynomial):
        assert _value(polynomial, at | {"q": at["k"] + wider, "g": devices}) >= 0


@pytest.mark.parametrize(
    ("polynomial", "never"),
    [
        (symbol("n") - symbol("n").over_g(), True),  # 1 - 1/g
        (symbol("q") - symbol("k"), True),  # keys are not wider than queries
        (symbol("n") * symbol("d") - symbol("m"), False),
        (constant(1) - symbol("n").over_g(), False),
        (symbol("n").over_g() - 2 * symbol("n").over_g().over_g(), True),  # g >= 2
    ],
)
def test_named_comparisons(polynomial: Polynomial, *, never: bool) -> None:
    assert is_never_negative(polynomial) is never


def test_it_reads_like_the_paper() -> None:
    n, d = symbol("n"), symbol("d")
    assert str(2 * n * d * d + (22 * n * d * d).over_g()) == "2 n d² + 22 n d²/g"
    assert str(constant(0)) == "0"


def test_a_polynomial_cannot_stand_below_a_fraction_line() -> None:
    with pytest.raises(ValueError, match="clear the denominator"):
        symbol("n").over_g().at(g=symbol("n"))
