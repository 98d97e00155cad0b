"""etcd, API server, controller manager and scheduler, as plain processes of a world.

Called by `cluster`; knows nothing of nodes or pods.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.cluster.testbed.addresses import API_PORT, BRIDGE, ETCD, ETCD_PEERS, SERVICES
from tests.cluster.testbed.credentials import Credentials
from tests.cluster.testbed.processes import Daemon, answers, wait_until
from tests.cluster.testbed.tools import tool_path


@dataclass(frozen=True)
class ControlPlane:
    """The control plane in a directory, with the credentials its clients share."""

    directory: Path
    credentials: Credentials

    def start(self, node_grace_seconds: int) -> None:
        """Start all four; returns when the API server answers that it is ready.

        A node is called lost when it has not been heard of for `node_grace_seconds` (Kubernetes' own default is 50).
        """
        etcd = self._start_etcd()
        wait_until(lambda: answers(f"http://{ETCD}/health"), "answer from etcd", 30, [etcd])
        server = self._start_api_server()
        self._start_controller_manager(node_grace_seconds)
        self._start_scheduler()
        wait_until(self._ready, "ready API server", 60, [etcd, server])

    def _ready(self) -> bool:
        return answers(f"https://{BRIDGE}:{API_PORT}/readyz", certificate_authority=self.credentials.authority)

    def _start_etcd(self) -> Daemon:
        daemon = Daemon("etcd", self.directory)
        command = [
            str(tool_path("etcd")),
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls=http://{ETCD}",
            f"--advertise-client-urls=http://{ETCD}",
            f"--listen-peer-urls=http://{ETCD_PEERS}",
            f"--initial-advertise-peer-urls=http://{ETCD_PEERS}",
            f"--initial-cluster=default=http://{ETCD_PEERS}",
            "--unsafe-no-fsync",  # the data need not survive the machine
            "--log-level=warn",
        ]
        daemon.start(command)
        return daemon

    def _start_api_server(self) -> Daemon:
        keys = self.credentials
        daemon = Daemon("kube-apiserver", self.directory)
        command = [
            str(tool_path("kube-apiserver")),
            f"--etcd-servers=http://{ETCD}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={BRIDGE}",  # behind the `kubernetes` service, so it must be one that pods reach
            f"--secure-port={API_PORT}",
            f"--service-cluster-ip-range={SERVICES}",
            f"--tls-cert-file={keys.server_certificate}",
            f"--tls-private-key-file={keys.server_key}",
            f"--client-ca-file={keys.authority}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={keys.service_account_key}",
            f"--service-account-signing-key-file={keys.service_account_key}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--kubelet-preferred-address-types=InternalIP",  # node names are in no DNS
            "--v=0",
        ]
        daemon.start(command)
        return daemon

    def _start_controller_manager(self, node_grace_seconds: int) -> None:
        keys = self.credentials
        command = [
            str(tool_path("kube-controller-manager")),
            f"--kubeconfig={keys.kubeconfig('system:kube-controller-manager')}",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={keys.service_account_key}",
            f"--root-ca-file={keys.authority}",
            "--leader-elect=false",
            f"--node-monitor-grace-period={node_grace_seconds}s",
            "--node-monitor-period=1s",
            "--v=0",
        ]
        Daemon("kube-controller-manager", self.directory).start(command)

    def _start_scheduler(self) -> None:
        command = [
            str(tool_path("kube-scheduler")),
            f"--kubeconfig={self.credentials.kubeconfig('system:kube-scheduler')}",
            "--leader-elect=false",
            "--v=0",
        ]
        Daemon("kube-scheduler", self.directory).start(command)
