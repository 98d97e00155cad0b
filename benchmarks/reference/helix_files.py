"""The files of Helix's artifact (ASPLOS 2025): its clusters read as ours, our pipelines written as layouts that its simulator loads.

Called by `benchmarks.helix_simulator`. Knows the formats alone, not the simulator. The artifact counts bytes where it says bits: its
"1000 mbps" carries 10^9 bytes a second, which is 8 Gbps here.
"""

import ast
from collections.abc import Mapping, Sequence
from configparser import ConfigParser
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from strata_planner.errors import InputError

OFFSET = 2  # of compute nodes' numbers: source and sink are 0 and 1
UNITS = {
    "Byte": 1.0,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "kbps": 1e3,
    "mbps": 1e6,
    "gbps": 1e9,
    "Sec": 1.0,
    "MilliSec": 1e-3,
}
End = int | str  # of a link: a node's number, "source" or "sink"


@dataclass(frozen=True)
class Rate:
    bytes_per_second: float
    seconds: float


@dataclass(frozen=True)
class Machines:
    """`types`: of the nodes 0, 1, ... `links`: by from and to, both directions, "source" and "sink" among the ends."""

    types: tuple[str, ...]
    links: Mapping[tuple[End, End], Rate]

    @property
    def counts(self) -> dict[str, int]:
        return {each: self.types.count(each) for each in sorted(set(self.types))}

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes in our plans: the type in small letters and a number of its own, `l4-0`, `a100-3`."""
        return tuple(f"{each.lower()}-{self.types[:number].count(each)}" for number, each in enumerate(self.types))


@dataclass(frozen=True)
class Held:
    """Consecutive layers, `first` to before `end`, on a node. `kv_entries`: its cache, in tokens times layers."""

    node: int
    first: int
    end: int
    kv_entries: int


def read_machines(file: Path) -> Machines:
    """A complete cluster file (`config/*.ini`). Raises InputError."""
    parser = _parsed(file)
    count = int(parser["NodeNames"]["total_compute_nodes"])
    types = tuple(parser[f"ComputeNode-{number}"]["type"] for number in range(count))
    links = {}
    for section in parser.sections():
        if section.startswith("Link-"):
            source, target = (int(end) if end.isdigit() else end for end in section.split("-")[1:])
            rate = Rate(quantity(parser[section]["bandwidth"]), quantity(parser[section]["latency"]))
            links[source, target] = rate
            if isinstance(source, int) and isinstance(target, int):
                links.setdefault((target, source), rate)
    return Machines(types, links)


def quantity(text: str) -> float:
    """`1.5 * mbps` as a number. Raises InputError for anything but a number and a unit of the artifact."""
    number, _, unit = (part.strip() for part in text.partition("*"))
    try:
        return float(number) * (UNITS[unit] if unit else 1.0)
    except (ValueError, KeyError) as error:
        raise InputError(f"'{text}' is no quantity: a number, then '*' and one of {', '.join(UNITS)}") from error


def read_held(solution: Path, cluster: Path) -> list[tuple[str, int, int]]:
    """Type, number of layers and KV entries of every node that a layout of the artifact uses. Raises InputError."""
    layers, nodes = _parsed(solution)["Solution"], _parsed(cluster)
    held = ((name, len(ast.literal_eval(layers[name]))) for name in layers)
    return [
        (nodes[name]["machine_type"].strip("\"'"), count, int(nodes[name]["kv_cache_capacity"]))
        for name, count in held
        if count
    ]


def solution_text(pipelines: Sequence[Sequence[Held]]) -> str:
    """Which node holds which layers, as `LayoutMethod.LoadExisting` reads it."""
    lines = [
        f"compute_node_{each.node + OFFSET}={list(range(each.first, each.end))}" for pipe in pipelines for each in pipe
    ]
    return "\n".join([f"[Settings]\noffset={OFFSET}\n\n[Solution]", *lines]) + "\n"


def cluster_text(
    pipelines: Sequence[Sequence[Held]], machines: Machines, nics: Mapping[str, Mapping[str, float]]
) -> str:
    """The nodes that the pipelines use and only the links along them. `nics`: type -> what `machine_profiles.ini` says of it."""
    coordinator: dict[str, object] = {
        "inbound_nic_speed": nics["SinkNode"]["inbound_nic_speed"],
        "outbound_nic_speed": nics["SourceNode"]["outbound_nic_speed"],
    }
    links: dict[str, dict[str, object]] = {}
    for pipe in pipelines:
        ends: list[End] = ["source", *(each.node for each in pipe), "sink"]
        for source, target in pairwise(ends):
            rate = machines.links[source, target]
            links[f"link_{_named(source)}_{_named(target)}"] = {
                "in": _named(source),
                "out": _named(target),
                "latency": rate.seconds,
                "bandwidth": rate.bytes_per_second,
            }
    nodes: dict[str, dict[str, object]] = {
        _named(each.node): {
            **nics[machines.types[each.node]],
            "machine_type": f'"{machines.types[each.node]}"',
            "kv_cache_capacity": each.kv_entries,
            "activation_backup_capacity": 0,
        }
        for pipe in pipelines
        for each in pipe
    }
    types = sorted(set(machines.types))
    heads: dict[str, dict[str, object]] = {"MachineTypes": {"types": types}, "ComputeNodes": {"names": [*nodes]}}
    sections: dict[str, dict[str, object]] = {
        "Coordinator": coordinator,
        **heads,
        **nodes,
        "Links": {"names": [*links]},
        **links,
    }
    return "\n\n".join(_section(name, values) for name, values in sections.items()) + "\n"


def read_nics(file: Path) -> dict[str, dict[str, float]]:
    """`machine_profiles.ini`: type -> vram_size, disk_speed and speeds of its network cards. Raises InputError."""
    parser = _parsed(file)
    return {name: {key: quantity(value) for key, value in parser[name].items()} for name in parser.sections()}


def _named(end: End) -> str:
    return f"compute_node_{end + OFFSET}" if isinstance(end, int) else end


def _section(name: str, values: Mapping[str, object]) -> str:
    return "\n".join([f"[{name}]", *(f"{key}={value}" for key, value in values.items())])


def _parsed(file: Path) -> ConfigParser:
    parser = ConfigParser()
    if not parser.read(file):
        raise InputError(
            f"{file} cannot be read; name the folder of Helix's artifact, github.com/Thesys-lab/Helix-ASPLOS25"
        )
    return parser
