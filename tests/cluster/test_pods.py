"""Real pods of the testbed: restricted, from a tiny image with the machine's Python, finding each other and the API server."""

import json
import socket
import time
from typing import Any

import pytest

from tests.cluster.testbed.cluster import Cluster
from tests.cluster.testbed.host_python import host_python
from tests.cluster.testbed.images import IMAGE
from tests.cluster.testbed.processes import TestbedError, wait_until

pytestmark = pytest.mark.cluster

PORT = 8000

# What a pod says of itself and of what it can reach, as one line of JSON.
ASK = f"""
import json, os, socket, ssl, urllib.request
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
try:
    open("/here", "w")
    writable = True
except OSError:
    writable = False
account = "/var/run/secrets/kubernetes.io/serviceaccount"
context = ssl.create_default_context(cafile=account + "/ca.crt")
version = urllib.request.urlopen("https://kubernetes.default.svc/version", context=context)
import torch
print(json.dumps({{
    "uid": os.getuid(),
    "seccomp": int(status["Seccomp"]),
    "capabilities": int(status["CapBnd"], 16),
    "root_writable": writable,
    "peer": socket.gethostbyname("pair-1.pair"),
    "peer_answers": urllib.request.urlopen("http://pair-1.pair:{PORT}/").status,
    "api_server": json.load(version)["gitVersion"],
}}))
"""


def pair(namespace: str) -> list[dict[str, Any]]:
    """A headless service and two restricted pods on unlike nodes, each serving HTTP."""
    python = host_python()
    container = {
        "name": "server",
        "image": IMAGE,
        "command": ["python", "-m", "http.server", str(PORT)],
        "workingDir": "/tmp",
        "env": python.env,
        "volumeMounts": [*python.volume_mounts, {"name": "tmp", "mountPath": "/tmp"}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    apart = {"labelSelector": {"matchLabels": {"app": "pair"}}, "topologyKey": "kubernetes.io/hostname"}
    template = {
        "metadata": {"labels": {"app": "pair"}},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "terminationGracePeriodSeconds": 1,
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
            "containers": [container],
            "volumes": [*python.volumes, {"name": "tmp", "emptyDir": {}}],
        },
    }
    metadata = {"name": "pair", "namespace": namespace}
    selector = {"app": "pair"}
    service = {"clusterIP": "None", "selector": selector, "ports": [{"port": PORT}]}
    pods = {
        "serviceName": "pair",
        "replicas": 2,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selector},
        "template": template,
    }
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": pods},
    ]


def start_pair(cluster: Cluster, namespace: str) -> None:
    cluster.apply(*pair(namespace))
    cluster.kubectl("rollout", "status", "statefulset/pair", f"--namespace={namespace}", "--timeout=60s")


def condition(found: dict[str, Any], kind: str) -> str | None:
    """The status of a condition of an object."""
    return next((entry["status"] for entry in found["status"].get("conditions", []) if entry["type"] == kind), None)


def test_restricted_pods_run_the_machines_python_and_find_each_other(cluster: Cluster, namespace: str) -> None:
    start_pair(cluster, namespace)

    said = json.loads(cluster.kubectl("exec", "pair-0", f"--namespace={namespace}", "--", "python", "-c", ASK))

    peer = cluster.get("pod", "pair-1", f"--namespace={namespace}")
    assert said == {
        "uid": 65532,
        "seccomp": 2,  # filtered
        "capabilities": 0,
        "root_writable": False,
        "peer": peer["status"]["podIP"],
        "peer_answers": 200,
        "api_server": "v1.34.3",
    }
    assert peer["spec"]["nodeName"] != cluster.get("pod", "pair-0", f"--namespace={namespace}")["spec"]["nodeName"]
    assert '"GET / HTTP/1.1" 200' in cluster.kubectl("logs", "pair-1", f"--namespace={namespace}")


def test_the_restricted_profile_is_enforced_where_a_namespace_asks_for_it(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    template = pair(namespace)[1]["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pair", "namespace": namespace},
        "spec": template["spec"],
    }
    with pytest.raises(TestbedError, match=r"violates PodSecurity .*hostPath"):
        cluster.dry_run(pod)

    pod["spec"]["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    cluster.dry_run(pod)


def test_names_of_services_resolve_for_the_tests_too(cluster: Cluster) -> None:
    assert socket.gethostbyname("kubernetes.default.svc.cluster.local") == "10.96.0.1"


def test_a_killed_node_falls_silent_is_noticed_and_comes_back(cluster: Cluster, namespace: str) -> None:
    start_pair(cluster, namespace)
    pod = cluster.get("pod", "pair-1", f"--namespace={namespace}")
    node = pod["spec"]["nodeName"]

    with socket.create_connection((pod["status"]["podIP"], PORT), timeout=5) as open_connection:
        open_connection.settimeout(1)
        cluster.kill_node(node)
        with pytest.raises(TimeoutError):  # neither an end of file nor a reset: nobody is left to say it
            open_connection.recv(1)
    wait_until(lambda: condition(cluster.get("node", node), "Ready") == "Unknown", f"{node} called lost", 40)
    wait_until(
        lambda: condition(cluster.get("pod", "pair-1", f"--namespace={namespace}"), "Ready") == "False",
        "pair-1 called not ready",
        20,
    )

    noticed = time.time()
    cluster.restart_node(node)
    assert cluster.is_ready(node, since=noticed)
    start_pair(cluster, namespace)
