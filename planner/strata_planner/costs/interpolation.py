"""Between and beyond measured points: a tree of sorted axes with seconds at its leaves.

Used by the sources that look tables up (`operators`, `tables`). Knows no operators and no units.

Between two points of an axis the value is linear: times are sums of launching, bytes and operations, each linear in every
size of a table. Below an axis's first point the first one holds (a smaller kernel is not known to be faster); beyond its
last the value grows in proportion (the last point is bound by its work, not by its launch).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Axis:
    """Points of one axis in rising order, each with a value or with the next axis."""

    points: tuple[float, ...]
    below: "tuple[Axis | float, ...]"

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> Self:
        """Rows of coordinates with the value last, all equally long, at least one. The least of equal coordinates' values."""
        groups: dict[float, list[Sequence[float]]] = {}
        for row in rows:
            groups.setdefault(row[0], []).append(row[1:])
        points = tuple(sorted(groups))
        if len(groups[points[0]][0]) == 1:
            return cls(points, tuple(min(rest[0] for rest in groups[point]) for point in points))
        return cls(points, tuple(cls.of(groups[point]) for point in points))

    def at(self, *coordinates: float) -> float:
        """One coordinate per axis, none negative."""
        first, *rest = coordinates
        place = bisect_left(self.points, first)
        if place == len(self.points):
            return self._value(place - 1, rest) * first / self.points[-1]
        if place == 0 or self.points[place] == first:
            return self._value(place, rest)
        low, high = self.points[place - 1], self.points[place]
        share = (first - low) / (high - low)
        return (1 - share) * self._value(place - 1, rest) + share * self._value(place, rest)

    def leaves(self) -> Iterator[tuple[tuple[float, ...], float]]:
        """Every measured point: its coordinates and its value."""
        for point, found in zip(self.points, self.below, strict=True):
            if isinstance(found, Axis):
                yield from (((point, *rest), value) for rest, value in found.leaves())
            else:
                yield (point,), found

    def rising(self) -> Self:
        """With each innermost value lowered to the least of those at larger points: what takes longer than a larger one was measured
        with a worse kernel, or badly, and could be done as the larger one is.
        """
        below: list[Axis | float] = []
        least = float("inf")
        for found in reversed(self.below):
            if isinstance(found, Axis):
                below.append(found.rising())
            else:
                least = min(least, found)
                below.append(least)
        return type(self)(self.points, tuple(reversed(below)))

    def without(self, place: int) -> "Axis":
        """The axis less one of its points, of which another must be left: for judging what interpolation misses."""
        return Axis(self.points[:place] + self.points[place + 1 :], self.below[:place] + self.below[place + 1 :])

    def _value(self, place: int, rest: Sequence[float]) -> float:
        found = self.below[place]
        return found.at(*rest) if isinstance(found, Axis) else found
