"""The operator in the testbed, installed, upgraded and stopped with its chart and a values file, as a user does it.

Used by the fixtures of conftest and by the tests of deployments. What a user would not write are the image and the mounts:
the pod image is nearly empty and takes Python, the packages and the checkout from the machine (`host_python`).
"""

import json
import os
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.testbed.cluster import Cluster
from tests.cluster.testbed.host_python import host_python
from tests.cluster.testbed.images import IMAGE
from tests.cluster.testbed.nodes import NodeSpec
from tests.cluster.testbed.processes import wait_until
from tests.cluster.testbed.world import CHECKOUT

NAMESPACE = "strata-system"
RELEASE = "strata"
_OPERATORS = "app.kubernetes.io/component=operator"
CRD = "llmdeployments.strata.dev"
MODELS = CHECKOUT / "examples" / "models"
_RUNTIME_USER = 65532
# A node beside the devices, as clusters have one: the operator and gateways find room here, and it is never taken away.
NODE = NodeSpec("system", cpus=2.0, memory_bytes=5 * 2**29, labels={})

_MODELS_MOUNT = {"name": "models", "mountPath": "/models", "readOnly": True}


def models_folder() -> Path:
    """examples/models as a volume of the cluster has it: a copy that pods may add to."""
    folder = Cluster.current().directory / "models"
    if not folder.is_dir():
        scratch = folder.with_suffix(".new")
        shutil.copytree(MODELS, scratch)
        for path in (scratch, *scratch.rglob("*")):
            os.chown(path, _RUNTIME_USER, _RUNTIME_USER)
        scratch.rename(folder)
    return folder


def machine_pod() -> dict[str, list[dict[str, Any]]]:
    """`env`, `volumes` and `volumeMounts` of pods here, with the models at /models: for the chart and for runtime.pod."""
    python = host_python()
    models = {"name": "models", "hostPath": {"path": str(models_folder()), "type": "Directory"}}
    return {
        "env": [each for each in python.env if each["name"] != "HOME"],  # set by the chart and by the operator
        "volumes": [*python.volumes, models],
        "volumeMounts": [*python.volume_mounts, _MODELS_MOUNT],
    }


@dataclass(frozen=True)
class OperatorRelease:
    """The chart's release in a cluster."""

    cluster: Cluster

    def add_node(self) -> None:
        """The operator's node, unless an earlier session of this testbed has added it."""
        if NODE.name not in self.cluster.nodes():
            self.cluster.add_nodes(NODE)

    def install(self) -> None:
        """Returns when the operator is ready."""
        self._helm("install", "--create-namespace")

    def upgrade(self, **values: Any) -> None:
        """With other values on top of the first ones; returns when the new operator is ready."""
        self._helm("upgrade", **values)

    def rollback(self) -> None:
        """To the first values; returns when that operator is ready."""
        self.cluster.helm("rollback", RELEASE, "1", f"--namespace={NAMESPACE}", "--wait", "--timeout=120s")

    def wait_looked(self) -> None:
        """Until the operator that runs leads and has looked at everything twice from now on."""
        at_first = self._metric("strata_operator_look_seconds_count")
        wait_until(
            lambda: (
                self._metric("strata_operator_leading") == 1
                and self._metric("strata_operator_look_seconds_count") >= at_first + 2
            ),
            "operator that leads and looks",
            60,
        )

    def _metric(self, name: str) -> float:
        pods = self.cluster.get("pods", f"--namespace={NAMESPACE}", f"--selector={_OPERATORS}")["items"]
        (address,) = [pod["status"]["podIP"] for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        with urllib.request.urlopen(f"http://{address}:8080/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def uninstall(self) -> None:
        """The chart's objects, then what it keeps for its user: the definition, and with it every LLMDeployment."""
        self.cluster.helm("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--wait", "--timeout=60s")
        self.cluster.kubectl("delete", "crd", CRD, "--timeout=60s")
        self.cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s")

    def scale(self, replicas: int) -> None:
        """Returns when so many operators run."""
        deployment = [f"deployment/{RELEASE}", f"--namespace={NAMESPACE}"]
        self.cluster.kubectl("scale", *deployment, f"--replicas={replicas}")
        self.cluster.kubectl("rollout", "status", *deployment, "--timeout=120s")
        if replicas == 0:
            self.cluster.kubectl(
                "wait", "--for=delete", "pod", f"--namespace={NAMESPACE}", "--timeout=60s",
                f"--selector={_OPERATORS}",
            )  # fmt: skip

    def kill(self) -> None:
        """Without a chance to tidy up, or to give up its lease; its Deployment starts another one."""
        end = ("--grace-period=0", "--force")
        self.cluster.kubectl("delete", "pod", f"--namespace={NAMESPACE}", f"--selector={_OPERATORS}", *end)

    def logs(self, lines: int = 40) -> str:
        return self.cluster.kubectl("logs", f"deployment/{RELEASE}", f"--namespace={NAMESPACE}", f"--tail={lines}")

    def _helm(self, verb: str, *options: str, **values: Any) -> None:
        file = self._values_file(values)
        chart = str(CHECKOUT / "helm" / "strata")
        where = [f"--namespace={NAMESPACE}", f"--values={file}", "--wait", "--timeout=120s"]
        self.cluster.helm(verb, RELEASE, chart, *where, *options)

    def _values_file(self, values: dict[str, Any]) -> Path:
        file = self.cluster.directory / "operator-values.json"
        file.write_text(json.dumps({**_first_values(), **values}))
        return file


def _first_values() -> dict[str, Any]:
    repository, _, tag = IMAGE.rpartition(":")
    return {
        "replicas": 1,
        "image": {"repository": repository, "tag": tag},
        "runtimeImage": {"repository": repository, "tag": tag},
        "command": ["python", "-m", "strata_operator.cli", "operator"],
        "nodeSelector": {"kubernetes.io/hostname": NODE.name},
        "clusterScope": True,  # each test has a namespace of its own
        "tenants": {"volumes": ["hostPath"]},  # pods take Python from the machine
        **machine_pod(),
    }
