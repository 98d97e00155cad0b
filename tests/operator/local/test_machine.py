"""This machine as a cluster: GPUs as nvidia-smi lists them, processors shared out, threads and rates filled in."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata_operator.local import machine
from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.plan import DeviceRef
from strata_planner.contract.processors import Division
from strata_planner.question.catalogue import catalogue
from strata_planner.question.cluster import Cluster, Device, Node
from tests.operator.fakes import a_plan

MIB = 1 << 20


def a_processor(**changes: Any) -> DeviceProfile:
    return msgspec.structs.replace(catalogue().profile("cpu"), **changes)


def test_equal_gpus_are_one_device_of_a_count() -> None:
    lines = ["Tesla T4, 14900", "NVIDIA A100-SXM4-40GB, 40000", "Tesla T4, 15000"]
    assert machine.parse_gpus(lines) == [
        Device(type="Tesla-T4", count=2, memory_bytes=14900 * MIB),
        Device(type="A100-SXM4-40GB", count=1, memory_bytes=40000 * MIB),
    ]


@pytest.mark.parametrize(("cores", "stages", "threads"), [(8, 1, 8), (8, 3, 2), (2, 4, 1)])
def test_without_gpus_the_processor_is_cut_into_as_many_devices_as_stages(
    monkeypatch: pytest.MonkeyPatch, cores: int, stages: int, threads: int
) -> None:
    monkeypatch.setattr(machine, "_gpus", list)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 1000)
    cluster = machine.this_machine(stages)
    assert [device.threads for node in cluster.nodes for device in node.devices] == [threads] * stages
    assert {device.memory_bytes for node in cluster.nodes for device in node.devices} == {800 // stages}


@pytest.mark.parametrize(
    ("stages", "count", "threads"), [(1, 2, 32), (2, 2, 32), (3, 4, 16), (5, 6, 10)], ids=["1", "2", "3", "5"]
)
def test_no_device_lies_across_two_memories(
    monkeypatch: pytest.MonkeyPatch, stages: int, count: int, threads: int
) -> None:
    """Two sockets of 32 cores, of which one may not be used."""
    monkeypatch.setattr(machine, "_gpus", list)
    monkeypatch.setattr(machine, "memories", lambda: (frozenset(range(32)), frozenset(range(32, 65))))
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 1000)
    (node,) = machine.this_machine(stages).nodes
    assert node.devices == (Device(type="cpu", count=count, memory_bytes=800 // count, threads=threads),)


def test_each_slot_knows_which_of_the_machines_devices_are_its_own() -> None:
    nodes = (Node("a", (Device("cpu", count=2, threads=3),)), Node("b", (Device("cpu", threads=1),)))
    assert machine.divisions_of_slots(a_plan("a", "b"), Cluster(nodes=nodes)) == {
        "a": Division(0, 3),
        "b": Division(2, 3),
    }
    assert machine.divisions_of_slots(a_plan("a"), Cluster(nodes=(Node("a", (Device("T4"),)),))) == {}
    unlike = Node("a", (Device("cpu", threads=3), Device("cpu", threads=1)))
    assert machine.divisions_of_slots(a_plan("a", "b"), Cluster(nodes=(unlike, nodes[1]))) == {"b": Division(2, 3)}


def test_threads_that_a_file_leaves_open_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 6)
    nodes = (Node("a", (Device("cpu"), Device("T4"))), Node("b", (Device("cpu", threads=1),)))
    filled = machine.with_threads(Cluster(nodes=nodes))
    assert [device.threads for node in filled.nodes for device in node.devices] == [3, 0, 1]


def test_a_gateway_takes_of_each_slot_where_slots_fill_all_processors() -> None:
    """Whoever leaves it a processor pays nothing."""
    profile = a_processor(sequence_step_seconds=1e-5, gateway_token_seconds=2e-4)
    two = Cluster(nodes=tuple(Node(name, (Device("cpu", threads=2),)) for name in "ab"))
    told = {
        processors: machine.beside_gateway(profile, two, processors).sequence_step_seconds for processors in (2, 4, 5)
    }
    assert told == {2: 1e-5 + 1e-4, 4: 1e-5 + 1e-4, 5: 1e-5}
    gpus = Cluster(nodes=(Node("a", (Device("T4"),)),))
    assert machine.beside_gateway(profile, gpus, 1) == profile


def test_more_slots_than_processors_have_a_part_of_the_time_each() -> None:
    """As many requests keep as many devices busy at once: few have processors for themselves."""
    profile = a_processor(layer_overhead_seconds=1e-4, unpacked_per_second={"int8": 6e9})
    three = Cluster(nodes=tuple(Node(name, (Device("cpu", threads=1),)) for name in "abc"))
    assert machine.in_turns(profile, three, 3, None) == machine.in_turns(profile, three, 2, 2) == profile
    slowed = machine.in_turns(profile, three, 2, 8)
    assert slowed.flops_per_second == pytest.approx(profile.flops_per_second * 2 / 3)
    assert slowed.layer_overhead_seconds == pytest.approx(1.5e-4)
    assert slowed.unpacked_per_second == pytest.approx({"int8": 4e9})
    assert machine.in_turns(profile, three, 2, None) == slowed
    gpus = Cluster(nodes=(Node("a", (Device("T4", count=8),)),))
    assert machine.in_turns(profile, gpus, 1, None) == profile


def test_a_slot_computes_with_the_threads_of_its_devices() -> None:
    nodes = (Node("a", (Device("cpu", threads=3),)), Node("b", (Device("cpu", threads=1),)))
    assert machine.threads_of_slots(a_plan("a", "b"), Cluster(nodes=nodes)) == {"a": 3, "b": 1}


@pytest.mark.parametrize(("leader", "expected"), [(0, 3), (1, 5)])
def test_a_slot_on_unlike_devices_computes_with_those_of_the_first(leader: int, expected: int) -> None:
    nodes = (Node("a", (Device("cpu", threads=3), Device("cpu", threads=5))),)
    plan = a_plan("a")
    (replica,) = plan.replicas
    stage = msgspec.structs.replace(
        replica.stages[0], devices=tuple(DeviceRef("cpu", at, 1) for at in (leader, 1 - leader)), tensor_parallel=2
    )
    plan = msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=(stage,)),))
    assert machine.threads_of_slots(plan, Cluster(nodes=nodes)) == {"a": expected}


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max", "5", 2048), ("1500", "500", 1000), ("100000", "0", 2048)],
)
def test_free_memory_is_what_kernel_and_control_group_both_give(
    tmp_path: Path, limit: str, used: str, free: int
) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text(used)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 2 kB\n")
    assert machine.free_memory_bytes(tmp_path) == free
