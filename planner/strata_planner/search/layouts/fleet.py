"""Layouts of fleets: many alike nodes, so that patterns of replicas are counted instead of single devices dealt.

Called by benchmarks and planning for pools that the genetic search is too slow for. Patterns are whole or halved nodes of one type,
several nodes of it, and a node of each of two types; an integer programme on HiGHS says how many of each. Beside it
stands a bound that no layout passes.
"""

import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations

import highspy  # noqa: F401  before pulp, whose own import of it would swallow a Ctrl-C that comes meanwhile
import pulp

from strata_planner.errors import ClusterError, InfeasibleError
from strata_planner.question.cluster import Accelerator, Cluster, DeviceGroup, Node
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.effort import Effort
from strata_planner.search.highs import optimise
from strata_planner.search.layouts.bound import most_tokens_per_second
from strata_planner.search.layouts.pipelines import Pipeline, Pipelines
from strata_planner.search.layouts.pool import Composition, Pool
from strata_planner.search.layouts.solved import SolvedReplica, nearly_solved, proven
from strata_planner.search.layouts.stages import with_concurrency

MOST_SEQUENCES = 4096  # in flight on one replica
_MOST_NODES = 6  # of one type in a pattern
_SECONDS = 2.0  # of the integer programme
_RELATIVE_GAP = 1e-3
_WORK_OF_PROOFS = 200e6  # as exact searches count it: about a second


@dataclass(frozen=True)
class Pattern:
    """A replica on so many devices of nodes of each type; `devices[t]` counts devices of node type t."""

    composition: Composition  # of the template pool
    devices: tuple[int, ...]
    pipeline: Pipeline
    rung: int

    def tokens_per_second(self) -> float:
        return self.pipeline.rates[self.rung]


@dataclass(frozen=True)
class FleetLayout:
    """`kinds`: how many replicas there are of each kind, with one of them. `bound`: tokens a second that nothing exceeds."""

    kinds: tuple[tuple[int, SolvedReplica], ...]
    replicas: tuple[SolvedReplica, ...]
    idle: int
    tokens_per_second: float
    bound: float
    patterns: int
    seconds: float

    @property
    def gap(self) -> float:
        return (self.bound - self.tokens_per_second) / self.bound


def fleet_layout(request: PlanRequest) -> FleetLayout:
    """Every node of the cluster must hold devices of one type behind equal links. Raises ClusterError, InfeasibleError."""
    started = time.monotonic()
    request.check()
    kinds = _node_kinds(request.cluster)
    template = Cluster(
        tuple(node for nodes in kinds for node in nodes[:_MOST_NODES]),
        default_link=request.cluster.default_link,
        intra_node=request.cluster.intra_node,
        profiles=request.cluster.profiles,
    )
    most = min(MOST_SEQUENCES, request.workload.concurrency)
    pipelines = Pipelines(with_concurrency(request, most), Pool(template))
    patterns = _patterns(pipelines, kinds)
    if not patterns:
        raise InfeasibleError([f"no {_MOST_NODES} nodes of one type hold {request.model_uri}"])
    sizes = [len(nodes) * _devices(nodes[0]) for nodes in kinds]
    counts = _counted(patterns, sizes, pipelines.stages.rungs, request.workload.concurrency)
    found = _solved(request, pipelines, patterns, counts)
    if not found:
        raise InfeasibleError(
            [f"{request.workload.concurrency} sequences: no pattern of replicas takes so few; plan for more"]
        )
    rate = sum(count * each.prediction.tokens_per_second for count, each in found)
    used = sum(count * sum(group.degree for group in each.order) for count, each in found)
    bound = most_tokens_per_second(request)
    replicas = _placed(found, kinds, Pool(request.cluster))
    return FleetLayout(found, replicas, sum(sizes) - used, rate, bound, len(patterns), time.monotonic() - started)


def _node_kinds(cluster: Cluster) -> list[list[Node]]:
    """Nodes that hold the same devices."""
    if not cluster.is_uniform:
        raise ClusterError(
            "some nodes are joined by links of their own, or of their zones: a fleet's are all joined by defaultLink"
        )
    kinds: dict[object, list[Node]] = {}
    for node in cluster.nodes:
        if len(node.devices) > 1:
            raise ClusterError(
                f"node '{node.name}' has {len(node.devices)} types of devices; a fleet's nodes have one each"
            )
        device = node.devices[0]
        kinds.setdefault((device.type, device.count, device.memory_bytes, str(device.profile)), []).append(node)
    return list(kinds.values())


def _devices(node: Node) -> int:
    return node.devices[0].count


