"""The running cluster as its tests use it: objects, nodes, losses, fleets.

Made by `bring_up` inside a world, found again by `Cluster.current` in any process inside the same world. Everything it knows is
in files, so that the command line, a test session and a shell can use one cluster in turn.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.testbed import fleet, network
from tests.cluster.testbed.control_plane import ControlPlane
from tests.cluster.testbed.credentials import Credentials
from tests.cluster.testbed.images import write_image
from tests.cluster.testbed.nodes import DEFAULT_NODES, Node, NodeSpec, load_node
from tests.cluster.testbed.processes import TestbedError, output_of, wait_until
from tests.cluster.testbed.tools import tool_path
from tests.cluster.testbed.world import ENVIRONMENT_VARIABLE

Manifest = dict[str, Any]

TOOL_SECONDS = 150.0
"""Longer than any `--timeout` that kubectl and helm are given here: those say what they waited for."""

_USERS = {
    "admin": "system:masters",
    "system:kube-controller-manager": None,
    "system:kube-scheduler": None,
    "system:kube-proxy": None,
}


@dataclass(frozen=True)
class Cluster:
    """A cluster by the directory of its world."""

    directory: Path

    @classmethod
    def current(cls) -> "Cluster":
        """The cluster of the world that this process runs in."""
        directory = os.environ.get(ENVIRONMENT_VARIABLE)
        if not directory:
            raise TestbedError(
                "this process is outside of any testbed: run it as `python -m tests.cluster.testbed run <command>`"
            )
        return cls(Path(directory))

    @property
    def credentials(self) -> Credentials:
        """Certificates and kubeconfigs."""
        return Credentials(self.directory / "pki")

    @property
    def kubeconfig(self) -> Path:
        """An administrator's kubeconfig."""
        return self.credentials.kubeconfig("admin")

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints; `TestbedError` with its complaint where it fails, or does not end within TOOL_SECONDS."""
        return self._tool("kubectl", arguments, stdin)

    def helm(self, *arguments: str) -> str:
        """What helm prints; `TestbedError` with its complaint where it fails, or does not end within TOOL_SECONDS."""
        return self._tool("helm", arguments, None)

    def _tool(self, name: str, arguments: Sequence[str], stdin: str | None) -> str:
        command = [str(tool_path(name)), f"--kubeconfig={self.kubeconfig}", *arguments]
        return output_of(command, stdin=stdin, seconds=TOOL_SECONDS)

    def apply(self, *objects: Manifest) -> None:
        """`kubectl apply` of objects."""
        self.kubectl("apply", "-f", "-", stdin=_as_list(objects))

    def dry_run(self, *objects: Manifest) -> None:
        """Let the API server validate and admit objects without keeping them; `TestbedError` with its refusal."""
        self.kubectl("apply", "--dry-run=server", "-f", "-", stdin=_as_list(objects))

    def get(self, *arguments: str) -> Manifest:
        """`kubectl get ... -o json`: an object, or a list with `items`."""
        found: Manifest = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def nodes(self) -> dict[str, Node]:
        """The real nodes that were ever added, by name, killed ones too."""
        records = sorted((self.directory / "nodes").glob("*/node.json"))
        return {record.parent.name: load_node(record.parent, self._group(record.parent.name)) for record in records}

    def add_nodes(self, *specs: NodeSpec) -> None:
        """Start real nodes at once and wait until they are Ready."""
        first_index = max((node.index for node in self.nodes().values()), default=-1) + 1
        added = [
            Node(spec, first_index + offset, self.directory / "nodes" / spec.name, self._group(spec.name))
            for offset, spec in enumerate(specs)
        ]
        self._start(added)

    def kill_node(self, name: str) -> None:
        """Lose a node as when its machine loses power; Kubernetes notices after its grace period."""
        self._node(name).kill()

    def restart_node(self, name: str) -> None:
        """Bring a killed node back, empty, under its name and addresses, and wait until it is Ready."""
        self._start([self._node(name)])

    def _node(self, name: str) -> Node:
        nodes = self.nodes()
        if name not in nodes:
            raise TestbedError(f"no real node is called {name!r}; there are {', '.join(nodes)}")
        return nodes[name]

    def _start(self, nodes: list[Node]) -> None:
        def start(node: Node) -> None:
            node.start(self.credentials.add_user(f"system:node:{node.spec.name}", "system:nodes"), self._image)

        began = time.time()
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(start, nodes))
        for node in nodes:
            wait_until(
                lambda node=node: self.is_ready(node.spec.name, since=began),  # type: ignore[misc]
                f"Ready node {node.spec.name}",
                60,
                [node.kubelet, node.containerd],
            )

    @property
    def _image(self) -> Path:
        return self.directory / "image.tar"

    def _group(self, node: str) -> str:
        return f"{self.directory.name}/{node}"

    def is_ready(self, name: str, *, since: float = 0.0) -> bool:
        """Whether a node's Ready condition is true, and was heard at or after `since` (seconds of the epoch)."""
        for node in self.get("nodes")["items"]:
            for condition in node["status"].get("conditions", []):
                if node["metadata"]["name"] == name and condition["type"] == "Ready" and condition["status"] == "True":
                    return _epoch_seconds(condition["lastHeartbeatTime"]) >= int(since)
        return False

    def make_gpu_node(self, name: str, product: str, gpus: int) -> None:
        """Label a node and give it GPUs that are not there, as GPU feature discovery and the device plugin would say it."""
        model = _gpu_model(product)
        labels = {"metadata": {"labels": fleet.gpu_labels(model, gpus)}}
        self.kubectl("patch", "node", name, "--type=merge", f"--patch={json.dumps(labels)}")
        offered = {"nvidia.com/gpu": str(gpus)}
        status = {"status": {"capacity": offered, "allocatable": offered}}
        self.kubectl("patch", "node", name, "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")

    def remove_gpus(self, name: str) -> None:
        """Take back what `make_gpu_node` gave."""
        labels = [label for label in self.get("node", name)["metadata"]["labels"] if label.startswith("nvidia.com/")]
        self.kubectl("label", "node", name, *(f"{label}-" for label in labels))
        status = {"status": {"capacity": {"nvidia.com/gpu": None}, "allocatable": {"nvidia.com/gpu": None}}}
        self.kubectl("patch", "node", name, "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")

    def add_fleet(self, products: Sequence[str], *, gpus_per_node: int = 1, prefix: str = "fleet") -> list[str]:
        """Add a simulated node for each product in the list, over three zones; their names. Returns when all are Ready."""
        kwok = fleet.start_kwok(self.directory, self.kubeconfig, self.node_grace_seconds)
        names = [f"{prefix}-{number:03}" for number in range(len(products))]
        nodes = [
            fleet.simulated_node(name, _gpu_model(product), gpus_per_node, f"zone-{'abc'[number % 3]}")
            for number, (name, product) in enumerate(zip(names, products, strict=True))
        ]
        self.kubectl("create", "-f", "-", stdin=_as_list(nodes))
        wait_until(lambda: self._ready_names() >= set(names), f"{len(names)} Ready simulated nodes", 120, [kwok])
        return names

    def remove_fleet(self) -> None:
        """Delete all simulated nodes and their pods."""
        self.kubectl("delete", "nodes", "--selector=type=kwok", "--wait=false")

    def _ready_names(self) -> set[str]:
        return {
            node["metadata"]["name"]
            for node in self.get("nodes")["items"]
            for condition in node["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        }

    @property
    def node_grace_seconds(self) -> int:
        """After how long a silence a node counts as lost."""
        return int((self.directory / "node-grace-seconds").read_text())


def bring_up(directory: Path, specs: Sequence[NodeSpec] = DEFAULT_NODES, node_grace_seconds: int = 8) -> Cluster:
    """Start a cluster inside the world of that directory: control plane, names and services, then the nodes.

    Without nodes (a cluster for fleets) there is no kube-proxy either: nothing would send packets to a service.
    """
    cluster = Cluster(directory)
    (directory / "node-grace-seconds").write_text(str(node_grace_seconds))
    network.create_links(directory / "resolv.conf")
    cluster.credentials.create()
    for user, group in _USERS.items():
        cluster.credentials.add_user(user, group)
    write_image(cluster._image)
    ControlPlane(directory, cluster.credentials).start(node_grace_seconds)
    dns = network.start_dns(directory, cluster.credentials)
    if specs:
        network.start_proxy(directory, cluster.credentials, specs[0].name)
        cluster.add_nodes(*specs)
    cluster.apply(*network.dns_objects())
    network.wait_for_dns(dns)
    wait_until(lambda: bool(cluster.get("serviceaccounts")["items"]), "default service account", 30)
    return cluster


def _gpu_model(product: str) -> fleet.GpuModel:
    if product not in fleet.GPU_MODELS:
        raise TestbedError(f"no GPU product {product!r} is known here; there are {', '.join(fleet.GPU_MODELS)}")
    return fleet.GPU_MODELS[product]


def _as_list(objects: Iterable[Manifest]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


def _epoch_seconds(timestamp: str) -> int:
    return int(time.mktime(time.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ")) - time.timezone)
