"""Real nodes: for each a containerd and a kubelet with a name, an address, processors and memory of its own.

All are processes of one world, so `kill` can take a node away as a machine that loses power goes: its pods' links first, then every
process, with nothing said to anyone. Called by `cluster`; knows nothing of the control plane but a kubeconfig.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.cluster.testbed import addresses, cgroups, images, network
from tests.cluster.testbed.processes import Daemon, TestbedError, call, wait_until
from tests.cluster.testbed.tools import tool_path
from tests.cluster.testbed.world import mounts_below, remove_tree

EVICTION_BYTES = 50 * 2**20
"""A kubelet evicts pods when the machine has less memory left; it is no part of what the node offers."""

_GiB = 2**30


@dataclass(frozen=True)
class NodeSpec:
    """What a node is to be. `cpus` and `memory_bytes` are what it offers to pods, and what the kernel holds its pods to."""

    name: str
    cpus: float
    memory_bytes: int
    labels: Mapping[str, str] = field(default_factory=lambda: {"strata.dev/device": "cpu"})


DEFAULT_NODES = (
    NodeSpec("node-a", cpus=2.0, memory_bytes=4 * _GiB),
    NodeSpec("node-b", cpus=1.5, memory_bytes=3 * _GiB),
    NodeSpec("node-c", cpus=1.0, memory_bytes=2 * _GiB),
)


@dataclass(frozen=True)
class Node:
    """One node's files and processes; `index` gives its addresses, `group` its control group."""

    spec: NodeSpec
    index: int
    directory: Path
    group: str

    @property
    def containerd(self) -> Daemon:
        """Its container runtime."""
        return Daemon("containerd", self.directory)

    @property
    def kubelet(self) -> Daemon:
        """Its kubelet."""
        return Daemon("kubelet", self.directory)

    @property
    def socket(self) -> Path:
        """Where its container runtime listens."""
        return self.directory / "containerd.sock"

    def start(self, kubeconfig: Path, image: Path) -> None:
        """Start the container runtime, give it the pod image, start the kubelet. The node becomes Ready some seconds later."""
        self._check_fits_machine()
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "node.json").write_text(json.dumps({**asdict(self.spec), "index": self.index}))
        cgroups.create(f"{self.group}/system")
        cgroups.limit_cpus(self.group, self.spec.cpus)
        network.add_machine_address(self.index)
        self._start_containerd()
        images.import_image(image, self.socket)
        self._start_kubelet(kubeconfig)

    def kill(self) -> None:
        """Take the node away without a word, then forget what it had: started again, it is a new machine of the same name."""
        network.disconnect_pods(self.spec.name)
        cgroups.kill(self.group)
        for mount in mounts_below(self.directory):
            call("umount", "--lazy", mount)
        self._remove_networks()
        cgroups.remove(self.group)
        record = (self.directory / "node.json").read_text()
        remove_tree(self.directory)
        self.directory.mkdir()
        (self.directory / "node.json").write_text(record)

    def _remove_networks(self) -> None:
        """The network namespaces and address leases of its pods."""
        state = Path("/var/lib/cni")
        for result in state.glob(f"results/{network.network_name(self.spec.name)}-*"):
            for interface in json.loads(result.read_text())["result"]["interfaces"]:
                if sandbox := interface.get("sandbox"):
                    subprocess.run(
                        ["ip", "netns", "delete", Path(sandbox).name], check=False, capture_output=True, timeout=30
                    )
            result.unlink()
        # The record of the last address stays: an address given again at once meets neighbours that remember its old link.
        for lease in (state / "networks" / network.network_name(self.spec.name)).glob("*.*.*.*"):
            lease.unlink()

    def _check_fits_machine(self) -> None:
        processors, memory_bytes = os.cpu_count() or 1, _machine_memory_bytes()
        if self.spec.cpus > processors or self.spec.memory_bytes + EVICTION_BYTES > memory_bytes:
            raise TestbedError(
                f"{self.spec.name} is to offer {self.spec.cpus} processors and {self.spec.memory_bytes} bytes, more than this "
                f"machine's {processors} and {memory_bytes}: ask for less"
            )

    def _start_containerd(self) -> None:
        configuration = self.directory / "containerd.toml"
        plugins = self.directory / "cni"
        plugins.mkdir(exist_ok=True)
        (plugins / "10-strata.conflist").write_text(network.plugin_configuration(self.spec.name, self.index))
        configuration.write_text(_containerd_configuration(self.directory, self.socket, plugins))
        pid = self.containerd.start(["containerd", f"--config={configuration}", "--log-level=warn"])
        cgroups.join(f"{self.group}/system", pid)
        ask = ["ctr", f"--address={self.socket}", "version"]
        wait_until(
            lambda: subprocess.run(ask, capture_output=True, check=False, timeout=30).returncode == 0,
            f"containerd of {self.spec.name}",
            30,
            [self.containerd],
        )

    def _start_kubelet(self, kubeconfig: Path) -> None:
        configuration = self.directory / "kubelet.json"
        configuration.write_text(json.dumps(self._kubelet_configuration(), indent=1))
        command = [
            str(tool_path("kubelet")),
            f"--config={configuration}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self.directory / 'kubelet'}",
            f"--cert-dir={self.directory / 'pki'}",
            f"--hostname-override={self.spec.name}",
            f"--node-ip={addresses.machine(self.index)}",
            f"--node-labels={','.join(f'{key}={value}' for key, value in self.spec.labels.items())}",
            "--v=0",
        ]
        cgroups.join(f"{self.group}/system", self.kubelet.start(command))

    def _kubelet_configuration(self) -> dict[str, object]:
        reserved_bytes = _machine_memory_bytes() - self.spec.memory_bytes - EVICTION_BYTES
        reserved_millicpus = round(((os.cpu_count() or 1) - self.spec.cpus) * 1000)
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": addresses.machine(self.index),
            "healthzBindAddress": addresses.machine(self.index),
            # Only the API server reaches the kubelet's port in the closed network.
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.group}",
            "clusterDNS": [addresses.DNS_SERVICE],
            "clusterDomain": addresses.CLUSTER_DOMAIN,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "enforceNodeAllocatable": ["pods"],
            "systemReserved": {"cpu": f"{reserved_millicpus}m", "memory": str(reserved_bytes)},
            "evictionHard": {
                "memory.available": str(EVICTION_BYTES),
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,  # the one image can be pulled from nowhere
            "failCgroupV1": False,
            "failSwapOn": False,
            "nodeLeaseDurationSeconds": 8,  # renewed four times as often: a lost node is noticed in seconds
            "oomScoreAdj": 0,  # lowering it needs CAP_SYS_RESOURCE
            "podLogsDir": str(self.directory / "pod-logs"),
            "volumePluginDir": str(self.directory / "volume-plugins"),
        }


def load_node(directory: Path, group: str) -> Node:
    """The node that `Node.start` recorded in a directory."""
    record = json.loads((directory / "node.json").read_text())
    index = record.pop("index")
    return Node(NodeSpec(**record), index, directory, group)


def _machine_memory_bytes() -> int:
    first_line = Path("/proc/meminfo").read_text().splitlines()[0]
    return int(first_line.split()[1]) * 1024


def _containerd_configuration(directory: Path, socket: Path, plugins: Path) -> str:
    runtime = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2
root = "{directory}/containerd"
state = "{directory}/containerd-state"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{directory}/opt"

[{runtime}]
restrict_oom_score_adj = true  # lowering it needs CAP_SYS_RESOURCE
sandbox_image = "{images.IMAGE}"

[{runtime}.containerd]
snapshotter = "overlayfs"

[{runtime}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[{runtime}.cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{plugins}"
"""
