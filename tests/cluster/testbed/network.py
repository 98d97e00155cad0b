"""The cluster's network: one bridge for the pods of all nodes, kube-proxy for services, coredns for names.

All of it exists only inside the world's network namespace. NetworkPolicy objects are stored and not enforced: the bridge plugin
does not know them. Called by `cluster` and, for the plugin's configuration, by `nodes`.
"""

import json
import subprocess
from pathlib import Path

from tests.cluster.testbed import addresses
from tests.cluster.testbed.addresses import BRIDGE, BRIDGE_DEVICE, CLUSTER_DOMAIN, DNS_READY, DNS_SERVICE, PODS
from tests.cluster.testbed.credentials import Credentials
from tests.cluster.testbed.processes import Daemon, answers, call, wait_until
from tests.cluster.testbed.tools import tool_path


def create_links(resolver: Path) -> None:
    """The pods' bridge, forwarding between pods and services, and the world's name server."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    # Without this a service's answer from a pod on the same bridge would keep the pod's address and be dropped.
    Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("1")
    ip("link", "add", BRIDGE_DEVICE, "type", "bridge")
    ip("address", "add", f"{BRIDGE}/16", "dev", BRIDGE_DEVICE)
    ip("link", "set", BRIDGE_DEVICE, "up")
    # kube-proxy's rules act on packets that have a route; service addresses have no other.
    ip("route", "add", addresses.SERVICES, "dev", BRIDGE_DEVICE)
    search = " ".join(f"{prefix}{CLUSTER_DOMAIN}" for prefix in ("default.svc.", "svc.", ""))
    resolver.write_text(f"nameserver {BRIDGE}\nsearch {search}\noptions ndots:5\n")


def add_machine_address(index: int) -> None:
    """Give the world the address of one more node; kubelets refuse 127.0.0.0/8, not the loopback device."""
    ip("address", "replace", f"{addresses.machine(index)}/32", "dev", "lo")


def ip(*arguments: str) -> None:
    """One `ip` command that must succeed."""
    call("ip", *arguments)


def network_name(node: str) -> str:
    """The container network's name on a node: its results are cached under it."""
    return f"strata-{node}"


def plugin_configuration(node: str, index: int) -> str:
    """What containerd hands to the bridge plugin for a node's pods. One subnet, so that the bridge has one address."""
    first, last = addresses.pod_range(index)
    addressing = {
        "type": "host-local",
        "ranges": [[{"subnet": PODS, "rangeStart": first, "rangeEnd": last, "gateway": BRIDGE}]],
    }
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE_DEVICE,
        "isDefaultGateway": True,
        "hairpinMode": True,
        "ipam": addressing,
    }
    return json.dumps({"cniVersion": "0.4.0", "name": network_name(node), "plugins": [bridge]}, indent=1)


def disconnect_pods(node: str) -> None:
    """Take down every pod's link on a node, so that its peers hear nothing more: no last packet, no closed connection."""
    for result in Path("/var/lib/cni/results").glob(f"{network_name(node)}-*"):
        for interface in json.loads(result.read_text())["result"]["interfaces"]:
            if interface["name"].startswith("veth"):
                subprocess.run(
                    ["ip", "link", "set", interface["name"], "down"], check=False, capture_output=True, timeout=30
                )


def start_proxy(directory: Path, credentials: Credentials, node: str) -> None:
    """Start kube-proxy; one serves all nodes, since they share the world's network."""
    command = [
        str(tool_path("kube-proxy")),
        f"--kubeconfig={credentials.kubeconfig('system:kube-proxy')}",
        "--proxy-mode=iptables",
        f"--cluster-cidr={PODS}",
        f"--hostname-override={node}",
        "--conntrack-max-per-core=0",  # the limit belongs to the machine, not to a namespace
        "--iptables-min-sync-period=100ms",
        "--oom-score-adj=0",
        "--v=0",
    ]
    Daemon("kube-proxy", directory).start(command)


def start_dns(directory: Path, credentials: Credentials) -> Daemon:
    """Start coredns on the bridge's address; names outside the cluster are refused, for nothing outside is reachable."""
    kubeconfig = credentials.kubeconfig("admin")
    configuration = directory / "Corefile"
    configuration.write_text(f"""\
.:53 {{
    bind {BRIDGE}
    errors
    ready {DNS_READY}
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{
        kubeconfig {kubeconfig}
        ttl 1
    }}
}}
""")
    daemon = Daemon("coredns", directory)
    daemon.start([str(tool_path("coredns")), f"-conf={configuration}"])
    return daemon


def wait_for_dns(daemon: Daemon) -> None:
    """Return when coredns has read the cluster's services."""
    wait_until(lambda: answers(f"http://{DNS_READY}/ready"), "ready coredns", 30, [daemon])


def dns_objects() -> list[dict[str, object]]:
    """The `kube-dns` service that pods ask, with the bridge's address behind it in place of pods."""
    ports: list[dict[str, object]] = [
        {"name": f"dns-{protocol.lower()}", "protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")
    ]
    service: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {"clusterIP": DNS_SERVICE, "ports": ports},
    }
    endpoints: dict[str, object] = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [BRIDGE], "conditions": {"ready": True}}],
        "ports": ports,
    }
    return [service, endpoints]
