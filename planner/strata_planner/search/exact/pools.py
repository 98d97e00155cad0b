"""Pools: which devices form a pipeline, their order left open. All orders of a pool are paths of one lattice.

Called by `search`. A state of the lattice is how many devices of each class are used, the first and the last of them, which
is all that memory, seconds and hops of the next stage depend on. Where a fleet has too many pools, each order is a pool of
its own.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import numpy as np

from strata_planner.question.cluster import Accelerator, DeviceGroup
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.lattice import Floats, Lattice, Level
from strata_planner.search.exact.orders import Fleet, Order, orders, picked
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.problem import StageCosts

_MOST_STEPS = 6000  # of a lattice; beyond, each order is a pool


State = tuple[int, int, tuple[int, ...]]  # class of the first and the last stage, devices used of each class


@dataclass(frozen=True)
class _Step:
    source: int
    target: int
    device: int  # class
    previous: int  # class of the stage before, -1: none
    first: int  # class of the first stage


@dataclass(frozen=True, eq=False)
class Pool:
    """`used[c]`: devices of class c. `sequence`: their order, where it is given."""

    fleet: Fleet
    used: tuple[int, ...]
    sequence: tuple[int, ...] | None = None

    @property
    def stages(self) -> int:
        return sum(self.used)

    @property
    def usable_bytes(self) -> int:
        return sum(
            count * members[0].usable_bytes for count, members in zip(self.used, self.fleet.devices, strict=True)
        )

    @property
    def orders(self) -> int:
        """How many orders are paths of the lattice."""
        if self.sequence is not None:
            return 1
        return math.factorial(self.stages) // math.prod(math.factorial(count) for count in self.used)

    def order(self, steps: Sequence[int]) -> Order:
        """Of a path: its step at each level."""
        return picked(self.fleet, [self._levels[number][step].device for number, step in enumerate(steps)])

    def steps_of(self, classes: Sequence[int]) -> list[int]:
        """The path of an order that is given by device classes."""
        state, found = 0, []
        for steps, device in zip(self._levels, classes, strict=True):
            at = next(i for i, step in enumerate(steps) if (step.source, step.device) == (state, device))
            found.append(at)
            state = steps[at].target
        return found

    def lattice(self, prices: "Prices", pair: Pair, penalty: Floats) -> Lattice:
        """With the costs of a pair of micro-batches."""
        number = {kind: i for i, kind in enumerate(self._kinds)}
        present = [c for c, count in enumerate(self.used) if count]
        levels = []
        for place, steps in enumerate(self._levels):
            kind_of = [number[step.device, place == 0, place == self.stages - 1] for step in steps]
            hops = [self._hops(prices, pair, step, place) for step in steps]
            levels.append(
                Level(
                    np.array([step.source for step in steps]),
                    np.array([step.target for step in steps]),
                    np.array(kind_of),
                    np.array([[sum(each) for each in zip(*of_step, strict=True)] for of_step in hops]),
                    np.array([[max(each) for each in zip(*of_step, strict=True)] for of_step in hops]),
                )
            )
        return Lattice(
            bits=prices.pricer.request.bits,
            penalty=penalty,
            kinds=tuple(prices.stage(device, pair, first, head) for device, first, head in self._kinds),
            group=np.array([present.index(device) for device, _, _ in self._kinds]),
            members=np.array([self.used[c] for c in present]),
            levels=tuple(levels),
            weights=prices.pricer.weights(pair),
        )

    def _hops(self, prices: "Prices", pair: Pair, step: _Step, place: int) -> list[tuple[float, float]]:
        """Into the stage, and back to the first where it is the last."""
        found = [(0.0, 0.0)]
        if place:
            found.append(prices.hop(step.previous, step.device, pair, False))
        if place and place == self.stages - 1:
            found.append(prices.hop(step.device, step.first, pair, True))
        return found

    @cached_property
    def _kinds(self) -> list[tuple[int, bool, bool]]:
        last = self.stages - 1
        return list(
            dict.fromkeys((step.device, at == 0, at == last) for at, steps in enumerate(self._levels) for step in steps)
        )

    @cached_property
    def _levels(self) -> list[list[_Step]]:
        """Steps of each level, sorted by target."""
        states: list[State] = [(-1, -1, (0,) * len(self.used))]
        levels = []
        for place in range(self.stages):
            reached: dict[State, int] = {}
            steps = []
            for source, (first, previous, used) in enumerate(states):
                for c in self._next(used, place):
                    now = tuple(count + (c == i) for i, count in enumerate(used))
                    state: State = (-1, -1, ()) if place == self.stages - 1 else (first if place else c, c, now)
                    steps.append(_Step(source, reached.setdefault(state, len(reached)), c, previous, first))
            levels.append(sorted(steps, key=lambda step: step.target))
            states = list(reached)
        return levels

    def _next(self, used: tuple[int, ...], place: int) -> list[int]:
        if self.sequence is not None:
            return [self.sequence[place]]
        return [c for c, count in enumerate(self.used) if used[c] < count]


class Prices:
    """Costs of stages and hops by device class, each computed once."""

    def __init__(self, pricer: Pricer, fleet: Fleet) -> None:
        self.pricer = pricer
        self._fleet = fleet
        self.stage = cache(self._stage)
        self.hop = cache(self._hop)

    def _stage(self, device: int, pair: Pair, first: bool, head: bool) -> StageCosts:  # noqa: FBT001  a cache's key
        return self.pricer.stage(self._group(device), pair, first=first, head=head)

    def _hop(self, source: int, target: int, pair: Pair, back: bool) -> tuple[float, float]:  # noqa: FBT001
        return self.pricer.hop(self._group(source), self._group(target, index=1), pair, back=back)

    def _group(self, device: int, index: int = 0) -> DeviceGroup:
        members = self._fleet.devices[device]
        return DeviceGroup((members[min(index, len(members) - 1)],))


def pools(fleet: Fleet, lengths: Sequence[int]) -> Iterator[Pool]:
    """Every different pool of each length in turn, or every order where there are too many pools."""
    classes = len(fleet.devices)
    if math.prod(len(members) + 1 for members in fleet.devices) * classes**2 > _MOST_STEPS:
        for order in orders(fleet, lengths):
            sequence = tuple(fleet.class_of(group) for group in order)
            used = tuple(sequence.count(c) for c in range(len(fleet.devices)))
            yield Pool(fleet, used, sequence)
        return
    found: dict[object, tuple[int, ...]] = {}
    for used in product(*(range(len(members) + 1) for members in fleet.devices)):
        if sum(used) in lengths:
            found.setdefault(_signature(fleet, used), used)
    for used in sorted(found.values(), key=lambda each: (list(lengths).index(sum(each)), each)):
        yield Pool(fleet, used)


def joined(fleet: Fleet) -> Fleet:
    """Equal nodes of one device each as one class: any two of them are joined by the same link."""
    devices: dict[object, list[Accelerator]] = {}
    alone = Counter(members[0].node for members in fleet.devices)
    kept: list[int] = []
    for c, members in enumerate(fleet.devices):
        single = len(members) == 1 and alone[members[0].node] == 1
        key = (fleet.kind[c], fleet.node_group[c]) if single else c
        if key not in devices:
            kept.append(c)
        devices.setdefault(key, []).extend(members)
    return Fleet(
        tuple(tuple(members) for members in devices.values()),
        tuple(fleet.kind[c] for c in kept),
        tuple(fleet.node_group[c] for c in kept),
    )


def _signature(fleet: Fleet, used: tuple[int, ...]) -> object:
    """Equal for pools that differ only in which of several equal nodes they use."""
    nodes: dict[str, list[tuple[int, int, int]]] = {}
    for c, members in enumerate(fleet.devices):
        if used[c]:
            nodes.setdefault(members[0].node, []).append((fleet.node_group[c], fleet.kind[c], used[c]))
    return tuple(sorted(tuple(sorted(each)) for each in nodes.values()))
