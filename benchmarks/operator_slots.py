"""What runs in the place of kubelets: pods that are said to run, slots that load nothing, and gateways that reach every leader.

One process sees to all pods of a namespace and answers at their own addresses: inside the test bed's world these lead nowhere else. Started
by `operator_testbed`. A node that is lost falls silent with its pods: its name is written into the folder that `answering_slots` gives.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import kubernetes.client
import zmq

from strata_operator.observe.kube import PODS, SECRETS, configured, connect
from strata_operator.observe.source import OURS
from strata_operator.render.names import COMPONENT_LABEL, CONTROL_PORT, CONTROL_SECRET_KEY, SLOT_LABEL, process_secret
from strata_operator.render.objects import secret_text
from strata_planner.contract.control import Watch, encode, gateway_request_decoder, slot_request_decoder
from strata_planner.contract.keys import curve_secret_key
from tests.cluster.testbed.addresses import SIMULATED_PODS
from tests.operator.fakes import FakeGateway, FakeSlot

Object = dict[str, Any]
LOOK_SECONDS = 2.0


@contextmanager
def answering_slots(namespace: str) -> Iterator[Path]:
    """Gives the folder that lost nodes are named in, a file each."""
    subprocess.run(["ip", "route", "replace", "local", SIMULATED_PODS, "dev", "lo"], check=True)
    with tempfile.TemporaryDirectory() as lost:
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.operator_slots", namespace, lost])
        try:
            yield Path(lost)
        finally:
            process.kill()
            process.wait()


@dataclass
class Process:
    """One slot or gateway behind its pod's address."""

    node: str
    it: Any  # a FakeSlot or a FakeGateway
    socket: "zmq.Socket[bytes]"
    watchers: set[bytes] = field(default_factory=set)

    def answer(self) -> None:
        """Loads while it is asked how far it is."""
        identity, payload = self.socket.recv_multipart()
        decoder = slot_request_decoder if isinstance(self.it, FakeSlot) else gateway_request_decoder
        request = decoder.decode(payload)
        if isinstance(request, Watch):
            self.watchers.add(identity)
        if isinstance(self.it, FakeSlot) and self.it.prepare.phase == "loading":
            self.it.finish_loading()
        self.socket.send_multipart([identity, encode(self.it.handle(request))])


class Processes:
    """Of one namespace, as its pods come and go."""

    def __init__(self, namespace: str, lost: Path) -> None:
        self._namespace, self._lost = namespace, lost
        self._context, self._poller = zmq.Context(), zmq.Poller()
        self._by_address: dict[str, Process] = {}
        self._by_socket: dict[Any, Process] = {}

    def take(self, pods: list[Object], secrets: dict[str, Object]) -> None:
        for pod in pods:
            address, labels = (pod.get("status") or {}).get("podIP"), pod["metadata"].get("labels") or {}
            name = labels.get(SLOT_LABEL) or pod["metadata"]["name"].rsplit("-", 2)[0]
            secret = secrets.get(process_secret(name))
            if address and secret and address not in self._by_address:
                self._begin(address, pod["spec"]["nodeName"], name, labels[COMPONENT_LABEL], secret)
        there = {(pod.get("status") or {}).get("podIP") for pod in pods}
        self._end([address for address in self._by_address if address not in there])

    def fall_silent(self) -> None:
        gone = {path.name for path in self._lost.iterdir()}
        self._end([address for address, each in self._by_address.items() if each.node in gone])

    def answer(self, seconds: float) -> None:
        for socket, _ in self._poller.poll(int(seconds * 1000)):
            self._by_socket[socket].answer()

    def _begin(self, address: str, node: str, name: str, component: str, secret: Object) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey = curve_secret_key(secret_text(secret, CONTROL_SECRET_KEY), "server")
        socket.bind(f"tcp://{address}:{CONTROL_PORT}")
        it = FakeSlot(name) if component == "slot" else FakeGateway()
        self._by_address[address] = self._by_socket[socket] = Process(node, it, socket)
        self._poller.register(socket, zmq.POLLIN)

    def _end(self, addresses: list[str]) -> None:
        for address in addresses:
            process = self._by_address.pop(address)
            del self._by_socket[process.socket]
            self._poller.unregister(process.socket)
            process.socket.close(linger=0)


class Kubelet:
    """Says of pods that have a node that they run there, each at an address of its own."""

    def __init__(self) -> None:
        self._api = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(configured()))
        self._addresses = iter(ip_network(SIMULATED_PODS).hosts())

    def run(self, pods: list[Object]) -> None:
        for pod in pods:
            if pod["spec"].get("nodeName") and not (pod.get("status") or {}).get("podIP"):
                pod["status"] = self._running(pod)
                meta = pod["metadata"]
                self._api.patch_namespaced_pod_status(meta["name"], meta["namespace"], {"status": pod["status"]})

    def _running(self, pod: Object) -> Object:
        address, since = str(next(self._addresses)), pod["metadata"]["creationTimestamp"]
        condition = {"status": "True", "lastTransitionTime": since}
        container = {
            "ready": True,
            "restartCount": 0,
            "image": "",
            "imageID": "",
            "state": {"running": {"startedAt": since}},
        }
        return {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": name, **condition} for name in ("Initialized", "Ready", "ContainersReady")],
            "containerStatuses": [{"name": each["name"], **container} for each in pod["spec"]["containers"]],
        }


async def _seen(namespace: str) -> tuple[list[Object], dict[str, Object]]:
    kube = connect()
    pods = await kube.list(PODS, namespace, OURS)
    secrets = await kube.list(SECRETS, namespace, OURS)
    return pods, {each["metadata"]["name"]: each for each in secrets}


def main(namespace: str, lost: Path) -> None:
    processes, kubelet, looked = Processes(namespace, lost), Kubelet(), 0.0
    while True:
        if time.monotonic() - looked > LOOK_SECONDS:
            pods, secrets = asyncio.run(_seen(namespace))
            kubelet.run(pods)
            processes.take(pods, secrets)
            looked = time.monotonic()
        processes.fall_silent()
        processes.answer(0.1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
