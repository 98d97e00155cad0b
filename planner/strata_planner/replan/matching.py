"""Which of several equal devices becomes which stage, so that as much as possible is there already.

Called by `decision`. The search knows devices only up to what tells them apart; here they get back their names.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from strata_planner.contract.shares import Shares
from strata_planner.question.cluster import Accelerator, DeviceGroup
from strata_planner.search.exact.orders import Fleet, Order

Cost = Callable[[int, DeviceGroup], float]


def assign(costs: Sequence[Sequence[float]]) -> list[int]:
    """A column of its own for each row, least in sum. At least as many columns as rows.

    The Hungarian method by shortest augmenting paths (Jonker and Volgenant), O(rows^2 x columns).
    """
    rows, columns = len(costs), len(costs[0]) if costs else 0
    row_price, column_price = [0.0] * (rows + 1), [0.0] * (columns + 1)
    owner, back = [0] * (columns + 1), [0] * (columns + 1)  # 1-based; column 0 holds the row being placed
    for row in range(1, rows + 1):
        owner[0], column = row, 0
        least, done = [math.inf] * (columns + 1), [False] * (columns + 1)
        while owner[column]:
            done[column] = True
            for other in range(1, columns + 1):
                if done[other]:
                    continue
                reduced = costs[owner[column] - 1][other - 1] - row_price[owner[column]] - column_price[other]
                if reduced < least[other]:
                    least[other], back[other] = reduced, column
            following = min((c for c in range(1, columns + 1) if not done[c]), key=lambda c: least[c])
            _reprice(done, least, owner, row_price, column_price, least[following])
            column = following
        while column:
            owner[column], column = owner[back[column]], back[column]
    placed = [0] * rows
    for column in range(1, columns + 1):
        if owner[column]:
            placed[owner[column] - 1] = column - 1
    return placed


def _reprice(
    done: list[bool], least: list[float], owner: list[int], rows: list[float], columns: list[float], step: float
) -> None:
    for column, passed in enumerate(done):
        if passed:
            rows[owner[column]] += step
            columns[column] -= step
        else:
            least[column] -= step


def closest(order: Order, fleet: Fleet, cost: Cost) -> Order:
    """The order with its devices exchanged for equal ones, least in the sum of `cost(stage, group)`."""
    matcher = _Matcher(order, fleet, cost)
    chosen: dict[int, DeviceGroup] = {}
    for group in sorted({*matcher.node_groups.values()}):
        chosen |= matcher.nodes_of(group)
    return tuple(chosen[j] for j in range(len(order)))


class _Matcher:
    def __init__(self, order: Order, fleet: Fleet, cost: Cost) -> None:
        self._order, self._cost = order, cost
        self.node_groups = {m[0].node: group for m, group in zip(fleet.devices, fleet.node_group, strict=True)}
        self._kinds = {
            each.place: kind for members, kind in zip(fleet.devices, fleet.kind, strict=True) for each in members
        }
        self._devices: dict[str, list[Accelerator]] = {}
        for members in fleet.devices:
            self._devices.setdefault(members[0].node, []).extend(members)

    def nodes_of(self, group: int) -> dict[int, DeviceGroup]:
        """Stage -> devices, for the stages on nodes that nothing tells apart."""
        nodes = [node for node, number in self.node_groups.items() if number == group]
        used = [node for node in nodes if any(each.node == node for each in self._order)]
        if not used:
            return {}
        inside = [[self._inside(logical, physical) for physical in nodes] for logical in used]
        placed = assign([[cost for cost, _ in row] for row in inside])
        return {j: found for row, column in enumerate(placed) for j, found in inside[row][column][1].items()}

    def _inside(self, logical: str, physical: str) -> tuple[float, dict[int, DeviceGroup]]:
        """The stages of one node on the devices of an equal one: the widest groups choose first."""
        free = list(self._devices[physical])
        stages: dict[tuple[int, tuple[int, ...], Shares], list[int]] = {}
        for j, each in enumerate(self._order):
            if each.node == logical:
                stages.setdefault((-each.degree, tuple(map(self._kind, each.devices)), each.shares), []).append(j)
        total, chosen = 0.0, dict[int, DeviceGroup]()
        for (_, kinds, shares), mine in sorted(stages.items()):
            groups = self._groups(kinds, shares, free)
            costs = [[self._cost(j, group) for group in groups] for j in mine]
            for row, column in enumerate(assign(costs)):
                total += costs[row][column]
                chosen[mine[row]] = groups[column]
            taken = {place for j in mine for place in chosen[j].places}
            free = [device for device in free if device.place not in taken]
        return total, chosen

    def _groups(self, kinds: tuple[int, ...], shares: Shares, free: Sequence[Accelerator]) -> list[DeviceGroup]:
        """As many as go, of devices of such kinds each."""
        wanted = Counter(kinds)
        pools = {kind: [device for device in free if self._kind(device) == kind] for kind in wanted}
        found = []
        for number in range(min(len(pools[kind]) // count for kind, count in wanted.items())):
            own = {kind: iter(pools[kind][number * count :]) for kind, count in wanted.items()}
            found.append(DeviceGroup(tuple(next(own[kind]) for kind in kinds), shares))
        return found

    def _kind(self, device: Accelerator) -> int:
        return self._kinds[device.place]
