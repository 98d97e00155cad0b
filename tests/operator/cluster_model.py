"""A small Kubernetes in memory with a virtual clock: its objects, its scheduler and kubelets, and slots that only speak.

`Kubernetes` holds objects in their real shape and answers the operator's verbs, each of which a fault may refuse or lose.
`Operator` is the controller's shell without threads and sockets: it looks, asks `reconcile`, does. Whoever drives the
real controller gives it `Kubernetes` in place of the API client.
"""

import base64
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

from strata_operator.act.objects import status_object
from strata_operator.api import LLMDeployment, LLMDeploymentStatus, deployment_from_object
from strata_operator.decide.actions import (
    Action,
    Apply,
    DeleteEpoch,
    DeletePod,
    DeleteStatefulSet,
    MakePlan,
    RenewEpoch,
    SetStatus,
)
from strata_operator.decide.epochs import Observed, SendToGateway, SendToSlot, highest_epoch
from strata_operator.decide.reconcile import reconcile
from strata_operator.decide.view import PlanFailure, View, node_views, pod_views
from strata_operator.decide.wishes import plan_key, without_digest
from strata_operator.observe.inventory import Inventory, take_inventory
from strata_operator.observe.snapshot import Snapshot
from strata_operator.render import RenderOptions, render
from strata_operator.render.digest import spec_digest
from strata_operator.render.epoch import Epoch
from strata_operator.render.names import INSTANCE_LABEL, epoch_name, slot_address
from strata_operator.render.records import (
    RENEWED,
    Cause,
    EpochRecord,
    as_planned,
    read_record,
    record_objects,
    stamp,
)
from strata_operator.render.slots import claims_of, slots_of
from strata_planner.contract.plan import DeviceRef, Plan
from strata_planner.question.cluster import Cluster
from tests.operator.builders import a_deployment, a_node
from tests.operator.fakes import FakeGateway, FakeSlot, a_plan

Object = dict[str, Any]
GPUS = 2  # of every node
WIDEST = 2  # nodes that the pretended planner uses at most
HEALED_BY = 0.2  # share of memory left free that ends a lack of memory


class WriteError(Exception):
    """The API server refused a write, or its answer was lost."""


@dataclass
class Faults:
    """What is wrong now, by node; `writes`: what becomes of the next writes."""

    refuses: set[str] = field(default_factory=set)
    hangs: set[str] = field(default_factory=set)
    no_place: set[str] = field(default_factory=set)
    out_of_memory: set[str] = field(default_factory=set)
    quota: bool = False
    writes: list[Literal["refused", "lost"]] = field(default_factory=list)

    def end(self) -> None:
        for nodes in (self.refuses, self.hangs, self.no_place, self.out_of_memory, self.writes):
            nodes.clear()
        self.quota = False


