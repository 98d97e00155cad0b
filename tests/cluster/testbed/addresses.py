"""Who has which address in a world's closed network: one table that every other module reads."""

BRIDGE_DEVICE = "cni0"
BRIDGE = "10.244.0.1"
"""The pods' bridge: the API server, coredns and every pod's gateway."""

PODS = "10.244.0.0/16"
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
SIMULATED_PODS = "10.248.0.0/16"
"""What kwok's pods say their addresses are; nothing listens there."""

API_PORT = 6443
ETCD = "127.0.0.1:2379"
ETCD_PEERS = "127.0.0.1:2380"
DNS_READY = "127.0.0.1:8181"
CLUSTER_DOMAIN = "cluster.local"


def machine(index: int) -> str:
    """The address of the node of that index (0..99) itself."""
    return f"10.240.0.{10 + index}"


def pod_range(index: int) -> tuple[str, str]:
    """First and last pod address of the node of that index (0..253); no two nodes share one."""
    return f"10.244.{index + 1}.2", f"10.244.{index + 1}.254"
