"""A small Kubernetes in memory that lives by virtual time: behind a FakeApi its controllers, scheduler and kubelets, and processes
that only speak.

Objects are in their real shape, by path. `tick` is one step of everybody who is not the operator; what is wrong with nodes and
slots is said by `faults`. Knows no operator: `virtual_operator` lets the real one act on it.
"""

import asyncio
import base64
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from strata_operator.api import LLMDeploymentStatus, deployment_from_object
from strata_operator.observe.kube import PODS, SECRETS, kind_of
from strata_operator.render.names import COMPONENT_LABEL, GATEWAY, INSTANCE_LABEL, SLOT_LABEL
from strata_operator.render.records import MARGIN, stamp
from tests.operator.builders import a_deployment, a_node
from tests.operator.fake_api import FakeApi, Request
from tests.operator.fakes import FakeGateway, FakeSlot
from tests.operator.virtual_time import VirtualTime

Object = dict[str, Any]
NAMESPACE = "default"
GPUS = 2  # of every node
HEALED_BY = 0.2  # share of memory left free that ends a lack of memory
BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Faults:
    """What is wrong with slots now, by node."""

    refuses: set[str] = field(default_factory=set)
    hangs: set[str] = field(default_factory=set)
    no_image: set[str] = field(default_factory=set)
    no_place: set[str] = field(default_factory=set)
    out_of_memory: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)  # from the operator: between each other they speak
    deaf: set[str] = field(
        default_factory=set
    )  # to the operator, whose connections are made anew; their kernels answer
    mute: set[str] = field(default_factory=set)  # they do what they are told, and their answer is lost
    stuck: set[str] = field(default_factory=set)  # pods, by name: their kubelet gets no further
    pruned: set[str] = field(default_factory=set)  # fields of status, by an admission webhook
    quota: bool = False

    def end(self) -> None:
        for which in vars(self).values():
            if isinstance(which, set):
                which.clear()
        self.quota = False


@dataclass(frozen=True)
class Process:
    """What runs in a pod. `key`: opens its control port, as its Secret was when it started."""

    key: str
    speaks: FakeSlot | FakeGateway


