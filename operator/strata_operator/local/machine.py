"""This machine as the planner's Cluster: its GPUs if it has any, else its processors cut into as many devices as stages, or as it has memories (NUMA).

Called by `strata up` where no cluster file is given; fills in what a cluster file leaves open (threads, measured rates).
Measuring runs in a process of its own: it needs torch, which this package never imports.
"""

import csv
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from strata_operator.local.children import held_child
from strata_operator.local.errors import LocalError
from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.environment import SLOT_ENVIRONMENT
from strata_planner.contract.plan import Plan
from strata_planner.contract.processors import Division, Processors, cores, memories
from strata_planner.contract.values import from_json
from strata_planner.errors import ClusterError
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import Cluster, Device, Node

log = logging.getLogger(__name__)

MEASURE = (sys.executable, "-m", "strata_runtime.measuring.measure")
MEASURE_SECONDS = 240
USUAL_MEASURE_SECONDS = 50
FREE_MEMORY_SHARE = 0.8  # of what is free now: other programs of this machine go on
_MIB = 1 << 20


def this_machine(min_stages: int) -> Cluster:
    """GPUs on one node; without GPUs, `min_stages` nodes that share cores and free memory evenly; where processors lie beside several memories, one node
    with as many devices beside each.
    """
    gpus = _gpus()
    if gpus:
        return Cluster(nodes=(Node(name="local", devices=tuple(gpus)),))
    beside = memories()
    if len(beside) > 1:
        return Cluster(nodes=(Node(name="local", devices=(_beside_memories(beside, min_stages),)),))
    threads = max(1, cores() // min_stages)
    share = int(free_memory_bytes() * FREE_MEMORY_SHARE) // min_stages
    return Cluster(
        nodes=tuple(
            Node(name=f"cpu{number}", devices=(Device(type=CPU, memory_bytes=share, threads=threads),))
            for number in range(min_stages)
        )
    )


def _beside_memories(beside: Sequence[Processors], min_stages: int) -> Device:
    """Equal devices, none of which lies across two memories."""
    each = -(-min_stages // len(beside))
    count = each * len(beside)
    memory = int(free_memory_bytes() * FREE_MEMORY_SHARE) // count
    return Device(type=CPU, count=count, memory_bytes=memory, threads=max(1, min(map(len, beside)) // each))


def with_threads(cluster: Cluster) -> Cluster:
    """CPU devices that name no threads share the cores of this machine evenly."""
    count = sum(device.count for device in _processor_devices(cluster))
    share = max(1, cores() // max(1, count))

    def fill(device: Device) -> Device:
        if device.type != CPU or device.threads:
            return device
        return msgspec.structs.replace(device, threads=share)

    nodes = tuple(
        msgspec.structs.replace(node, devices=tuple(fill(device) for device in node.devices)) for node in cluster.nodes
    )
    return msgspec.structs.replace(cluster, nodes=nodes)


def with_measured_rates(cluster: Cluster, in_flight: int | None = None, *, fresh: bool = False) -> Cluster:
    """CPU devices without a profile of their own get the rates of this processor; `fresh`: measured now, whatever is kept. `in_flight`: requests, each of
    which keeps one device busy; None: there are enough for all. Raises LocalError.
    """
    for threads in cluster.cpu_threads():
        log.info("measuring the processor, threads: %d; %d s, once for this machine", threads, USUAL_MEASURE_SECONDS)
        measured = _measure(threads, fresh=fresh)
        own = beside_gateway(measured, cluster, cores())
        cluster = cluster.with_profile(in_turns(own, cluster, cores(), in_flight))
    return cluster


def in_turns(profile: DeviceProfile, cluster: Cluster, processors: int, in_flight: int | None) -> DeviceProfile:
    """Where more threads want to compute than there are processors, each device has its part of the time: of all devices of the cluster, which a plan may
    leave idle in part. A request keeps one device of a stage's group busy, or all of them: then it is told too fast.
    """
    wanting = _threads(_processor_devices(cluster))
    if in_flight is not None:
        wanting = min(wanting, in_flight * max(1, profile.threads))
    return profile.slowed(processors / wanting) if wanting > processors else profile


def beside_gateway(profile: DeviceProfile, cluster: Cluster, processors: int) -> DeviceProfile:
    """Where slots fill all processors, the gateway works on theirs: each slot loses its share of what every token takes there."""
    slots = _processor_devices(cluster)
    count = sum(device.count for device in slots)
    if not count or _threads(slots) < processors:
        return profile
    seconds = profile.sequence_step_seconds + profile.gateway_token_seconds / count
    return msgspec.structs.replace(profile, sequence_step_seconds=seconds)


def _processor_devices(cluster: Cluster) -> list[Device]:
    return [device for node in cluster.nodes for device in node.devices if device.type == CPU]


def _threads(devices: Iterable[Device]) -> int:
    """That want to compute at once."""
    return sum(device.count * max(1, device.threads) for device in devices)


def check_threads(cluster: Cluster) -> None:
    """Raises ClusterError for processors that this machine does not have: more threads than cores only wait for each other."""
    most = cores()
    problems = [
        f"nodes[{at}].devices[{number}].threads: {device.threads}: this machine has {most} processors for its slots; give "
        f"at most {most}, or leave it out for an even share"
        for at, node in enumerate(cluster.nodes)
        for number, device in enumerate(node.devices)
        if device.type == CPU and device.threads > most
    ]
    if problems:
        raise ClusterError(*problems)


def threads_of_slots(plan: Plan, cluster: Cluster) -> dict[str, int]:
    """CPU threads that each slot of the plan computes with: those of the first devices of its stages; other ranks are told theirs."""
    threads = {each.place: max(1, each.profile.threads) for each in cluster.accelerators()}
    found: dict[str, int] = {}
    for stage in plan.stages:
        found[stage.slot] = max(found.get(stage.slot, 1), threads.get(stage.places[0], 1))
    return found


def divisions_of_slots(plan: Plan, cluster: Cluster) -> dict[str, Division]:
    """Of each slot on processors: which of all devices that the cluster cuts this machine into is its node's first. None of a node whose
    devices have unlike numbers of threads: parts of a machine are alike.
    """
    counts = {node.name: sum(each.count for each in node.devices if each.type == CPU) for node in cluster.nodes}
    total, first = (
        sum(counts.values()),
        dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False)),
    )
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    alike = {
        node.name for node in cluster.nodes if len({each.threads for each in node.devices if each.type == CPU}) == 1
    }
    return {stage.slot: Division(first[stage.node], total) for stage in stages if stage.node in alike}


def parse_gpus(lines: Iterable[str]) -> list[Device]:
    """`nvidia-smi --query-gpu=name,memory.free --format=csv,noheader,nounits` -> devices, equal ones together."""
    free: dict[str, list[int]] = {}
    for name, memory in csv.reader(lines, skipinitialspace=True):
        free.setdefault(name.strip().removeprefix("NVIDIA ").replace(" ", "-"), []).append(int(memory) * _MIB)
    return [Device(type=name, count=len(each), memory_bytes=min(each)) for name, each in free.items()]


def gpu_count() -> int:
    """GPUs that the driver lists here."""
    return sum(device.count for device in _gpus())


def _gpus() -> list[Device]:
    command = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603  fixed words
    except (OSError, subprocess.SubprocessError):
        return []  # no driver, no GPUs
    return parse_gpus(listed.splitlines())


def _measure(threads: int, *, fresh: bool) -> DeviceProfile:
    command = [*MEASURE, "--threads", str(threads), "--json", *(["--fresh"] if fresh else [])]
    environment = {**SLOT_ENVIRONMENT, **os.environ}  # what is measured is what a slot does
    pipe = subprocess.PIPE
    with held_child(lambda: subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment)) as process:  # noqa: S603  our own module
        try:
            measured, errors = process.communicate(timeout=MEASURE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise LocalError(
                f"measuring this processor took more than {MEASURE_SECONDS} s; is it very busy?"
            ) from error
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise LocalError(f"measuring this processor failed: {' '.join(last) or f'exit code {process.returncode}'}")
    return from_json(measured, DeviceProfile)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """What the kernel and this control group (version 2 or 1) would still give."""
    free = [_meminfo(root / "proc/meminfo").get("MemAvailable", 4 << 30)]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        group = root / "sys/fs/cgroup"
        if (group / limit).exists() and (text := (group / limit).read_text().strip()) != "max":
            free.append(int(text) - int((group / used).read_text()))
    return max(0, min(free))


def _meminfo(path: Path) -> Mapping[str, int]:
    if not path.exists():
        return {}
    fields = (line.split() for line in path.read_text().splitlines())
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in fields}
