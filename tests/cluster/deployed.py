"""One LLMDeployment as a test follows it: applied, waited for by watches, asked through its gateway, removed.

Waiting is on events of the API server, never on a clock; what runs out of time says what the cluster looked like.
Called by the tests of deployments. Knows nothing of how the operator works.
"""

import copy
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import kubernetes
import openai

from tests.cluster.operator_release import OperatorRelease, machine_pod
from tests.cluster.testbed.cluster import Cluster, Manifest
from tests.cluster.testbed.processes import TestbedError, wait_until

Status = dict[str, Any]

KINDS = (
    "llmdeployments.strata.dev,statefulsets,deployments,replicasets,pods,services,endpointslices,configmaps,secrets,"
    "serviceaccounts,networkpolicies,poddisruptionbudgets,controllerrevisions"
)
INSTANCE = "app.kubernetes.io/instance"
CLIENT_SECONDS = 60.0  # the longest pause here is half as long


def manifest(name: str, namespace: str, **spec: Any) -> Manifest:
    """A deployment of strata-tiny in fp32 with 16 bits, as small nodes take it; `spec` replaces whole fields."""
    pod = machine_pod()
    return {
        "apiVersion": "strata.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"uri": "file:///models/strata-tiny", "maxModelLen": 512},
            "workload": {"promptTokens": 64, "outputTokens": 64, "concurrency": 8},
            "precision": {"allowed": [16]},
            "runtime": {"computeType": "float32", "pod": pod},
            # No processors: the smallest node has one, and a slot takes whole ones.
            # One gateway, since two cores are all that the bed's nodes share: tests of two ask for them.
            "gateway": {"replicas": 1, "resources": {"requests": {"memory": "512Mi"}, "limits": {"memory": "2Gi"}}},
            **spec,
        },
    }