class Kubernetes(FakeApi):
    """API server, controllers, scheduler and kubelets."""

    def __init__(self, *nodes: str) -> None:
        super().__init__()
        self.time = VirtualTime()
        self.now = lambda: BEGINNING + timedelta(seconds=self.time.time())
        self.faults = Faults()
        self.processes: dict[str, Process] = {}  # by pod's uid
        self.dead: set[str] = set()  # pods, by uid, whose container never starts again, which nobody mends
        self.stopped: set[str] = set()  # of the dead, those whose process is there
        self.moved = asyncio.Event()  # of the moment: the next tick has another one
        self._pods = itertools.count(1)
        for name in nodes:
            self.add_node(name)

    # What there is.

    def all(self, plural: str) -> list[Object]:
        return [thing for path, thing in sorted(self.objects.items()) if path.split("/")[-2] == plural]

    def one(self, plural: str, name: str) -> Object | None:
        return next((each for each in self.all(plural) if each["metadata"]["name"] == name), None)

    def pods_of(self, name: str) -> list[Object]:
        """Of the slots of a deployment."""
        return [pod for pod in self.all("pods") if _label(pod, INSTANCE_LABEL) == name and _label(pod, SLOT_LABEL)]

    def gateways_of(self, name: str) -> list[Object]:
        """Their pods."""
        pods = (pod for pod in self.all("pods") if _label(pod, INSTANCE_LABEL) == name)
        return [pod for pod in pods if _label(pod, COMPONENT_LABEL) == GATEWAY]

    def pods_on(self, node: str) -> list[Object]:
        return [pod for pod in self.all("pods") if pod["spec"].get("nodeName") == node]

    def slot_of(self, pod: Object) -> FakeSlot | None:
        process = self.processes.get(pod["metadata"]["uid"])
        return process.speaks if process and isinstance(process.speaks, FakeSlot) else None

    def spec_of(self, name: str) -> Object:
        return dict(self.objects[_deployment_path(name)]["spec"])

    def uid_of(self, name: str) -> str:
        return str(self.objects[_deployment_path(name)]["metadata"]["uid"])

    def generation_of(self, name: str) -> int:
        return int(self.objects[_deployment_path(name)]["metadata"]["generation"])

    def is_owned_by(self, thing: Object, name: str) -> bool:
        return self.uid_of(name) in {each["uid"] for each in thing["metadata"].get("ownerReferences") or ()}

    def is_ready(self, node: str) -> bool:
        thing = self.one("nodes", node)
        return thing is not None and thing["status"]["conditions"][0]["status"] == "True"

    def is_stopped(self, pod: Object) -> bool:
        """Whether its process, which is there, answers nobody."""
        return False

    def listens(self, pod: Object) -> bool:
        """Whether a kernel takes connections for its process."""
        uid = pod["metadata"]["uid"]
        return uid in self.processes or uid in self.stopped or self.is_stopped(pod)

    def is_up(self, node: str) -> bool:
        """With power: its condition may say otherwise."""
        thing = self.one("nodes", node)
        return thing is not None and not thing["metadata"].get("powerless")

    # What people and machines do to it.

    def serve(self, name: str) -> None:
        thing = a_served(name)
        self.put(
            _deployment_path(name), {**thing, "metadata": {**thing["metadata"], "uid": f"{name}-{next(self._pods)}"}}
        )

    def edit(self, name: str, **parts: Any) -> bool:
        """Fields of `spec`, as a person does; whether that changes anything."""
        thing = self.objects[_deployment_path(name)]
        if all(thing["spec"].get(part) == value for part, value in parts.items()):
            return False
        meta = {**thing["metadata"], "generation": thing["metadata"]["generation"] + 1}
        self.put(_deployment_path(name), {**thing, "metadata": meta, "spec": {**thing["spec"], **parts}})
        return True

    def set_status(self, name: str, status: LLMDeploymentStatus) -> None:
        """As somebody else would write it."""
        told = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.put(_deployment_path(name), {**self.objects[_deployment_path(name)], "status": told})

    def abandon(self, name: str) -> None:
        """The deployment is deleted: what it owns is removed by and by."""
        self.objects.pop(_deployment_path(name), None)

    def add_node(self, name: str) -> None:
        self.put(f"/api/v1/nodes/{name}", a_node(name).with_gpus("Tesla-T4", GPUS).build())
        self.set_ready(name, "True")

    def set_ready(self, name: str, status: str, *, power: bool | None = None) -> None:
        """Not Ready is no power, unless said otherwise: its processes end, and their pods stay."""
        node = self.objects[f"/api/v1/nodes/{name}"]
        power = status == "True" if power is None else power
        node["status"]["conditions"] = [{"type": "Ready", "status": status, "lastTransitionTime": stamp(self.now())}]
        node["metadata"]["powerless"] = not power
        for pod in self.pods_on(name) if not power else ():
            self.stop(pod)

    def remove_node(self, name: str) -> None:
        for pod in self.pods_on(name):
            self.end(pod)
        del self.objects[f"/api/v1/nodes/{name}"]

    def cordon(self, name: str, *, closed: bool) -> None:
        self.objects[f"/api/v1/nodes/{name}"]["spec"]["unschedulable"] = closed

    def allow_gpus(self, name: str, count: int) -> None:
        self.objects[f"/api/v1/nodes/{name}"]["status"]["allocatable"]["nvidia.com/gpu"] = str(count)

    def end(self, pod: Object) -> None:
        """Its process and the pod itself, at once."""
        self.stop(pod)
        self.objects.pop(PODS.path(NAMESPACE, pod["metadata"]["name"]), None)

    def hang(self, pod: Object) -> None:
        """Its process is there and does nothing more, as after SIGSTOP. Nothing says so: its node stays Ready, its container runs."""
        self.dead.add(pod["metadata"]["uid"])
        self.stopped.add(pod["metadata"]["uid"])
        self.stop(pod)

    def kill(self, pod: Object) -> None:
        """For good: what is started in its container again answers nobody. Its node stays Ready."""
        self.hang(pod)
        self.stopped.discard(pod["metadata"]["uid"])
        self._runs(pod)

    # What goes on in it.

    def tick(self, seconds: float = 0) -> None:
        """Time passes; controllers, scheduler and kubelets do what they have to."""
        self.time.passes(seconds)
        self._collect()
        for made in (*self._missing("statefulsets", _slot_pods), *self._missing("deployments", _gateway_pods)):
            self.put(PODS.path(NAMESPACE, made["metadata"]["name"]), made)
        for pod in self.all("pods"):
            if pod["metadata"]["name"] not in self.faults.stuck:
                self._move(pod)
        self.told()
        self.time.passes(0.01)  # whoever listens has heard of it

    def told(self) -> None:
        """Something has moved: whoever listens looks again."""
        before, self.moved = self.moved, asyncio.Event()
        before.set()

    def _collect(self) -> None:
        """What has lost its owner goes; the pods of a workload that is gone end."""
        owners = {thing["metadata"]["uid"] for thing in self.objects.values()}
        for path, thing in list(self.objects.items()):
            owned = [each["uid"] for each in thing["metadata"].get("ownerReferences") or ()]
            if owned and not set(owned) & owners:
                self.mark(thing) if "/pods/" in path else self.objects.pop(path)
        if any(MARGIN in (notes := each["metadata"]["annotations"]) and float(notes[MARGIN]) >= HEALED_BY
               for each in self.all("configmaps")):  # fmt: skip
            self.faults.out_of_memory.clear()

    def mark(self, pod: Object) -> None:
        """It is to end; its kubelet sees to that."""
        pod["metadata"].setdefault("deletionTimestamp", stamp(self.now()))

    def _missing(self, plural: str, pods_of: Callable[[Object], list[Object]]) -> Iterator[Object]:
        for workload in self.all(plural) if not self.faults.quota else ():
            for pod in pods_of(workload):
                if PODS.path(NAMESPACE, pod["metadata"]["name"]) not in self.objects:
                    yield pod

    def _move(self, pod: Object) -> None:
        """Scheduled, started, loaded, ended: one step of each."""
        if _label(pod, COMPONENT_LABEL) == GATEWAY:
            return self._move_gateway(pod)
        node = pod["spec"].get("nodeName") or self._place(pod)
        if not node or not self.is_up(node):
            return None
        if pod["metadata"].get("deletionTimestamp"):
            return self.end(pod)
        if node in self.faults.no_image and pod["metadata"]["uid"] not in self.processes:
            waiting = {"reason": "ImagePullBackOff"}
            pod["status"]["containerStatuses"] = [{"restartCount": 0, "state": {"waiting": waiting}}]
            return None
        for each in pod["status"].get("containerStatuses") or ():
            each.get("state", {}).pop("waiting", None)
        slot = self._started(pod, lambda: FakeSlot(_label(pod, SLOT_LABEL)))
        if slot is None:
            return None
        assert isinstance(slot, FakeSlot)
        slot.refuses = "401 from the hub" if node in self.faults.refuses else ""
        if node not in self.faults.hangs:
            slot.finish_loading()
        if node in self.faults.out_of_memory and slot.committed:
            self._kill(pod, slot)
        return None

    def _move_gateway(self, pod: Object) -> None:
        """It is on a node that never fails, unless it has one. Recreated where its template is another one."""
        if (node := pod["spec"].get("nodeName")) and not self.is_up(node):
            return
        of = self.one("deployments", f"{_label(pod, INSTANCE_LABEL)}-gateway")
        if of is None or pod["metadata"].get("deletionTimestamp") or pod["spec"] != of["spec"]["template"]["spec"]:
            self.end(pod)
        elif self._started(pod, FakeGateway):
            pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]

    def _started(self, pod: Object, make: Callable[[], FakeSlot | FakeGateway]) -> FakeSlot | FakeGateway | None:
        """None while the Secret that it reads is not there."""
        uid = pod["metadata"]["uid"]
        if uid in self.dead:
            return None
        if uid not in self.processes:
            workload = _label(pod, SLOT_LABEL) or f"{_label(pod, INSTANCE_LABEL)}-gateway"
            secret = self.objects.get(SECRETS.path(NAMESPACE, f"{workload}-key"))
            if secret is None:
                return None
            self.processes[uid] = Process(base64.b64decode(secret["data"]["key"]).decode(), make())
            self._runs(pod)
        return self.processes[uid].speaks

    def _runs(self, pod: Object) -> None:
        """Its container, since now."""
        statuses = pod["status"].setdefault("containerStatuses", [{"restartCount": 0}])
        statuses[0]["state"] = {"running": {"startedAt": stamp(self.now())}}
        pod["status"]["podIP"] = address_of(pod)

    def _place(self, pod: Object) -> str:
        terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (name,) = terms["nodeSelectorTerms"][0]["matchFields"][0]["values"]
        node = self.one("nodes", name)
        fits = node is not None and _gpus(pod) + sum(map(_gpus, self.pods_on(name))) <= GPUS
        closed = node is None or node["spec"].get("unschedulable")
        placed = fits and not closed and self.is_up(name) and name not in self.faults.no_place
        before = next(iter(pod["status"].get("conditions") or ()), {})
        if before.get("status") != str(placed):
            condition = {"type": "PodScheduled", "status": str(placed), "lastTransitionTime": stamp(self.now())}
            pod["status"]["conditions"] = [{**condition, "message": "" if placed else "0/3 nodes are available"}]
        if placed:
            pod["spec"]["nodeName"] = name
        return name if placed else ""

    def _kill(self, pod: Object, slot: FakeSlot) -> None:
        ended = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": stamp(self.now())}
        statuses = pod["status"].setdefault("containerStatuses", [{"restartCount": 0}])
        statuses[0] = {"restartCount": statuses[0]["restartCount"] + 1, "lastState": {"terminated": ended}}
        self._runs(pod)
        self._is_missed(pod, slot)
        slot.restart()

    def stop(self, pod: Object) -> None:
        """Its process ends, and the pod stays."""
        process = self.processes.pop(pod["metadata"]["uid"], None)
        if process and isinstance(process.speaks, FakeSlot):
            self._is_missed(pod, process.speaks)

    def cut_off(self, node: str) -> None:
        """From everybody; its processes live on."""
        self.faults.unreachable.add(node)
        for pod in self.pods_on(node):
            if slot := self.slot_of(pod):
                self._is_missed(pod, slot)

    def _is_missed(self, pod: Object, lost: FakeSlot) -> None:
        """The others of its epoch, and the gateway, see their connections close."""
        for gateway in self.gateways_of(_label(pod, INSTANCE_LABEL)):
            process = self.processes.get(gateway["metadata"]["uid"])
            if process is not None and isinstance(process.speaks, FakeGateway):
                process.speaks.lost.add(lost.name)
        for other in self.pods_of(_label(pod, INSTANCE_LABEL)):
            neighbour = self.slot_of(other)
            if neighbour is not None and neighbour is not lost and neighbour.committed == lost.committed:
                neighbour.lose(lost.name)

    def _apply(self, request: Request) -> tuple[int, Object]:
        if request.path.endswith("/status"):
            kept = {name: part for name, part in request.body["status"].items() if name not in self.faults.pruned}
            request.body["status"] = kept
        return super()._apply(request)

    def _delete(self, request: Request) -> tuple[int, Object]:
        """A pod has its grace period: its kubelet ends it, if there is one."""
        pod, options = self.objects.get(request.path), request.body or {}
        if pod is None or "/pods/" not in request.path:
            return super()._delete(request)
        if options.get("preconditions", {}).get("uid") not in {None, pod["metadata"]["uid"]}:
            return super()._delete(request)
        self.end(pod) if options.get("gracePeriodSeconds") == 0 else self.mark(pod)
        return 200, pod


