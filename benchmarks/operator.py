"""The operator's look at large clusters: what it costs to begin, at rest, and after a change, in this process, over generated objects.

`python -m benchmarks.operator [--json FILE] [--sizes 100/3000/10,1000/30000/100]`, a minute. The stock is filled from the bytes that an API
server's pages would have; the peer of every look is what a look did before there was a stock: `take_inventory` over all objects, for each
deployment anew (of as many deployments as `--sampled`, times their number). Where no API server runs, neither do the look's writes and plans:
with `--testbed` the operator itself runs on a real control plane (`operator_testbed`; root, and minutes for the pods of a large size).
"""

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.operator_cluster import Size, a_deployment, a_node, a_pod, stored
from benchmarks.operator_testbed import measured_on_testbed
from benchmarks.rows import Row, run
from strata_operator.api import LLMDeployment, deployment_from_object
from strata_operator.decide.ledger import DeviceLedger
from strata_operator.observe.inventories import Inventories
from strata_operator.observe.inventory import InventoryOptions, take_inventory
from strata_operator.observe.kube import NODES, PAGE, PODS, Kind
from strata_operator.observe.stock import Stock
from strata_operator.render.slots import Claim
from strata_planner.contract.values import to_json

Object = dict[str, Any]
SIZES = (Size(100, 3000, 10), Size(220, 6600, 22), Size(1000, 30000, 100))
MODELS = Path("examples/models").resolve()
OPTIONS = InventoryOptions()


@dataclass(frozen=True)
class Looks:
    """Seconds: of the first lists into the stock, of all inventories then, at rest, after a node's loss, after a plan; of the same listed
    anew. `moved`: deployments whose inventory the loss changed.
    """

    filled: float
    first: float
    rest: float
    lost: float
    dealt: float
    anew: float
    moved: int
    held_bytes: int
    cluster_bytes: int


def deployments_of(size: Size) -> list[LLMDeployment]:
    things = [stored(a_deployment(number, MODELS), 1 + number) for number in range(size.deployments)]
    return [deployment_from_object(_without_managed(thing)) for thing in things]


def _without_managed(thing: Object) -> Object:
    return {**thing, "metadata": {name: value for name, value in thing["metadata"].items() if name != "managedFields"}}


def pages_of(size: Size) -> list[tuple[Kind, bytes]]:
    """The answers to lists of all nodes and pods."""
    things = [(NODES, [a_node(number, size) for number in range(size.nodes)])]
    things.append((PODS, [a_pod(number, size) for number in range(size.pods)]))
    return [
        (
            kind,
            msgspec.json.encode(
                [stored(thing, 1000 + first + at) for at, thing in enumerate(some[first : first + PAGE])]
            ),
        )
        for kind, some in things
        for first in range(0, len(some), PAGE)
    ]


def looks_at(size: Size, sampled: int) -> Looks:
    deployments, pages = deployments_of(size), pages_of(size)
    gc.collect()
    before = psutil.Process().memory_info().rss
    stock, began = Stock(), time.perf_counter()
    for kind, page in pages:
        for thing in msgspec.json.decode(page):
            stock.hear(kind, thing)
    filled = time.perf_counter() - began
    inventories, ledger = Inventories(stock, OPTIONS), DeviceLedger()
    first, of = _timed(lambda: [inventories.of(each, ledger) for each in deployments])
    rest, again = _timed(lambda: [inventories.of(each, ledger) for each in deployments])
    assert all(one is other for one, other in zip(of, again, strict=True))
    stock.hear(NODES, _not_ready(0, size))
    lost, after = _timed(lambda: [inventories.of(each, ledger) for each in deployments])
    moved = sum(one is not other for one, other in zip(of, after, strict=True))
    taken = DeviceLedger({deployments[0].metadata.uid: (_claim(deployments[0], after[0].cluster.nodes[0].name),)})
    dealt, _ = _timed(lambda: [inventories.of(each, taken) for each in deployments])
    gc.collect()
    held = psutil.Process().memory_info().rss - before
    anew = _anew(pages, deployments[:sampled]) * size.deployments / sampled
    whole = take_inventory(_everywhere(), (a_node(number, size) for number in range(size.nodes)), ()).cluster
    return Looks(filled, first, rest, lost, dealt, anew, moved, held, len(to_json(whole)))


def _timed(work: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _anew(pages: Sequence[tuple[Kind, bytes]], sampled: Sequence[LLMDeployment]) -> float:
    """Seconds of the inventories of some deployments, each from all objects."""
    things: dict[Kind, list[Object]] = {NODES: [], PODS: []}
    for kind, page in pages:
        things[kind] += json.loads(page)
    seconds, _ = _timed(lambda: [take_inventory(each, things[NODES], things[PODS], (), OPTIONS) for each in sampled])
    return seconds


def _not_ready(number: int, size: Size) -> Object:
    node = stored(a_node(number, size), 10**6)
    ready = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-02T00:00:00Z"}
    return {**node, "status": {**node["status"], "conditions": [ready]}}


def _claim(deployment: LLMDeployment, node: str) -> Claim:
    return Claim(deployment.namespace, deployment.name, f"{deployment.name}-x", node, {})


def _everywhere() -> LLMDeployment:
    thing = a_deployment(0, MODELS)
    thing["spec"].pop("placement")
    return deployment_from_object(thing)


def rows_of(size: Size, looks: Looks) -> list[Row]:
    anew = partial(Row, peer="all objects for each deployment", peer_value=looks.anew, lower_is_better=True)
    return [
        Row(f"filled_{size}", looks.filled, "s", lower_is_better=True),
        anew(f"first_{size}", looks.first, "s", ratio=looks.first / looks.anew),
        anew(f"rest_{size}", looks.rest, "s", ratio=looks.rest / looks.anew),
        anew(f"lost_node_{size}", looks.lost, "s", ratio=looks.lost / looks.anew),
        anew(f"new_plan_{size}", looks.dealt, "s", ratio=looks.dealt / looks.anew),
        Row(f"moved_by_loss_{size}", looks.moved, "deployments", lower_is_better=True),
        Row(f"held_{size}", looks.held_bytes / 1e6, "MB", goal=400.0, lower_is_better=True),
        Row(f"cluster_{size}", looks.cluster_bytes / 1e6, "MB of JSON", goal=1.0, lower_is_better=True),
    ]


def sizes_of(text: str) -> tuple[Size, ...]:
    """`100/3000/10`: nodes, pods of others, deployments."""
    return tuple(Size(*map(int, each.split("/"))) for each in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=sizes_of, default=SIZES, help="nodes/pods/deployments, by commas")
    parser.add_argument("--sampled", type=int, default=1, help="deployments that the peer is measured for")
    parser.add_argument("--testbed", action="store_true", help="`strata operator` on the test bed's control plane")
    chosen, rest = parser.parse_known_args()

    def rows(size: Size) -> list[Row]:
        return measured_on_testbed(size) if chosen.testbed else rows_of(size, looks_at(size, chosen.sampled))

    run("operator", lambda: [row for size in chosen.sizes for row in rows(size)], rest, part=True)


if __name__ == "__main__":
    main()