@dataclass
class Deployed:
    """An LLMDeployment in a cluster. `seconds` holds what was timed, by step."""

    cluster: Cluster
    operator: OperatorRelease
    manifest: Manifest
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.manifest["metadata"]["namespace"])

    def apply(self, **spec: Any) -> None:
        """`kubectl apply`, with some fields of the spec replaced from now on."""
        self.manifest = copy.deepcopy(self.manifest)
        self.manifest["spec"].update(spec)
        self.cluster.apply(self.manifest)

    def get(self) -> Manifest:
        return self.cluster.get("llmd", self.name, f"--namespace={self.namespace}")

    def objects(self, kinds: str = KINDS) -> list[Manifest]:
        """What there is of it: the object, what it owns and what came of that."""
        found = self.cluster.get(kinds, f"--namespace={self.namespace}", "--show-managed-fields")["items"]
        return [
            each
            for each in found
            if each["metadata"]["name"] == self.name
            or (each["metadata"].get("labels") or {}).get(INSTANCE) == self.name
        ]

    def pods(self, component: str) -> dict[str, Manifest]:
        """By name."""
        label = f"app.kubernetes.io/component={component}"
        selector = f"--selector={INSTANCE}={self.name},{label}"
        found = self.cluster.get("pods", f"--namespace={self.namespace}", selector)["items"]
        return {each["metadata"]["name"]: each for each in found}

    def wait(self, holds: Callable[[Status], bool], what: str, seconds: float = 120) -> Status:
        """Watch the object until its status is so; the status."""
        deadline = time.monotonic() + seconds
        kubernetes.config.load_kube_config(str(self.cluster.kubeconfig))
        with kubernetes.client.ApiClient() as client:
            api = kubernetes.client.CustomObjectsApi(client)
            while (left := deadline - time.monotonic()) > 0:
                events = kubernetes.watch.Watch().stream(
                    api.list_namespaced_custom_object, "strata.dev", "v1alpha1", self.namespace, "llmdeployments",
                    field_selector=f"metadata.name={self.name}", timeout_seconds=max(1, int(left)),
                    _request_timeout=left + 10,  # of an API server that ends nothing any more
                )  # fmt: skip
                for event in events:
                    seen = event["object"]
                    if event["type"] != "DELETED" and _is_current(seen) and holds(seen["status"]):
                        return dict(seen["status"])
        raise AssertionError(f"not {what} within {seconds:g} s\n{self.diagnosis()}")

    def wait_pods_running(self, seconds: float = 60) -> None:
        """All slots of the plan, and the gateway."""
        slots = {f"{stage['slot']}-0" for stage in self.get()["status"]["stages"]}

        def running() -> bool:
            pods = {**self.pods("slot"), **self.pods("gateway")}
            return slots < set(pods) and all(pod["status"]["phase"] == "Running" for pod in pods.values())

        wait_until(running, "running pods", seconds)

    def events(self) -> list[dict[str, str]]:
        """What the operator told about it: type, reason and message, in order."""
        found = self.cluster.get("events.events.k8s.io", f"--namespace={self.namespace}")["items"]
        own = [
            each
            for each in found
            if each["regarding"]["kind"] == "LLMDeployment" and each["regarding"]["name"] == self.name
        ]
        told = sorted(own, key=lambda each: str(each["eventTime"]))
        return [{"type": each["type"], "reason": each["reason"], "message": each["note"]} for each in told]

    def wait_ready(self, seconds: float = 180) -> Status:
        return self.wait(lambda status: status.get("phase") == "Ready", "Ready", seconds)

    def wait_gone(self, seconds: float = 60) -> None:
        """Until nothing is left of it."""
        try:
            wait_until(lambda: not self.objects(), "end of all objects", seconds)
        except TestbedError as error:
            left = [f"{each['kind']}/{each['metadata']['name']}" for each in self.objects()]
            raise AssertionError(f"{error}: {left}\n{self.diagnosis()}") from error

    def delete(self, seconds: float = 60) -> None:
        """With everything that came of it."""
        self.cluster.kubectl(
            "delete",
            "llmd",
            self.name,
            f"--namespace={self.namespace}",
            "--ignore-not-found",
            f"--timeout={int(seconds)}s",
        )
        self.wait_gone(seconds)

    def url(self) -> str:
        return f"http://{self.name}-gateway.{self.namespace}.svc.cluster.local:8000"

    @contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        """The official client, pointed at the gateway's Service. It waits for each piece of an answer for CLIENT_SECONDS."""
        with openai.OpenAI(base_url=f"{self.url()}/v1", api_key="none", timeout=CLIENT_SECONDS) as client:
            yield client

    def logs(self, pod: str) -> str:
        return self.cluster.kubectl("logs", pod, f"--namespace={self.namespace}")

    def diagnosis(self) -> str:
        """What one would look at by hand."""
        namespace = f"--namespace={self.namespace}"
        looks = [
            lambda: str(self.get().get("status")),
            lambda: self.cluster.kubectl("get", "pods", "--all-namespaces", "-o", "wide"),
            lambda: self.cluster.kubectl("get", "events", namespace, "--sort-by=.lastTimestamp"),
            self.operator.logs,
            lambda: self.cluster.kubectl(
                "logs", f"--selector={INSTANCE}={self.name}", namespace, "--tail=15", "--prefix"
            ),
        ]
        return "\n\n".join(_try(look) for look in looks)


@contextmanager
def deployed(cluster: Cluster, operator: OperatorRelease, name: str, **spec: Any) -> Iterator[Deployed]:
    """One in a namespace of its own, to be applied. Nothing is left of it behind the block: the next one finds all devices free."""
    namespace = f"{name}-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", namespace)
    made = Deployed(cluster, operator, manifest(name, namespace, **spec))
    try:
        yield made
        made.delete()
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def _is_current(thing: Manifest) -> bool:
    """Whether the operator has seen the object as it is now."""
    return bool(thing.get("status")) and thing["status"].get("observedGeneration") == thing["metadata"]["generation"]


def condition(status: Status, kind: str) -> dict[str, str]:
    """A condition by its type; empty where there is none."""
    return next((dict(each) for each in status.get("conditions", []) if each["type"] == kind), {})


def holds(kind: str) -> Callable[[Status], bool]:
    """A predicate for `Deployed.wait`: this condition is true."""
    return lambda status: condition(status, kind).get("status") == "True"


def wait_so(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """For what no watch of one object tells. Raises AssertionError."""
    try:
        wait_until(condition, what, seconds)
    except TestbedError as error:
        raise AssertionError(str(error)) from error


def _try(look: Callable[[], str]) -> str:
    try:
        return look()
    except TestbedError as error:
        return str(error)


def stream(client: openai.OpenAI, model: str, prompt: str, tokens: int) -> Iterator[str]:
    """Pieces of text as they come; the model's end of text does not end it."""
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    with answer:
        for chunk in answer:
            if chunk.choices and chunk.choices[0].text:
                yield chunk.choices[0].text