def a_served(name: str) -> Object:
    thing = a_deployment(name).with_spec(model={"uri": "file:///models/tiny"}).to_object()
    return {**thing, "spec": {**thing["spec"], "runtime": {"image": "runtime:1"}}}


def status_of(cluster: Kubernetes, name: str) -> LLMDeploymentStatus:
    return deployment_from_object(cluster.objects[_deployment_path(name)]).status


def _deployment_path(name: str) -> str:
    return kind_of({"kind": "LLMDeployment"}).path(NAMESPACE, name)


def address_of(pod: Object) -> str:
    """Of its own, as long as it lives."""
    return f"10.0.0.{pod['metadata']['uid']}"


def _slot_pods(stateful_set: Object) -> list[Object]:
    return [_pod(stateful_set, f"{stateful_set['metadata']['name']}-0")]


def _gateway_pods(deployment: Object) -> list[Object]:
    return [
        _pod(deployment, f"{deployment['metadata']['name']}-{'xyz'[place]}")
        for place in range(deployment["spec"]["replicas"])
    ]


def _pod(workload: Object, name: str) -> Object:
    template = workload["spec"]["template"]
    owner = {"kind": workload["kind"], "name": workload["metadata"]["name"], "uid": workload["metadata"]["uid"]}
    metadata = {**template["metadata"], "name": name, "namespace": NAMESPACE, "ownerReferences": [owner]}
    return {"kind": "Pod", "metadata": metadata, "spec": dict(template["spec"]), "status": {}}


def _label(thing: Object, name: str) -> str:
    return str((thing["metadata"].get("labels") or {}).get(name, ""))


def _gpus(pod: Object) -> int:
    return int(pod["spec"]["containers"][0]["resources"].get("requests", {}).get("nvidia.com/gpu", 0))
