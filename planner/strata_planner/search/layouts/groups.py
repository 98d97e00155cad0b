"""Ways to part the devices of a composition into the groups of a pipeline's stages.

Called by `pipelines`. Groups of equal devices (HexGen, ICML 2024, section 3.3: one type, one machine), and groups of a node's unlike devices, which have
unlike shares of their layers. Knows no costs: which shares are worth a try it is told.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from strata_planner.contract.devices import is_processor
from strata_planner.contract.shares import Shares
from strata_planner.search.layouts.pool import Composition, DeviceClass, Pool

MOST_OPTIONS = 64  # splits of one composition; four classes have more


class Group(NamedTuple):
    """Of one stage: the class of each of its devices, and their shares where these are unlike."""

    classes: tuple[int, ...]
    shares: Shares = ()

    def renamed(self, names: Mapping[int, int]) -> "Group":
        return Group(tuple(names[c] for c in self.classes), self.shares)


Groups = tuple[Group, ...]  # of each stage, in order
SharesOf = Callable[[tuple[int, ...]], Sequence[Shares]]  # worth a try, of devices of such classes in order


def alike(c: int, degree: int, shares: Shares = ()) -> Group:
    return Group((c,) * degree, shares)


@dataclass(frozen=True)
class Grouping:
    """`degrees`: of groups of equal devices, with their shares where heads come out unevenly; `unlike`: of others; both falling."""

    pool: Pool
    degrees: Mapping[int, Shares]
    unlike: tuple[int, ...]
    shares_of: SharesOf

    def options(self, composition: Composition) -> Iterator[Groups]:
        """Every split of each class into groups of one degree and its rest by smaller ones, in the nodes' order; where there are
        many, only those of all classes at the same degree. Then those with groups of unlike devices.
        """
        way = self.pool.cycle(self.pool.nodes_of(composition))
        held = [c for node in way for c, count in enumerate(composition) if count and self.pool.classes[c].node == node]
        yield from self._of_equal(held, composition)
        if self.unlike:
            yield from self._of_unlike(way, held, composition)

    def _of_equal(self, held: Sequence[int], composition: Composition) -> Iterator[Groups]:
        ways = [splits(composition[c], tuple(self.degrees)) for c in held]
        if not all(ways):  # devices that no wished degree parts
            return
        same = zip(*(_filled(way, len(self.degrees)) for way in ways), strict=True)
        for split in same if prod(map(len, ways)) > MOST_OPTIONS else product(*ways):
            yield self._alike(held, split)

    def _of_unlike(self, way: Sequence[str], held: Sequence[int], composition: Composition) -> Iterator[Groups]:
        """Every node's ways with every other's; where there are many, only those of all nodes in turn."""
        apart, mixed = [], []
        for node in way:
            own = {c: composition[c] for c in held if self.pool.classes[c].node == node}
            apart.append(self._apart(own))
            mixed.append(list(self._mixed(own)))
        if not any(mixed):
            return
        ways = [[*one, *other] for one, other in zip(apart, mixed, strict=True)]
        if not all(ways):
            return
        if prod(map(len, ways)) <= MOST_OPTIONS:
            for chosen in product(*(range(len(each)) for each in ways)):
                if any(at >= len(one) for at, one in zip(chosen, apart, strict=True)):
                    yield tuple(group for each, at in zip(ways, chosen, strict=True) for group in each[at])
            return
        for at in range(min(MOST_OPTIONS, max(map(len, mixed)))):
            chosen_ways = [
                many[min(at, len(many) - 1)] if many else one[0] for many, one in zip(mixed, apart, strict=True)
            ]
            yield tuple(group for each in chosen_ways for group in each)

    def _apart(self, own: Mapping[int, int]) -> list[Groups]:
        """A node's devices, so many of each class, without groups of unlike ones."""
        ways = [splits(count, tuple(self.degrees)) for count in own.values()]
        return [self._alike(own, split) for split in product(*ways)][:MOST_OPTIONS]

    def _alike(self, classes: Iterable[int], split: Sequence[Sequence[int]]) -> Groups:
        return tuple(
            alike(c, degree, self.degrees[degree]) for c, own in zip(classes, split, strict=True) for degree in own
        )

    def _mixed(self, own: Mapping[int, int]) -> Iterator[Groups]:
        """With as many groups of unlike devices as go: each of as many devices of each class, or of all that there are."""
        classes = [c for c in own if own[c]]
        if len(classes) < 2 or not self._may_share([self.pool.classes[c] for c in classes]):
            return
        for degree in self.unlike:
            each, left = divmod(degree, len(classes))
            if sum(own.values()) == degree:
                yield from self._with(own, own, 1)
            elif not left and each and (most := min(own.values()) // each):
                yield from self._with(own, dict.fromkeys(classes, each), most)

    def _with(self, own: Mapping[int, int], taken: Mapping[int, int], groups: int) -> Iterator[Groups]:
        """So many groups of these devices; the rest in the largest groups of equal ones."""
        rest = {c: count - groups * taken[c] for c, count in own.items()}
        alone = self._apart({c: count for c, count in rest.items() if count})
        if not alone:
            return
        devices = tuple(c for c, count in taken.items() for _ in range(count))
        for shares in self.shares_of(devices):
            ranked = sorted(range(len(devices)), key=lambda at: (-shares[at], at))
            one = Group(tuple(devices[at] for at in ranked), tuple(shares[at] for at in ranked))
            yield (one,) * groups + alone[0]

    @staticmethod
    def _may_share(classes: Sequence[DeviceClass]) -> bool:
        """Processors that one slot holds, or no processors."""
        types = {each.devices[0].type for each in classes}
        return len(types) == 1 or not any(map(is_processor, types))


def splits(count: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Ways to part equal devices into groups: for each largest degree as many as go, the rest by the next ones."""
    ways = []
    for place, largest in enumerate(degrees):
        left, way = count, []
        for degree in degrees[place:]:
            way += [degree] * (left // degree)
            left %= degree
        if left == 0 and largest <= count:
            ways.append(tuple(way))
    return ways


def _filled(ways: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The first again for each degree that is too large."""
    return [ways[0]] * (count - len(ways)) + ways
