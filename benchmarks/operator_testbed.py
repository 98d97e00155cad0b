"""`strata operator` itself on the control plane of the test bed: real API server, etcd, scheduler and controllers.

There are no kubelets: nodes say that they are Ready, other people's pods have a node and nobody runs them, and one process answers for the
slots and gateways that the operator starts (`operator_slots`).

`benchmarks.operator --testbed` runs `fill`, then `measure`, inside a world of its own. By hand, in a world that stays up:
`python -m tests.cluster.testbed --name=bench up --nodes=0 --node-grace-seconds=100000`, then
`python -m tests.cluster.testbed --name=bench run python -m benchmarks.operator_testbed fill 1000/30000/100`, then the same with `measure`.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.operator_cluster import NAMESPACE, OTHERS, Size, a_deployment, a_node, a_pod
from benchmarks.operator_slots import answering_slots
from benchmarks.rows import Row
from strata_operator.observe.kube import DEPLOYMENTS_OF_STRATA, NODES, PODS, Kind, Kube, configured, connect
from strata_operator.observe.streams import tls_of
from tests.cluster.testbed.cluster import Cluster

Object = dict[str, Any]
NAMESPACES = Kind("v1", "namespaces", namespaced=False)
DEFINITION = Path("helm/strata/files/strata.dev_llmdeployments.yaml")
MODELS = Path("examples/models").resolve()
CONNECTIONS = 32
LONGEST_SECONDS, STEADY_SECONDS = 600.0, 20.0
GRACE_SECONDS = 100_000  # nobody renews the nodes' leases
# A file: where cProfile leaves what it has seen of the operator.
PROFILE = os.environ.get("STRATA_BENCHMARK_PROFILE", "")


def measured_on_testbed(size: Size) -> list[Row]:
    """In a world of its own, which ends with it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        inside = [sys.executable, "-m", "benchmarks.operator_testbed", "both", as_text(size), f"--rows={file.name}"]
        world = ["--name=bench", "run", "--nodes=0", f"--node-grace-seconds={GRACE_SECONDS}", *inside]
        subprocess.run([sys.executable, "-m", "tests.cluster.testbed", *world], check=True)
        return [Row(**each) for each in json.loads(Path(file.name).read_text())]


def as_text(size: Size) -> str:
    return f"{size.nodes}/{size.pods}/{size.deployments}"


# What is there before the operator starts.


class Filler:
    """Creates objects over many connections: the official client would be what takes the time."""

    def __init__(self, session: aiohttp.ClientSession, host: str) -> None:
        self._session, self._host = session, host
        self._limit = asyncio.Semaphore(2 * CONNECTIONS)

    async def all(self, kind: Kind, things: Iterable[Object]) -> None:
        async with asyncio.TaskGroup() as group:
            for thing in things:
                await self._limit.acquire()
                group.create_task(self._one(kind, thing))

    async def _one(self, kind: Kind, thing: Object) -> None:
        try:
            await self.send("POST", kind.path(thing["metadata"].get("namespace", "")), thing)
        finally:
            self._limit.release()

    async def send(self, method: str, path: str, body: Object | None = None) -> Object:
        async with self._session.request(method, self._host + path, json=body) as answer:
            if answer.status >= 400:
                raise SystemExit(f"{method} {path}: {answer.status} {(await answer.text())[:500]}")
            return dict(await answer.json())


@asynccontextmanager
async def a_filler() -> AsyncIterator[Filler]:
    configuration = configured()
    connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=tls_of(configuration))
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Filler(session, configuration.host)


async def fill(size: Size) -> None:
    """Nodes, and other people's pods on them."""
    cluster = Cluster.current()
    cluster.kubectl("apply", "--server-side", "-f", str(DEFINITION))
    await _until(lambda: '"Established"' in cluster.kubectl("get", "crd", "llmdeployments.strata.dev", "-o", "json"))
    for name in (NAMESPACE, OTHERS):
        cluster.kubectl("create", "namespace", name)
    await _until(lambda: all(_has_account(cluster, name) for name in (NAMESPACE, OTHERS)))
    began = time.monotonic()
    async with a_filler() as filler:
        await filler.all(NODES, (a_node(number, size) for number in range(size.nodes)))
        await filler.all(PODS, (a_pod(number, size) for number in range(size.pods)))
    print(f"{size.nodes} nodes and {size.pods} pods made in {time.monotonic() - began:.0f} s", flush=True)
    await _until(lambda: not any(node["spec"].get("taints") for node in cluster.get("nodes")["items"]), 5.0)
    print(f"all nodes may be used after {time.monotonic() - began:.0f} s", flush=True)


def _has_account(cluster: Cluster, namespace: str) -> bool:
    """Without which no pod is let in."""
    return bool(cluster.get("serviceaccounts", f"--namespace={namespace}")["items"])


async def _until(is_so: Callable[[], bool], every: float = 0.2) -> None:
    while not await asyncio.to_thread(is_so):  # noqa: ASYNC110  nobody tells
        await asyncio.sleep(every)


# What is measured.


