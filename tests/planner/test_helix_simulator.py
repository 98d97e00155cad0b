"""What `benchmarks.helix_simulator` hands to Helix's simulator: whole pipelines, its own links and memory; nothing without the artifact."""

import ast
from configparser import ConfigParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.helix_simulator import ground, main
from benchmarks.reference.helix_artifact import KvTables
from benchmarks.reference.helix_cases import cluster_of
from benchmarks.reference.helix_files import (
    Held,
    Machines,
    Rate,
    cluster_text,
    quantity,
    read_held,
    read_machines,
    solution_text,
)
from strata_planner.errors import InputError

GIGABYTE = Rate(1e9, 0.001)
SPEEDS = {"vram_size": 16e9, "inbound_nic_speed": 1e10, "outbound_nic_speed": 1e10, "disk_speed": 1e9}
NICS = dict.fromkeys(("SourceNode", "SinkNode", "L4", "T4", "L4x2"), SPEEDS)
KV = KvTables({"L4": {1: 4_000_000, 7: 1_750_000, 10: 600_000}})


def machines(types: tuple[str, ...], rate: Rate = GIGABYTE) -> Machines:
    ends = ["source", *range(len(types)), "sink"]
    return Machines(types, {(source, target): rate for source in ends for target in ends if source != target})


@st.composite
def pipelines(draw: st.DrawFn) -> list[Held]:
    """Eighty layers over some of twelve nodes, in any order."""
    nodes = draw(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True))
    cuts = sorted(draw(st.sets(st.integers(1, 79), min_size=len(nodes) - 1, max_size=len(nodes) - 1)))
    bounds = pairwise([0, *cuts, 80])
    return [Held(node, first, end, 1000 * (end - first)) for node, (first, end) in zip(nodes, bounds, strict=True)]


@given(pipelines())
def test_a_pipeline_is_written_as_one_chain_that_holds_every_layer_once(pipe: list[Held]) -> None:
    on = machines(("L4", "T4") * 6)
    solution, cluster = ConfigParser(), ConfigParser()
    solution.read_string(solution_text([pipe]))
    cluster.read_string(cluster_text([pipe], on, NICS))
    layers = [layer for line in solution["Solution"].values() for layer in ast.literal_eval(line)]
    assert layers == list(range(80))
    links = [cluster[name] for name in ast.literal_eval(cluster["Links"]["names"])]
    assert (links[0]["in"], links[-1]["out"]) == ("source", "sink")
    assert all(one["out"] == two["in"] for one, two in pairwise(links))
    assert [link["out"] for link in links[:-1]] == list(solution["Solution"])
    assert all(float(link["bandwidth"]) == 1e9 for link in links)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    pipe, (solution, cluster) = [Held(3, 0, 50, 7), Held(0, 50, 80, 9)], (tmp_path / "a.ini", tmp_path / "b.ini")
    solution.write_text(solution_text([pipe]))
    cluster.write_text(cluster_text([pipe], machines(("L4", "L4", "L4", "T4")), NICS))
    assert read_held(solution, cluster) == [("T4", 50, 7), ("L4", 30, 9)]


def test_a_cluster_of_the_artifact_is_read_with_links_both_ways_and_bytes_for_its_bits(tmp_path: Path) -> None:
    file = tmp_path / "cluster.ini"
    file.write_text(
        "[NodeNames]\ntotal_compute_nodes=2\n[ComputeNode-0]\ntype=T4\n[ComputeNode-1]\ntype=L4x2\n"
        "[Link-0-1]\nbandwidth=12.5 * mbps\nlatency=50 * MilliSec\n"
        "[Link-source-0]\nbandwidth=1000 * mbps\nlatency=1 * MilliSec\n"
    )
    found = read_machines(file)
    assert found.names == ("t4-0", "l4x2-0")
    assert found.links[1, 0] == found.links[0, 1] == Rate(12.5e6, 0.05)
    cluster = cluster_of(found, {"T4": 11 << 30, "L4x2": 40 << 30})
    assert cluster.default_link is not None
    assert (cluster.default_link.gbps, cluster.default_link.latency_ms) == (0.1, 50.0)
    assert [each.usable_bytes for each in cluster.accelerators()] == [11 << 30, 40 << 30]


def test_unlike_links_stay_unlike() -> None:
    on = machines(("L4", "T4", "T4"))
    links = {**on.links, (0, 1): Rate(1e6, 0.05)}
    cluster = cluster_of(Machines(on.types, links), {"L4": 1 << 34, "T4": 1 << 33})
    assert {(each.source, each.target, each.gbps) for each in cluster.links} == {
        ("l4-0", "t4-0", 0.008),
        ("l4-0", "t4-1", 8.0),
        ("t4-0", "t4-1", 8.0),
    }


@pytest.mark.parametrize("text", ["", "fast", "3 * parsecs", "__import__('os') * mbps"])
def test_a_quantity_is_a_number_and_a_unit(text: str) -> None:
    with pytest.raises(InputError, match="mbps"):
        quantity(text)


def test_memory_above_the_tables_is_what_separate_pipelines_leave_and_on_a_line_before() -> None:
    assert [KV.entries("L4", layers) for layers in (1, 7, 10)] == [4_000_000, 1_750_000, 600_000]
    assert KV.entries("L4", 9) == pytest.approx(1_750_000 - 1_150_000 * 2 / 3, abs=1)
    with pytest.raises(InputError, match="11 layers on a L4"):
        KV.entries("L4", 11)
    assert KV.usable_bytes("L4", 10**9) == 10 * 10**9 + 600_000 * 4096


def test_without_the_artifact_the_rows_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    said = capsys.readouterr().out
    assert "helix_24, plan_seconds_24" in said
    assert "--artifact" in said


def test_a_folder_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Thesys-lab/Helix-ASPLOS25"):
        ground(tmp_path, "24")