class Kubernetes:
    """API server, scheduler and kubelets. Objects by (kind, name), all in one namespace."""

    def __init__(self, *nodes: str) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.objects: dict[tuple[str, str], Object] = {}
        self.faults = Faults()
        self.slots: dict[str, FakeSlot] = {}  # by pod's uid
        self.gateways: dict[str, FakeGateway] = {}  # by deployment
        self._uids = itertools.count(1)
        for name in nodes:
            self.add_node(name)

    # What the operator may ask of it.

    def all(self, kind: str) -> tuple[Object, ...]:
        return tuple(thing for (each, _), thing in sorted(self.objects.items()) if each == kind)

    def apply(self, manifest: Object) -> None:
        self._write(lambda: self._merge(manifest))

    def create(self, *manifests: Object) -> None:
        """Raises WriteError where the last of them exists; a Secret that is there already is an earlier attempt's."""
        for manifest in manifests:
            if (manifest["kind"], manifest["metadata"]["name"]) not in self.objects:
                self._write(functools.partial(self._put, manifest))
            elif manifest is manifests[-1]:
                raise WriteError

    def set_status(self, body: Object) -> None:
        self._write(lambda: self.objects["LLMDeployment", body["metadata"]["name"]].update(status=body["status"]))

    def delete(self, kind: str, name: str, *, uid: str = "", force: bool = True) -> None:
        self._write(lambda: self._delete(kind, name, uid, force=force))

    # What happens in it.

    def add_node(self, name: str) -> None:
        node = a_node(name).with_gpus("Tesla-T4", GPUS).build()
        self.objects["Node", name] = {"kind": "Node", **node}
        self.set_ready(name, "True")

    def set_ready(self, name: str, status: str) -> None:
        """Not Ready is no power: its processes end, and their pods stay."""
        ready = {"type": "Ready", "status": status, "lastTransitionTime": stamp(self.now)}
        self.objects["Node", name]["status"]["conditions"] = [ready]
        for pod in self.pods_on(name) if status != "True" else ():
            self.slots.pop(pod["metadata"]["uid"], None)

    def is_up(self, name: str) -> bool:
        node = self.objects.get(("Node", name))
        return node is not None and node["status"]["conditions"][0]["status"] == "True"

    def remove_node(self, name: str) -> None:
        for pod in self.pods_on(name):
            self.end(pod)
        del self.objects["Node", name]

    def cordon(self, name: str, *, closed: bool) -> None:
        self.objects["Node", name]["spec"]["unschedulable"] = closed

    def tick(self, seconds: float = 0) -> None:
        """Time passes; controllers, scheduler and kubelets do what they have to."""
        self.now += timedelta(seconds=seconds)
        for stateful_set in self.all("StatefulSet"):
            if ("Pod", f"{stateful_set['metadata']['name']}-0") not in self.objects and not self.faults.quota:
                self._put(self._pod_of(stateful_set))
        for pod in self.all("Pod"):
            self._move(pod)

    def slot_of(self, name: str) -> FakeSlot | None:
        """The process that answers for a slot now."""
        pod = self.objects.get(("Pod", f"{name}-0"))
        return self.slots.get(pod["metadata"]["uid"]) if pod else None

    def _write(self, do: Callable[[], None]) -> None:
        fault = self.faults.writes.pop() if self.faults.writes else None
        if fault == "refused":
            raise WriteError
        do()
        if fault == "lost":
            raise WriteError

    def _put(self, manifest: Object) -> None:
        own = {"uid": f"uid-{next(self._uids)}", "creationTimestamp": stamp(self.now)}
        thing = {**manifest, "metadata": {**manifest["metadata"], **own}}
        if "stringData" in thing:
            thing["data"] = {k: base64.b64encode(v.encode()).decode() for k, v in thing.pop("stringData").items()}
        self.objects[thing["kind"], thing["metadata"]["name"]] = thing

    def _merge(self, manifest: Object) -> None:
        there = self.objects.get((manifest["kind"], manifest["metadata"]["name"]))
        self._put(manifest)
        if there:
            self.objects[manifest["kind"], manifest["metadata"]["name"]]["metadata"] |= {
                name: there["metadata"][name] for name in ("uid", "creationTimestamp")
            }

    def _delete(self, kind: str, name: str, uid: str, *, force: bool) -> None:
        thing = self.objects.get((kind, name))
        if thing is None or (uid and thing["metadata"]["uid"] != uid):
            return
        if kind == "Pod" and not force:
            thing["metadata"]["deletionTimestamp"] = stamp(self.now)
        elif kind == "Pod":
            self.end(thing)
        else:
            del self.objects[kind, name]
            pod = self.objects.get(("Pod", f"{name}-0")) if kind == "StatefulSet" else None
            if pod is not None:
                pod["metadata"]["deletionTimestamp"] = stamp(self.now)

    def end(self, pod: Object) -> None:
        self.slots.pop(pod["metadata"]["uid"], None)
        self.objects.pop(("Pod", pod["metadata"]["name"]), None)

    def _pod_of(self, stateful_set: Object) -> Object:
        template = stateful_set["spec"]["template"]
        name = f"{stateful_set['metadata']['name']}-0"
        metadata = {**template["metadata"], "name": name, "namespace": stateful_set["metadata"]["namespace"]}
        return {"kind": "Pod", "metadata": metadata, "spec": dict(template["spec"]), "status": {}}

    def pods_on(self, node: str) -> list[Object]:
        return [pod for pod in self.all("Pod") if pod["spec"].get("nodeName") == node]

    def _move(self, pod: Object) -> None:
        """Scheduled, started, loaded, ended: one step of each."""
        node = pod["spec"].get("nodeName") or self._place(pod)
        uid = pod["metadata"]["uid"]
        if not node or not self.is_up(node):
            return
        if pod["metadata"].get("deletionTimestamp"):
            self.end(pod)
            return
        slot = self.slots.setdefault(uid, FakeSlot(pod["metadata"]["name"].removesuffix("-0")))
        slot.refuses = "401 from the hub" if node in self.faults.refuses else ""
        if node not in self.faults.hangs:
            slot.finish_loading()
        if node in self.faults.out_of_memory and slot.committed:
            self._kill(pod, slot)

    def _place(self, pod: Object) -> str:
        terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (node,) = terms["nodeSelectorTerms"][0]["matchFields"][0]["values"]
        fits = _gpus(pod) + sum(map(_gpus, self.pods_on(node))) <= GPUS
        closed = self.objects.get(("Node", node), {"spec": {"unschedulable": True}})["spec"].get("unschedulable")
        placed = fits and not closed and self.is_up(node) and node not in self.faults.no_place
        before = next(iter(pod["status"].get("conditions") or ()), {})
        if before.get("status") != str(placed):
            condition = {"type": "PodScheduled", "status": str(placed), "lastTransitionTime": stamp(self.now)}
            pod["status"]["conditions"] = [{**condition, "message": "" if placed else "0/3 nodes are available"}]
        if placed:
            pod["spec"]["nodeName"] = node
        return node if placed else ""

    def _kill(self, pod: Object, slot: FakeSlot) -> None:
        ended = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": stamp(self.now)}
        statuses = pod["status"].setdefault("containerStatuses", [{"restartCount": 0}])
        statuses[0] = {"restartCount": statuses[0]["restartCount"] + 1, "lastState": {"terminated": ended}}
        slot.restart()
        deployment = pod["metadata"]["labels"]["app.kubernetes.io/instance"]
        for other in self.all("Pod"):
            if other["metadata"]["labels"]["app.kubernetes.io/instance"] == deployment and other is not pod:
                neighbour = self.slots.get(other["metadata"]["uid"])
                if neighbour is not None:
                    neighbour.lose(slot.name)