def _patterns(pipelines: Pipelines, kinds: list[list[Node]]) -> list[Pattern]:
    """One for every load of every composition that holds the model."""
    types = {node.name: t for t, nodes in enumerate(kinds) for node in nodes}
    columns = []
    for composition in _compositions(pipelines.pool, kinds):
        pipeline = pipelines.best(composition)
        if pipeline is None:
            continue
        devices = [0] * len(kinds)
        for each, count in zip(pipelines.pool.classes, composition, strict=True):
            devices[types[each.node]] += count
        columns += [Pattern(composition, tuple(devices), pipeline, rung) for _, _, rung in pipeline.steps]
    return columns


def _compositions(pool: Pool, kinds: list[list[Node]]) -> list[Composition]:
    place = {each.node: c for c, each in enumerate(pool.classes)}

    def of(*parts: tuple[Node, int]) -> Composition:
        counts = Counter({place[node.name]: count for node, count in parts})
        return tuple(counts[c] for c in range(len(pool.classes)))

    found = []
    for nodes in kinds:
        size, most = _devices(nodes[0]), min(len(nodes), _MOST_NODES)
        found += [of(*((node, size) for node in nodes[:count])) for count in range(1, most + 1)]
        found += [of((nodes[0], part)) for part in (1, 2, 4) if part < size and size % part == 0]
    for one, other in combinations(kinds, 2):
        for few, many in ((1, 1), (1, 2), (2, 1)):
            if few <= len(one) and many <= len(other):
                both = [(node, _devices(node)) for node in (*one[:few], *other[:many])]
                found.append(of(*both))
    return list(dict.fromkeys(found))


def _counted(patterns: list[Pattern], sizes: list[int], rungs: tuple[int, ...], concurrency: int) -> list[int]:
    """How many of each pattern: most tokens a second within the devices of each type and the sequences in flight."""
    model = pulp.LpProblem("replicas", pulp.LpMaximize)
    each = [model.add_variable(f"count_{number}", 0, cat=pulp.LpInteger) for number in range(len(patterns))]

    def weighed(weights: list[float]) -> pulp.LpAffineExpression:
        return pulp.LpAffineExpression(list(zip(each, weights, strict=True)))

    model += weighed([pattern.tokens_per_second() for pattern in patterns]), "tokens_per_second"
    for t, size in enumerate(sizes):
        model += weighed([pattern.devices[t] for pattern in patterns]) <= size, f"devices_{t}"
    model += weighed([rungs[pattern.rung] for pattern in patterns]) <= concurrency, "sequences"
    optimise(model, timeLimit=_SECONDS, gapRel=_RELATIVE_GAP)
    return [round(variable.varValue or 0) for variable in each]


def _solved(
    request: PlanRequest, pipelines: Pipelines, patterns: list[Pattern], counts: list[int]
) -> tuple[tuple[int, SolvedReplica], ...]:
    """Each of the proofs may take its part of what those before it have left."""
    effort, rungs = Effort.of(request.time_limit_seconds, _WORK_OF_PROOFS), pipelines.stages.rungs
    used = [(each.pipeline, each.rung, count) for each, count in zip(patterns, counts, strict=True) if count]
    near = [
        (count, nearly_solved(request, pipelines.order(each.groups[rung]), rungs[rung], each.splits[rung]))
        for each, rung, count in used
    ]
    held = [(count, one) for count, one in near if one is not None]
    parts = effort.parts(len(held))
    return tuple((count, proven(request, one, own)[0]) for (count, one), own in zip(held, parts, strict=True))


def _placed(
    found: tuple[tuple[int, SolvedReplica], ...], kinds: list[list[Node]], pool: Pool
) -> tuple[SolvedReplica, ...]:
    """Every replica on devices of its own. Those with most of a node come first: parts of nodes divide each other and the node,
    so that none is left that fits nowhere.
    """
    alike = {node.name: nodes for nodes in kinds for node in nodes}
    free = {each.node: list(each.devices) for each in pool.classes}
    ranked = sorted(found, key=lambda each: -max(_on_nodes(each[1]).values()))
    return tuple(_on(one, alike, free) for count, one in ranked for _ in range(count))


def _on_nodes(one: SolvedReplica) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in one.order:
        counts[group.node] += group.degree
    return counts


def _on(one: SolvedReplica, alike: dict[str, list[Node]], free: dict[str, list[Accelerator]]) -> SolvedReplica:
    """The replica on the first nodes with room, whose devices it takes out of `free`."""
    named: dict[str, list[Accelerator]] = {}
    for node, count in _on_nodes(one).items():
        fits = next(other.name for other in alike[node] if len(free[other.name]) >= count)
        named[node], free[fits] = free[fits][:count], free[fits][count:]
    order = []
    for group in one.order:
        devices = named[group.node]
        order.append(DeviceGroup(tuple(devices[: group.degree])))
        del devices[: group.degree]
    candidate = replace(one.found.candidate, order=tuple(order))
    return replace(one, found=replace(one.found, candidate=candidate))
