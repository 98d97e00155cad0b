"""`strata operator` itself on the control plane of the test bed: real API server, etcd, scheduler and controllers, objects without kubelets.

Nodes say that they are Ready and nobody runs behind them, so that slots are scheduled and never serve: deployments stay in `Loading`, which
costs the operator more than serving ones. Called by `benchmarks.operator --testbed`; runs itself inside the test bed's world.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.operator_cluster import NAMESPACE, OTHERS, Size, a_deployment, a_node, a_pod
from benchmarks.rows import Row
from strata_operator.observe.kube import DEPLOYMENTS_OF_STRATA, NODES, PODS, Kind, Kube, connect
from tests.cluster.testbed.cluster import Cluster

Object = dict[str, Any]
NAMESPACES = Kind("v1", "namespaces", namespaced=False)
DEFINITION = Path("helm/strata/files/strata.dev_llmdeployments.yaml")
MODELS = Path("examples/models").resolve()
AT_ONCE = 16
LONGEST_SECONDS, STEADY_SECONDS = 600.0, 30.0
GRACE_SECONDS = 100_000  # nobody renews the nodes' leases


def measured_on_testbed(size: Size) -> list[Row]:
    """In a world of its own, which ends with it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        sizes = [str(number) for number in (size.nodes, size.pods, size.deployments)]
        inside = [sys.executable, "-m", "benchmarks.operator_testbed", *sizes, file.name]
        world = ["--name=bench", "run", "--nodes=0", f"--node-grace-seconds={GRACE_SECONDS}", *inside]
        subprocess.run([sys.executable, "-m", "tests.cluster.testbed", *world], check=True)
        return [Row(**each) for each in json.loads(Path(file.name).read_text())]


async def _measure(size: Size) -> list[dict[str, object]]:
    kube = connect()
    await _fill(kube, size)
    began = time.monotonic()
    await _all(kube.create(DEPLOYMENTS_OF_STRATA, a_deployment(number, MODELS)) for number in range(size.deployments))
    operator = _start_operator()
    try:
        planned = await _until_planned(kube, size, began)
        process = psutil.Process(operator.pid)
        before, since = process.cpu_times(), time.monotonic()
        await asyncio.sleep(STEADY_SECONDS)
        after, passed = process.cpu_times(), time.monotonic() - since
        used = (after.user + after.system - before.user - before.system) / passed
        held = process.memory_info().rss
        lost, others = await _lose_a_node(kube)
    finally:
        operator.terminate()
        operator.wait()
    return [
        {"name": f"all_planned_{size}", "value": planned, "unit": "s", "goal": 60.0, "lower_is_better": True},
        {"name": f"loading_cpu_{size}", "value": used, "unit": "of a core", "lower_is_better": True},
        {"name": f"operator_memory_{size}", "value": held / 1e6, "unit": "MB", "goal": 400.0, "lower_is_better": True},
        {"name": f"loss_to_new_plan_{size}", "value": lost, "unit": "s", "goal": 3.0, "lower_is_better": True},
        {
            "name": f"others_replanned_{size}",
            "value": others,
            "unit": "deployments",
            "goal": 0.0,
            "lower_is_better": True,
        },
    ]


async def _fill(kube: Kube, size: Size) -> None:
    Cluster.current().kubectl("apply", "--server-side", "-f", str(DEFINITION))
    Cluster.current().kubectl("wait", "--for=condition=Established", "crd/llmdeployments.strata.dev", "--timeout=30s")
    for name in (NAMESPACE, OTHERS):
        await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    await asyncio.sleep(2)  # until they have their service accounts, without which no pod is let in
    await _all(kube.create(NODES, a_node(number, size)) for number in range(size.nodes))
    await _all(kube.create(PODS, a_pod(number, size)) for number in range(size.pods))


async def _all(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(each: Coroutine[Any, Any, Any]) -> None:
        async with limit:
            await each

    await asyncio.gather(*(one(each) for each in work))


def _start_operator() -> "subprocess.Popen[bytes]":
    command = [
        "operator",
        f"--namespace={NAMESPACE}",
        "--runtime-image=runtime:1",
        "--health-port=0",
        "--metrics-port=0",
    ]
    log = Path(tempfile.gettempdir(), "strata-operator-benchmark.log").open("wb")  # noqa: SIM115  the process writes on
    return subprocess.Popen(
        [sys.executable, "-m", "strata_operator.cli", *command], stdout=log, stderr=log, env=os.environ
    )


async def _until_planned(kube: Kube, size: Size, began: float) -> float:
    while time.monotonic() - began < LONGEST_SECONDS:
        things = await kube.list(DEPLOYMENTS_OF_STRATA, NAMESPACE)
        if sum(bool((thing.get("status") or {}).get("plan")) for thing in things) == size.deployments:
            return time.monotonic() - began
        await asyncio.sleep(0.5)
    raise SystemExit("not all deployments were planned in time: see the operator's log")


async def _lose_a_node(kube: Kube) -> tuple[float, int]:
    """Seconds until the deployment of a node that is deleted has another plan, and how many others have one then."""
    before = await _epochs(kube)
    things = await kube.list(DEPLOYMENTS_OF_STRATA, NAMESPACE)
    stages = things[0]["status"]["stages"]
    node, name = stages[0]["node"], things[0]["metadata"]["name"]
    began = time.monotonic()
    await kube.delete(NODES, "", node)
    while time.monotonic() - began < LONGEST_SECONDS:
        now = await _epochs(kube)
        if now[name] != before[name]:
            return time.monotonic() - began, sum(now[each] != before[each] for each in before if each != name)
        await asyncio.sleep(0.1)
    raise SystemExit("the lost node was not planned without: see the operator's log")


async def _epochs(kube: Kube) -> dict[str, int]:
    things = await kube.list(DEPLOYMENTS_OF_STRATA, NAMESPACE)
    return {thing["metadata"]["name"]: thing["status"]["plan"]["epoch"] for thing in things}


if __name__ == "__main__":
    _nodes, _pods, _deployments, _file = sys.argv[1:]
    _rows = asyncio.run(_measure(Size(int(_nodes), int(_pods), int(_deployments))))
    Path(_file).write_text(json.dumps(_rows), encoding="utf-8")