def _gpus(pod: Object) -> int:
    return int(pod["spec"]["containers"][0]["resources"]["requests"].get("nvidia.com/gpu", 0))


@dataclass(frozen=True)
class Planned:
    """A plan that was asked for."""

    at: datetime
    deployment: str
    wish: MakePlan
    found: bool


class Operator:
    """Looks and acts. What it keeps in memory ends with it; `plans` and `told` are the tests'."""

    def __init__(self, cluster: Kubernetes) -> None:
        self.cluster = cluster
        self.failures: dict[str, dict[str, PlanFailure]] = {}
        self.applied: dict[str, dict[str, str]] = {}  # by deployment, by kind and name
        self.plans: list[Planned] = []
        self._records: dict[str, EpochRecord] = {}  # by uid
        self.on_action: Callable[[View, Action], None] = lambda _view, _action: None

    def look(self) -> bool:
        """Once at every deployment; whether anything was done or said."""
        snapshot = self.snapshot()
        acted = False
        for thing in snapshot.deployments:
            view = self.view(_deployment(thing), snapshot)
            for action in reconcile(view):
                acted = True
                self.on_action(view, action)
                try:
                    self._do(action, view)
                except WriteError:
                    continue  # one object's failure stops no other
                if isinstance(action, MakePlan):
                    break  # all else was decided before there was this plan
        return acted

    def snapshot(self) -> Snapshot:
        kinds = ("LLMDeployment", "Node", "Pod", "StatefulSet", "ConfigMap", "Secret")
        return Snapshot(*(self.cluster.all(kind) for kind in kinds))

    def view(self, deployment: LLMDeployment, snapshot: Snapshot) -> View:
        name, cluster = deployment.name, self.cluster
        records = self.records(snapshot, name)
        newest = records[-1] if records else None
        inventory = self.inventory(deployment, snapshot)
        planned = sorted({stage.slot for stage in newest.epoch.plan.stages}) if newest else []
        manifests = _manifests(deployment, newest) if newest else ()
        gateway = cluster.gateways.get(name)
        running = {slot: process for slot in planned if (process := cluster.slot_of(slot))}
        return View(
            now=cluster.now,
            deployment=deployment,
            records=records,
            nodes=node_views(snapshot.nodes),
            pods=pod_views(deployment, snapshot.pods),
            stateful_sets=snapshot.stateful_sets_of(deployment),
            templates=snapshot.templates_of(deployment),
            seen=Observed(
                slots={slot: process.status() for slot, process in running.items()},
                gateways={"gateway": gateway.status()} if gateway else {},
                addresses={slot: slot_address(deployment, slot) for slot in planned},
            ),
            inventory_digest=inventory.digest,
            devices=sum(device.count for node in inventory.cluster.nodes for device in node.devices),
            usable=frozenset(node.name for node in inventory.cluster.nodes),
            refused=inventory.refused,
            manifests=manifests,
            applied=frozenset(self.applied.get(name, {}).values()),
            failures=self.failures.get(name, {}),
        )

    def records(self, snapshot: Snapshot, name: str) -> tuple[EpochRecord, ...]:
        """They never change: each is read once."""
        mine = [each for each in snapshot.config_maps if each["metadata"]["labels"][INSTANCE_LABEL] == name]
        secrets = {each["metadata"]["name"]: each for each in snapshot.secrets}
        for each in mine:
            uid = each["metadata"]["uid"]
            if uid not in self._records:
                self._records[uid] = read_record(secrets[each["metadata"]["name"]], each)
        found = [self._records[each["metadata"]["uid"]] for each in mine]
        return tuple(sorted(found, key=lambda record: record.epoch.number))

    def inventory(self, deployment: LLMDeployment, snapshot: Snapshot) -> Inventory:
        others = [_deployment(each) for each in snapshot.deployments]
        claims = [
            claim
            for other in others
            if other.name != deployment.name
            for record in self.records(snapshot, other.name)[-1:]
            for claim in claims_of(other, record.epoch.plan, record.cluster)
        ]
        return take_inventory(deployment, snapshot.nodes, snapshot.pods, claims)

    def _do(self, action: Action, view: View) -> None:  # noqa: C901  one case per action
        name = view.deployment.name
        match action:
            case MakePlan():
                self._plan(action, view)
            case RenewEpoch(number=number, renewals=renewals):
                newest = view.newest
                assert newest
                cause = replace(newest.cause, reason=RENEWED, planned_in=newest.planned_in, renewals=renewals)
                planned = replace(view, deployment=as_planned(view.deployment, newest))
                self._create(planned, Epoch(number, f"key-{number}", newest.epoch.plan), newest.cluster, cause)
            case Apply(manifest=manifest, digest=digest):
                if manifest["kind"] == "Deployment":
                    self.cluster.gateways.setdefault(name, FakeGateway())
                self.cluster.apply(manifest)
                what = f"{manifest['kind']} {manifest['metadata']['name']}"
                self.applied.setdefault(name, {})[what] = digest
            case SendToSlot(slot=slot, message=message):
                process = self.cluster.slot_of(slot)
                if process:
                    process.handle(message)
            case SendToGateway(message=route):
                self.cluster.gateways[name].handle(route)
            case DeleteStatefulSet(name=slot):
                self.cluster.delete("StatefulSet", slot)
            case DeletePod(name=pod, uid=uid, force=force):
                self.cluster.delete("Pod", pod, uid=uid, force=force)
            case DeleteEpoch(number=number):
                for kind in ("ConfigMap", "Secret"):
                    self.cluster.delete(kind, epoch_name(view.deployment, number))
            case SetStatus(status=status):
                self.cluster.set_status(status_object(view.deployment, status))

    def _plan(self, wish: MakePlan, view: View) -> None:
        deployment = as_planned(view.deployment, view.newest) if wish.recorded else view.deployment
        inventory = self.inventory(deployment, self.snapshot())
        plan = plan_of(deployment, inventory.cluster, wish.without)
        running = view.newest.epoch.plan if view.newest else None
        nothing_gained = wish.optional and plan == running
        self.plans.append(Planned(view.now, deployment.name, wish, plan is not None))
        if plan is None or nothing_gained:
            key = plan_key(view, wish)
            failure = PlanFailure(
                key, "Infeasible", "there are too few nodes", view.now, wish.reason, kept=nothing_gained
            )
            self.failures.setdefault(deployment.name, {})[key] = failure
            return
        self.failures.get(deployment.name, {}).pop(plan_key(view, wish), None)
        number = 1 + highest_epoch(view.ledger, view.seen)
        without = without_digest(view, wish.without)
        digest = spec_digest(deployment)
        cause = Cause(wish.reason, digest, inventory.digest, wish.node, 0.1, without, wish.margin)
        self._create(
            replace(view, deployment=deployment), Epoch(number, f"key-{number}", plan), inventory.cluster, cause
        )
        if wish.margin >= HEALED_BY:
            self.cluster.faults.out_of_memory.clear()

    def _create(self, view: View, epoch: Epoch, cluster: Cluster, cause: Cause) -> None:
        self.cluster.create(*record_objects(view.deployment, epoch, cluster, cause))


