"""The clusters of Helix's artifact for Llama-2-70B, where their files are, and each as a cluster that our planner takes.

Called by `benchmarks.helix_simulator`. Published figures are those of the artifact's ae_readme.md, offline, tokens decoded a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.reference.helix_artifact import Layout
from benchmarks.reference.helix_files import Machines, Rate
from strata_planner.contract.devices import DeviceProfile
from strata_planner.question.catalogue import catalogue
from strata_planner.question.cluster import Cluster, Device, Link, LinkRate, Node

PRODUCTS = {"A100": "A100-40GB", "V100": "V100-16GB"}  # the artifact's names where the catalogue has another


@dataclass(frozen=True)
class Separate:
    """One of its separate pipelines. `complete`: its cluster file; `in_flight`: as the artifact's script sets it by hand."""

    complete: str
    solution: str
    cluster: str
    in_flight: int


@dataclass(frozen=True)
class Case:
    folder: str
    complete: str
    separate: tuple[Separate, ...]
    published: Mapping[str, float]

    def path(self, artifact: Path, name: str) -> Path:
        return artifact / "artifact_evaluation" / self.folder / name

    def profiles(self, artifact: Path) -> Path:
        return self.path(artifact, "config/machine_profiles.ini")

    def helix(self, artifact: Path, machines: Machines) -> Layout:
        """The layout of Helix's own planner, with its max-flow routes."""
        found = self.path(artifact, "layout_llama70b/ilp")
        complete = self.path(artifact, self.complete)
        return Layout(
            found / "ilp_sol.ini", found / "simulator_cluster.ini", complete, self.profiles(artifact), machines.counts
        )

    def separate_layouts(self, artifact: Path, machines: Machines) -> list[Layout]:
        return [
            Layout(
                self.path(artifact, each.solution),
                self.path(artifact, each.cluster),
                self.path(artifact, each.complete),
                self.profiles(artifact),
                machines.counts,
                each.in_flight,
            )
            for each in self.separate
        ]


def _of_24(counts: Mapping[str, int]) -> tuple[Separate, ...]:
    where = "layout_llama70b/separate"
    return tuple(
        Separate(
            f"config/{each}.ini", f"{where}/{each}_solution_file.ini", f"{where}/{each}_simulator_cluster.ini", count
        )
        for each, count in counts.items()
    )


def _of_42(counts: Mapping[str, int]) -> tuple[Separate, ...]:
    where = "layout_llama70b/separate"
    return tuple(
        Separate(
            "config/cluster42.ini", f"{where}/{each}/solution_file.ini", f"{where}/{each}/simulator_cluster.ini", count
        )
        for each, count in counts.items()
    )


CASES = {
    "24": Case(
        "single_cluster",
        "config/cluster24.ini",
        _of_24({"a100": 18, "l4": 40, "t4": 3}),
        {"Helix": 252.1, "Swarm": 124.7, "separate pipelines": 124.3},
    ),
    "distributed-24": Case(
        "distributed_clusters",
        "config/3cluster24.ini",
        _of_24({"a100": 1, "l4": 60, "t4": 50}),
        {"Helix": 98.0, "Swarm": 51.9, "separate pipelines": 61.9},
    ),
    "heterogeneous-42": Case(
        "high_heterogeneity",
        "config/cluster42.ini",
        _of_42({"a100": 1, "l4": 60, "l4x2": 35, "t4x4": 110, "v100_t4": 90}),
        {"Helix": 645.6, "Swarm": 473.2},
    ),
}


def cluster_of(machines: Machines, usable_bytes: Mapping[str, int]) -> Cluster:
    """A node each with one device, of which plans may fill `usable_bytes`. Machines of several GPUs are device types of their own."""
    nodes = tuple(
        Node(
            name,
            (Device(PRODUCTS.get(each, each), memory_bytes=usable_bytes[each], overhead_bytes=0, usable_fraction=1.0),),
        )
        for name, each in zip(machines.names, machines.types, strict=True)
    )
    rates = {
        ends: rate for ends, rate in machines.links.items() if isinstance(ends[0], int) and isinstance(ends[1], int)
    }
    profiles = {each: profile for each in machines.counts if (profile := _of_several(each))}
    if len(set(rates.values())) == 1:
        return Cluster(nodes, default_link=_link_rate(next(iter(rates.values()))), profiles=profiles)
    links = tuple(
        Link(machines.names[source], machines.names[target], _link_rate(rate).gbps, _link_rate(rate).latency_ms)
        for (source, target), rate in rates.items()
        if isinstance(source, int) and isinstance(target, int) and source < target
    )
    return Cluster(nodes, links, default_link=None, profiles=profiles)


def _link_rate(rate: Rate) -> LinkRate:
    return LinkRate(gbps=rate.bytes_per_second * 8 / 1e9, latency_ms=rate.seconds * 1e3)


def _of_several(machine: str) -> DeviceProfile | None:
    """`L4x2`: two L4 as one device of twice the rates; only what tables of layers leave out is priced by it."""
    base, _, count = machine.partition("x")
    if not count:
        return None
    one = catalogue().profile(PRODUCTS.get(base, base))
    times = int(count)
    return msgspec.structs.replace(
        one,
        type=machine,
        memory_bytes=one.memory_bytes * times,
        bandwidth_bytes_per_second=one.bandwidth_bytes_per_second * times,
        flops_per_second=one.flops_per_second * times,
        float32_flops_per_second=one.float32_flops_per_second * times,
    )
