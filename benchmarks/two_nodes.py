"""A deployment of two stages on two nodes of the test bed's real Kubernetes, for `node_loss` and `cluster_faults`: how it comes to be there, who may be lost, how
it has both nodes again.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.cluster.deployed import Deployed, manifest, stream
from tests.cluster.operator_release import OperatorRelease
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.testbed.world import ENVIRONMENT_VARIABLE

PROMPT = "def add(a, b):"
_GRACE = "--node-grace-seconds=50"  # Kubernetes' default: a node is NotReady long after
_NO_SPARE = {
    "exclude": ["node-c"],
    "maxReplicas": 1,
}  # a repair with a device that serves nothing would first start a pod there
# With a share of the processors: without one it is starved by whatever starts beside it, and clients wait for seconds.
_GATEWAY = {
    "replicas": 1,
    "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
}


def inside_a_world(module: str, arguments: Sequence[str] | None) -> None:
    """Ends the process with what the same command gives in a world of its own, unless it runs in one."""
    if ENVIRONMENT_VARIABLE not in os.environ:
        again = [sys.executable, "-m", module, *(sys.argv[1:] if arguments is None else arguments)]
        world = [sys.executable, "-m", "tests.cluster.testbed", "run", _GRACE]
        raise SystemExit(subprocess.run([*world, *again], check=False).returncode)


def deployed(namespace: str) -> Deployed:
    """In a world that is up, with an operator; it serves."""
    cluster = Cluster.current()
    operator = OperatorRelease(cluster)
    operator.add_node()
    operator.install()
    cluster.kubectl("create", "namespace", namespace)
    chat = Deployed(cluster, operator, manifest("chat", namespace, placement=_NO_SPARE, gateway=_GATEWAY))
    chat.apply()
    chat.wait_ready()
    return chat


def undisturbed(chat: Deployed, tokens: int) -> str:
    with chat.client() as client:
        return "".join(stream(client, chat.name, PROMPT, tokens))


def load(chat: Deployed, *, answers: int = 64, concurrency: int = 8) -> None:
    """An edit, which has it planned at once."""
    chat.apply(workload={"promptTokens": 64, "outputTokens": answers, "concurrency": concurrency})


def give_back(chat: Deployed, node: str, answers: int) -> None:
    """The node comes back, and an edit has it planned with at once."""
    chat.cluster.restart_node(node)
    load(chat, answers=answers)
    chat.wait(lambda now: now["phase"] == "Ready" and now["stagesReady"] == "2/2", "back on both nodes")


def victims(chat: Deployed) -> list[tuple[int, str]]:
    """Stages and their nodes, but for the gateway's: its streams would end with it."""
    gateways = {pod["spec"]["nodeName"] for pod in chat.pods("gateway").values()}
    stages = chat.get()["status"]["stages"]
    return [(each["stage"], each["node"]) for each in stages if each["node"] not in gateways]
