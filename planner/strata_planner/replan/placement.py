"""One candidate's units on its stages, unit by unit: which lie where at how many bits, and what a small change would give.

Called by `decision`. The solver's counts leave open which of several equal layers get which bits; here that is decided by what
devices already hold.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strata_planner.contract.formats import FormatName
from strata_planner.replan.holdings import Held, is_there
from strata_planner.search.exact.candidates import LayerRun
from strata_planner.search.exact.problem import Counts

Bits = tuple[int, ...]
Formats = Mapping[int, FormatName]  # of a stage: bits -> how its devices store them


@dataclass(frozen=True)
class Units:
    """The model's units in order: the run of each, and its layers."""

    run: tuple[int, ...]
    layers: tuple[range, ...]

    @classmethod
    def of(cls, runs: Sequence[LayerRun]) -> "Units":
        numbers, layers = [], []
        for r, run in enumerate(runs):
            for unit in range(run.units):
                first = run.first + unit * run.layers_per_unit
                numbers.append(r)
                layers.append(range(first, first + run.layers_per_unit))
        return cls(tuple(numbers), tuple(layers))


@dataclass(frozen=True)
class Placement:
    """`stages[j]`: bits of each unit of stage j, in order; stages follow each other without a gap."""

    stages: tuple[Bits, ...]

    def firsts(self) -> list[int]:
        """The first unit of every stage."""
        found, at = [], 0
        for bits in self.stages:
            found.append(at)
            at += len(bits)
        return found

    def counts(self, units: Units) -> Counts:
        counter: Counter[tuple[int, int, int]] = Counter()
        for j, (first, bits) in enumerate(zip(self.firsts(), self.stages, strict=True)):
            counter.update((units.run[first + k], j, each) for k, each in enumerate(bits))
        return dict(counter)

    def layer_bits(self, units: Units) -> tuple[Bits, ...]:
        """Bits of each layer of every stage."""
        return tuple(
            tuple(each for k, each in enumerate(mine) for _ in units.layers[first + k])
            for first, mine in zip(self.firsts(), self.stages, strict=True)
        )

    def held(self, j: int, units: Units, formats: Formats, *, tables: tuple[bool, bool]) -> Held:
        """What stage j is to hold, on devices that store bits in `formats`."""
        first = self.firsts()[j]
        layers = {layer: formats[bits] for k, bits in enumerate(self.stages[j]) for layer in units.layers[first + k]}
        return Held(layers, tables)

    def with_stage(self, j: int, bits: Bits) -> "Placement":
        return Placement((*self.stages[:j], bits, *self.stages[j + 1 :]))

    def neighbours(self, allowed: Sequence[Sequence[int]]) -> Iterator["Placement"]:
        """One unit handed over a border, at any bits its new stage has; or at other bits where it is."""
        for j in range(len(self.stages) - 1):
            left, right = self.stages[j], self.stages[j + 1]
            if len(left) > 1:
                for bits in allowed[j + 1]:
                    yield self.with_stage(j, left[:-1]).with_stage(j + 1, (bits, *right))
            if len(right) > 1:
                for bits in allowed[j]:
                    yield self.with_stage(j, (*left, bits)).with_stage(j + 1, right[1:])
        for j, mine in enumerate(self.stages):
            for k, now in enumerate(mine):
                for bits in allowed[j]:
                    if bits != now:
                        yield self.with_stage(j, (*mine[:k], bits, *mine[k + 1 :]))


def placement_of(counts: Counts, stages: int) -> Placement:
    """A placement with these counts, the finest units of a run first on each stage."""
    placed = []
    for j in range(stages):
        mine = sorted((r, -bits) for (r, place, bits), count in counts.items() if place == j for _ in range(count))
        placed.append(tuple(-bits for _, bits in mine))
    return Placement(tuple(placed))


def arranged(placement: Placement, j: int, units: Units, formats: Formats, held: Held) -> Placement:
    """Stage j's bits dealt out among units that nothing tells apart, so that a device that holds `held` reads the least."""
    first, mine = placement.firsts()[j], placement.stages[j]
    dealt = list(mine)
    for run in {units.run[first + k] for k in range(len(mine))}:
        spots = [k for k in range(len(mine)) if units.run[first + k] == run]
        left = Counter(mine[k] for k in spots)
        for k in sorted(spots, key=lambda k: _choices(first + k, units, formats, held, left)):
            ready = [bits for bits in left if left[bits] and _ready(first + k, formats[bits], units, held)]
            exact = [bits for bits in ready if _exact(first + k, formats[bits], units, held)]
            dealt[k] = max(exact or ready or [bits for bits in left if left[bits]])
            left[dealt[k]] -= 1
    return placement.with_stage(j, tuple(dealt))


def _choices(unit: int, units: Units, formats: Formats, held: Held, left: Counter[int]) -> tuple[bool, int]:
    """Units that fit only one way are dealt first, those that fit nowhere last."""
    ready = sum(_ready(unit, formats[bits], units, held) for bits in left)
    return ready == 0, ready


def _ready(unit: int, name: FormatName, units: Units, held: Held) -> bool:
    return all(is_there(held, layer, name) for layer in units.layers[unit])


def _exact(unit: int, name: FormatName, units: Units, held: Held) -> bool:
    return all(held.layers.get(layer) == name for layer in units.layers[unit])