async def measure(size: Size) -> list[dict[str, object]]:
    """From deployments that are there to one at rest, then a node's loss."""
    kube = connect()
    async with a_filler() as filler:
        await filler.all(DEPLOYMENTS_OF_STRATA, (a_deployment(number, MODELS) for number in range(size.deployments)))
    began = time.monotonic()
    operator = _start_operator()
    process = psutil.Process(operator.pid)
    try:
        planned = await _until_all(kube, size, began, lambda status: bool(status.get("plan")))
        start_cpu = _cpu(process)
        loading, _ = await _used(process, STEADY_SECONDS)
        with answering_slots(NAMESPACE) as silent:
            ready = await _until_all(kube, size, began, lambda status: status.get("phase") == "Ready")
            await asyncio.sleep(STEADY_SECONDS / 2)
            steady, peak = await _used(process, STEADY_SECONDS)
            plain = await _churned(process, size)
            lost, others = await _lose_a_node(kube, silent)
    finally:
        operator.terminate()
        operator.wait()

    def row(name: str, value: float, unit: str, goal: float | None = None) -> dict[str, object]:
        return {"name": f"{name}_{size}", "value": value, "unit": unit, "goal": goal, "lower_is_better": True}

    return [
        row("all_planned", planned, "s", 60.0),
        row("all_planned_cpu", start_cpu, "s of a core"),
        row("loading_cpu", loading, "of a core"),
        row("all_ready", ready, "s"),
        row("steady_cpu", steady, "of a core", 0.05),
        row("churned_cpu", plain, "of a core"),
        row("operator_memory", peak / 1e6, "MB", 400.0),
        row("loss_to_new_plan", lost, "s", 3.0),
        row("others_replanned", others, "deployments", 0.0),
    ]


def _start_operator() -> "subprocess.Popen[bytes]":
    options = (f"--namespace={NAMESPACE}", "--runtime-image=runtime:1", "--health-port=0", "--metrics-port=0")
    profiler = ("-m", "cProfile", "-o", PROFILE) if PROFILE else ()
    command = [sys.executable, *profiler, "-m", "strata_operator.cli", "operator", *options]
    log = Path(tempfile.gettempdir(), "strata-operator-benchmark.log").open("wb")  # noqa: SIM115  the process writes on
    return subprocess.Popen(command, stdout=log, stderr=log)


async def _until_all(kube: Kube, size: Size, began: float, is_so: Callable[[Object], bool]) -> float:
    """Seconds since `began` until the status of every deployment is so."""
    while time.monotonic() - began < LONGEST_SECONDS:
        things = await kube.list(DEPLOYMENTS_OF_STRATA, NAMESPACE)
        so = sum(is_so(thing.get("status") or {}) for thing in things)
        print(f"{time.monotonic() - began:.0f} s: {so}", end="  ", flush=True)
        if so == size.deployments:
            print()
            return time.monotonic() - began
        await asyncio.sleep(2.0)
    raise SystemExit(f"only {so} deployments were so in {LONGEST_SECONDS:.0f} s: see the operator's log")


def _cpu(process: psutil.Process) -> float:
    """Of the operator itself, not of the processes that plan."""
    times = process.cpu_times()
    return times.user + times.system


async def _used(process: psutil.Process, seconds: float) -> tuple[float, float]:
    """Share of a core, and bytes at the end."""
    before, since = _cpu(process), time.monotonic()
    await asyncio.sleep(seconds)
    share, held = (_cpu(process) - before) / (time.monotonic() - since), float(process.memory_info().rss)
    print(f"{share:.3f} of a core, {held / 1e6:.0f} MB", flush=True)
    return share, held


async def _churned(process: psutil.Process, size: Size) -> float:
    """Share of a core while 50 pods of others end each second, and as many begin."""
    async with a_filler() as filler:
        churning = asyncio.create_task(_churn(filler, size))
        try:
            used, _ = await _used(process, STEADY_SECONDS)
        finally:
            churning.cancel()
            await asyncio.gather(churning, return_exceptions=True)
    return used


async def _churn(filler: Filler, size: Size) -> None:
    number = 0
    while True:
        began = time.monotonic()
        for _ in range(5):
            pod = a_pod(number % size.pods, size)
            await filler.send("DELETE", f"{PODS.path(OTHERS, pod['metadata']['name'])}?gracePeriodSeconds=0")
            await filler.send("POST", PODS.path(OTHERS), pod)
            number += 1
        await asyncio.sleep(max(0.0, 0.1 - (time.monotonic() - began)))


async def _lose_a_node(kube: Kube, silent: Path) -> tuple[float, int]:
    """Seconds until the deployment of a node that is deleted has another plan, and how many others have one then."""
    before = await _epochs(kube)
    things = await kube.list(DEPLOYMENTS_OF_STRATA, NAMESPACE)
    node, name = things[0]["status"]["stages"][0]["node"], things[0]["metadata"]["name"]
    began = time.monotonic()
    (silent / node).touch()
    await kube.delete(NODES, "", node)
    while time.monotonic() - began < LONGEST_SECONDS:
        thing = await kube.get(DEPLOYMENTS_OF_STRATA, NAMESPACE, name)
        if thing and thing["status"]["plan"]["epoch"] != before[name]:
            took = time.monotonic() - began
            await asyncio.sleep(5.0)
            now = await _epochs(kube)
            return took, sum(now[each] != before[each] for each in before if each != name)
        await asyncio.sleep(0.1)
    raise SystemExit("the lost node was not planned without: see the operator's log")


async def _epochs(kube: Kube) -> dict[str, int]:
    things = await kube.list(DEPLOYMENTS_OF_STRATA, NAMESPACE)
    return {thing["metadata"]["name"]: thing["status"]["plan"]["epoch"] for thing in things}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator_testbed")
    parser.add_argument("what", choices=("fill", "measure", "both"))
    parser.add_argument("size", help="nodes/pods/deployments")
    parser.add_argument("--rows", type=Path, help="write what was measured to this file")
    chosen = parser.parse_args()
    size = Size(*map(int, chosen.size.split("/")))
    if chosen.what != "measure":
        asyncio.run(fill(size))
    if chosen.what != "fill":
        rows = asyncio.run(measure(size))
        for row in rows:
            print(row["name"], row["value"], row["unit"], flush=True)
        if chosen.rows:
            chosen.rows.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
