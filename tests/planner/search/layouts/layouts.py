"""Builders for the tests of layouts: small pools of small devices, some nodes with several."""

from typing import Any

from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.layouts.search import Layout
from tests.planner.builders import MIB, a_profile, a_request


def a_pool(**counts: int) -> Cluster:
    """`counts` devices of 2 MiB on each named node: about two of them hold a_model at 16 bits."""
    return Cluster(
        tuple(Node(name, (a_device(count),)) for name, count in counts.items()),
        default_link=LinkRate(gbps=1, latency_ms=1.0),
        intra_node=LinkRate(gbps=100, latency_ms=0.01),
        profiles={"small": a_profile(type="small")},
    )


def a_device(count: int, memory_mib: float = 2.2, **fields: Any) -> Device:
    memory = int(memory_mib * MIB)
    return Device("small", count=count, memory_bytes=memory, usable_fraction=1.0, overhead_bytes=0, **fields)


def a_pool_request(cluster: Cluster, **changes: Any) -> PlanRequest:
    fields: dict[str, Any] = {
        "allowed_bits": (16,),
        "tensor_parallel": (1, 2, 4, 8),
        "workload": Workload(prompt_tokens=32, output_tokens=16, concurrency=8),
    }
    return a_request(cluster, **(fields | changes))


def used(layout: Layout) -> list[tuple[str, str, int]]:
    """Places of all devices, once per use."""
    return [place for each in layout.replicas for group in each.order for place in group.places]