def plan_of(deployment: LLMDeployment, cluster: Cluster, without: frozenset[str]) -> Plan | None:
    """All free GPUs of the first nodes by name: a pretended planner that always gives the same for the same."""
    nodes = [node for node in cluster.nodes if node.name not in without][:WIDEST]
    if len(nodes) < deployment.spec.placement.min_stages:
        return None
    plan = a_plan(*(f"{deployment.name}-{node.name}" for node in nodes), bits=deployment.spec.precision.allowed[0])
    stages = tuple(
        msgspec.structs.replace(
            stage,
            node=node.name,
            devices=tuple(
                DeviceRef(device.type, index, 1 << 30) for device in node.devices for index in range(device.count)
            ),
        )
        for stage, node in zip(plan.replicas[0].stages, nodes, strict=True)
    )
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(plan.replicas[0], stages=stages),))


def a_served(name: str) -> Object:
    thing = a_deployment(name).with_spec(model={"uri": "file:///models/tiny"}).to_object()
    return {**thing, "spec": {**thing["spec"], "runtime": {"image": "runtime:1"}}}


def _deployment(thing: Object) -> LLMDeployment:
    """What has not changed is not read again."""
    text = json.dumps(thing)
    if text not in _READ:
        _READ.clear() if len(_READ) > READ else None
        _READ[text] = deployment_from_object(thing)
    return _READ[text]


def status_of(cluster: Kubernetes, name: str) -> LLMDeploymentStatus:
    return deployment_from_object(cluster.objects["LLMDeployment", name]).status


READ = 1000
_READ: dict[str, LLMDeployment] = {}
_RENDERED: dict[tuple[Any, ...], tuple[Object, ...]] = {}


def _manifests(deployment: LLMDeployment, newest: EpochRecord) -> tuple[Object, ...]:
    key = (repr(deployment.spec), newest.cause, newest.epoch.plan.encode())
    if (deployment.name, *key) not in _RENDERED:
        image = deployment.spec.runtime.image or ""
        slots = slots_of(newest.epoch.plan, newest.cluster)
        planned = as_planned(deployment, newest)
        _RENDERED[deployment.name, *key] = tuple(render(planned, slots, RenderOptions(image, "key", "strata")))
    return _RENDERED[deployment.name, *key]
