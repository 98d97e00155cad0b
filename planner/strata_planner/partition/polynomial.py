"""Polynomials over a layer's symbols: what a strategy costs before anybody says how large the model is.

Used by the search, which compares costs for all sizes at once. Exact: coefficients are whole or fractions, exponents may be negative
(1/g). Knows nothing of layers beyond the names of the symbols and what holds of them (`is_never_negative`).

    n tokens of the step     d hidden size     q width of the queries (heads x head_dim)     k width of the keys, k <= q
    m width of the MLP       g devices of the group, at least 2
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, reduce
from math import prod
from operator import mul

SYMBOLS = ("n", "d", "q", "k", "m", "g")
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_ONE = (0,) * len(SYMBOLS)

Exponents = tuple[int, ...]
Number = int | Fraction


@dataclass(frozen=True)
class Polynomial:
    """`terms`: exponents of the symbols -> coefficient, sorted and without zeros, so that equal polynomials are equal."""

    terms: tuple[tuple[Exponents, Number], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __add__(self, other: "Polynomial") -> "Polynomial":
        return _sum(self, other)

    def __sub__(self, other: "Polynomial") -> "Polynomial":
        return _sum(self, other * -1)

    def __mul__(self, other: "Polynomial | Number") -> "Polynomial":
        factors = other.terms if isinstance(other, Polynomial) else ((_ONE, other),)
        return _collect(
            (tuple(map(sum, zip(left, right, strict=True))), a * b) for left, a in self.terms for right, b in factors
        )

    __rmul__ = __mul__

    def over_g(self) -> "Polynomial":
        """Divided by the number of devices."""
        return self * Polynomial((((0, 0, 0, 0, 0, -1), 1),))

    def at(self, **values: "Polynomial | Number") -> "Polynomial":
        """With symbols replaced. A polynomial can only replace a symbol that nothing is divided by."""
        found = Polynomial()
        for exponents, coefficient in self.terms:
            left = tuple(0 if name in values else power for name, power in zip(SYMBOLS, exponents, strict=True))
            factors = [
                _power(values[name], power)
                for name, power in zip(SYMBOLS, exponents, strict=True)
                if power and name in values
            ]
            found += reduce(mul, factors, Polynomial(((left, coefficient),)))
        return found

    def value(self, **values: float) -> float:
        """A number. KeyError for a symbol that has no value."""
        return sum(
            float(coefficient)
            * prod(values[name] ** power for name, power in zip(SYMBOLS, exponents, strict=True) if power)
            for exponents, coefficient in self.terms
        )

    def __str__(self) -> str:
        return " + ".join(_term(*term) for term in reversed(self.terms)).replace("+ -", "- ") or "0"


def symbol(name: str) -> Polynomial:
    return Polynomial(((tuple(int(each == name) for each in SYMBOLS), 1),))


def constant(value: Number) -> Polynomial:
    return Polynomial() if not value else Polynomial(((_ONE, value),))


@cache
def is_never_negative(polynomial: Polynomial) -> bool:
    """Whether it is at least 0 for all n, d, m, k > 0, q >= k and g >= 2.

    Denominators are cleared, then g = 2 + g' and q = k + q' are put in: where no coefficient is negative, it is not. A yes is
    certain. A no may be wrong of terms that make up for each other (n² - 2 n + 1); then two strategies stay side by side.
    """
    if all(coefficient > 0 for _, coefficient in polynomial.terms):
        return True
    lowest = min((exponents[-1] for exponents, _ in polynomial.terms), default=0)
    whole = polynomial * Polynomial((((0, 0, 0, 0, 0, -lowest), 1),))
    shifted = whole.at(g=symbol("g") + constant(2), q=symbol("q") + symbol("k"))
    return all(coefficient > 0 for _, coefficient in shifted.terms)


@cache
def _sum(left: Polynomial, right: Polynomial) -> Polynomial:
    """Remembered: a search adds the same few costs over and over."""
    return _collect(iter((*left.terms, *right.terms)))


def _collect(terms: Iterator[tuple[Exponents, Number]]) -> Polynomial:
    found: dict[Exponents, Number] = {}
    for exponents, coefficient in terms:
        found[exponents] = found.get(exponents, 0) + coefficient
    return Polynomial(tuple(sorted((exponents, value) for exponents, value in found.items() if value)))


def _power(value: Polynomial | Number, power: int) -> Polynomial:
    if not isinstance(value, Polynomial):
        return constant(value**power if power > 0 else Fraction(value) ** power)
    if power < 0:
        raise ValueError(f"{value} cannot replace a symbol of exponent {power}; clear the denominator first")
    return reduce(mul, [value] * power, constant(1))


def _term(exponents: Exponents, coefficient: Number) -> str:
    above = _product(exponents, lambda power: power)
    below = _product(exponents, lambda power: -power)
    number = f"{coefficient}" if abs(coefficient) != 1 or not above else "-" * (coefficient < 0)
    return " ".join(part for part in (number, above) if part) + (f"/{below}" if below else "")


def _product(exponents: Exponents, sign: Callable[[int], int]) -> str:
    powers = ((name, sign(power)) for name, power in zip(SYMBOLS, exponents, strict=True))
    return " ".join(
        name + (str(power).translate(_SUPERSCRIPTS) if power > 1 else "") for name, power in powers if power > 0
    )
