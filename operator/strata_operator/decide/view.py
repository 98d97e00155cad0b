"""What the controller sees of one deployment at one moment: values cut from Kubernetes objects and slot statuses.

Built by the controller, read by `reconcile` and `report`. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

from strata_operator.api import LLMDeployment
from strata_operator.decide.epochs import Ledger, Observed, reaches_all
from strata_operator.decide.parts import parts_of, waiting
from strata_operator.decide.pod_troubles import PodTrouble, back_off_seconds, out_of_memory_at, pod_trouble
from strata_operator.render.digest import same_spec, spec_digest
from strata_operator.render.names import (
    COMPONENT_LABEL,
    DEVICE_ANNOTATION,
    GATEWAY,
    SLOT_LABEL,
    TEMPLATE_ANNOTATION,
    control_secret,
)
from strata_operator.render.records import EpochRecord, moment
from strata_operator.render.slots import is_pod_of, pod_label
from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.control import EpochChange
from strata_planner.contract.plan import Plan, Stage
from strata_planner.replan.repair import RepairNote

Object = dict[str, Any]
NONE_DRAFTED = DraftCounts()
# Who answers a knock: a process' own port; a kernel without such a process; its node alone; nobody.
Door = Literal["taken", "refused", "kubelet", ""]
_ENDED = {"Succeeded", "Failed"}  # phases of pods that never run again


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node that exists. `away_since`: when it stopped being Ready; None while it is. `ready_since`: the other way round."""

    name: str
    away_since: datetime | None
    ready_since: datetime | None = None
    cordoned: bool = False
    kubelet: tuple[str, int] | None = None  # where it listens, by address and port


@dataclass(frozen=True, slots=True)
class PodView:
    """The pod of a slot, or of a gateway (`stateful_set` is empty). `waiting_since`: since when the scheduler finds no place for it, and why."""

    name: str
    uid: str
    stateful_set: str
    node: str
    made_at: datetime
    restarts: int = 0
    waiting_since: datetime | None = None
    waiting_for: str = ""
    trouble: PodTrouble | None = None
    out_of_memory_at: datetime | None = None  # when the kernel last ended its process for taking more than its limit
    to_end_by: datetime | None = None  # it is to end: when its grace period is over
    back_off_seconds: float = 0.0  # so long its kubelet waits, from the last process' end, before it starts the next
    is_running: bool = True  # no container is known to have ended, or to wait for its start
    started_at: datetime | None = None  # its process, by its node's clock
    image: str = ""
    template: str = ""  # which template it was made of; empty: of a release that did not say
    device: str = ""  # as annotated

    @property
    def is_ending(self) -> bool:
        return self.to_end_by is not None


class PlanKey(NamedTuple):
    """All that an answer of the planner depends on: planning the same again would give the same."""

    spec: str  # digest
    inventory: str  # digest
    without: str  # digest of the nodes that it does without
    margin: float
    optional: bool


@dataclass(frozen=True, slots=True)
class PlanFailure:
    """Planning this (`key`) gave nothing. It is not tried again before the key changes, unless
    it is `passing`: then trying again may help although nothing changes. `kept`: the running plan was good enough.
    """

    key: PlanKey
    reason: str  # CamelCase
    message: str
    at: datetime
    wish: str = ""  # what the plan was wanted for
    passing: bool = False
    kept: bool = False
    gain: float = 0.0  # of what was found and not taken, as a share


@dataclass(frozen=True, slots=True)
class Knocked:
    """Who answers knocks at a slot that fell silent, and since when the same one has."""

    door: Door
    since: datetime


@dataclass(frozen=True, slots=True)
class Foretold:
    """The repair that was made for the loss of these nodes, and not taken yet."""

    nodes: frozenset[str]
    repair: RepairNote


@dataclass(frozen=True, slots=True)
class View:
    """One deployment and all that decides what to do for it now."""

    now: datetime
    deployment: LLMDeployment
    records: tuple[EpochRecord, ...]  # by number, rising
    nodes: Mapping[str, NodeView]
    pods: tuple[PodView, ...]  # of this deployment's slots
    stateful_sets: Mapping[str, datetime]  # of this deployment's slots: name -> made at
    templates: Mapping[str, str]  # of the same, as noted in them
    seen: Observed
    inventory_digest: str
    devices: int  # in the inventory
    usable: frozenset[str]  # nodes in the inventory
    refused: tuple[str, ...]  # nodes left out, as sentences
    manifests: tuple[Object, ...]  # what serves the newest plan
    applied: frozenset[str]  # digests of manifests that are in the cluster
    failures: Mapping[PlanKey, PlanFailure]  # the last few
    gateway_pods: tuple[PodView, ...] = ()
    gateway_ready: bool = True  # a gateway's pod is behind the Service that clients use
    highest_number: int = 0  # of all records, those included that this release cannot read
    troubles: tuple[str, ...] = ()  # what could not be read or done for reasons nobody foresaw, as sentences
    refusals: tuple[str, ...] = ()  # what the API server refused, as sentences that name the object
    postponed: frozenset[str] = frozenset()  # digests of manifests that were refused and wait to be tried again
    drafted: DraftCounts = NONE_DRAFTED  # under the newest plan's wish, since this operator has heard of it
    unreachable: frozenset[str] = (
        frozenset()
    )  # slots that fell silent, and where nobody answers a knock: neither a kernel nor a kubelet
    knocked: Mapping[str, Knocked] = field(default_factory=dict)  # at slots that fell silent, where anybody answers
    foretold: Foretold | None = None
    is_unsaid: bool = False  # `deployment.status` is known here alone: the API server would not take it as it is

    @property
    def gateway_trouble(self) -> PodTrouble | None:
        """What keeps a gateway's pod from starting, if anything does."""
        return next((pod.trouble for pod in self.gateway_pods if pod.trouble), None)

    @property
    def gateways_ready(self) -> int:
        """How many serve the newest epoch: they route to it and reach all its leaders."""
        epoch = self.newest.epoch if self.newest else None
        return 0 if epoch is None else sum(reaches_all(gateway, epoch) for gateway in self.seen.gateways.values())

    def is_there(self, node: str) -> bool:
        """Whether Kubernetes has the node, and calls it Ready."""
        found = self.nodes.get(node)
        return found is not None and found.away_since is None

    def changes_to(self, epoch: int) -> tuple[EpochChange, ...]:
        """What the change to an epoch cost, by every gateway that answers; empty until all of them have told, so that it is told once."""
        told = self.seen.gateways.values()
        known = tuple(each for gateway in told for each in gateway.changes if each.epoch == epoch)
        return known if len(known) == len(told) else ()

    @property
    def newest(self) -> EpochRecord | None:
        return self.records[-1] if self.records else None

    @property
    def in_force(self) -> EpochRecord | None:
        """The epoch that was committed last."""
        committed = self.deployment.status.committed_epoch
        return next((record for record in self.records if record.epoch.number == committed), None)

    @property
    def ledger(self) -> Ledger:
        newest, in_force = self.newest, self.in_force
        committed = self.deployment.status.committed_epoch
        return Ledger(newest.epoch if newest else None, committed, in_force.epoch if in_force else None)

    @property
    def plan(self) -> Plan | None:
        return self.newest.epoch.plan if self.newest else None

    @property
    def spec_digest(self) -> str:
        """As the newest epoch has it, where that release's digest is of the same spec."""
        recorded = self.newest.cause.spec_digest if self.newest else ""
        return recorded if same_spec(self.deployment, recorded) else spec_digest(self.deployment)

    def stages(self) -> list[Stage]:
        return [stage for replica in self.plan.replicas for stage in replica.stages] if self.plan else []

    def answers(self, slot: str) -> bool:
        return slot in self.seen.slots

    @property
    def is_committed(self) -> bool:
        """Whether the newest epoch is in force, and nobody who answers waits to pass into it."""
        committed = self.deployment.status.committed_epoch
        return self.newest is not None and self.newest.epoch.number == committed and not self.waiting

    def has_begun(self, slot: str) -> bool:
        """Whether the newest epoch is in force, and nobody of this slot's replicas waits to pass into it."""
        if self.newest is None or self.newest.epoch.number != self.deployment.status.committed_epoch:
            return False
        return not any(slot in part and part & self.waiting for part in parts_of(self.newest.epoch.plan))

    @property
    def waiting(self) -> frozenset[str]:
        """Slots that answer and do not pass into the newest epoch yet: they load, or another one of their replicas' does."""
        return waiting(self.newest.epoch, self.seen.slots) if self.newest else frozenset()

    @property
    def is_replacing(self) -> bool:
        """Whether slots are ended to get another template, one at a time: that is neither a loss nor a failure."""
        return any(each.type == "Updated" and each.status == "False" for each in self.deployment.status.conditions)

    def pod_of(self, slot: str) -> PodView | None:
        """Its StatefulSet has the slot's name."""
        return next((pod for pod in self.pods if pod.stateful_set == slot), None)


def node_view(node: Mapping[str, Any]) -> NodeView:
    ready = _ready(node)
    away = _away_since(node, ready)
    return NodeView(
        name=node["metadata"]["name"],
        away_since=away,
        ready_since=None if away else _ready_since(ready),
        cordoned=bool(node.get("spec", {}).get("unschedulable")),
        kubelet=_kubelet(node),
    )


def _kubelet(node: Mapping[str, Any]) -> tuple[str, int] | None:
    status = node.get("status", {})
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    hosts = (each["address"] for each in status.get("addresses") or () if each["type"] == "InternalIP")
    host = next(hosts, None)
    return (host, int(port)) if host and port else None


def pod_views(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> tuple[PodView, ...]:
    """The slot pods of one deployment."""
    return tuple(_pod_view(pod) for pod in pods if is_pod_of(deployment, pod) and pod_label(pod, SLOT_LABEL))


def gateway_pod_views(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> tuple[PodView, ...]:
    return tuple(map(_pod_view, _gateway_pods(deployment, pods)))


def gateway_hosts(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Where each gateway's pod is reached, by its name."""
    return _hosts((pod["metadata"]["name"], pod) for pod in _gateway_pods(deployment, pods))


def slot_hosts(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Where each slot's pod is reached, by the slot: asking for its name would begin before it is there, and be told so for longer."""
    return _hosts(_slot_pods(deployment, pods))


def slot_nodes(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """On which node each slot's pod is, by the slot."""
    own = _slot_pods(deployment, pods)
    return {slot: str((pod.get("spec") or {}).get("nodeName") or "") for slot, pod in own}


def _slot_pods(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((slot, pod) for pod in pods if is_pod_of(deployment, pod) and (slot := pod_label(pod, SLOT_LABEL)))


def _hosts(pods: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Of those that have an address and whose containers have not all ended for good."""
    found = ((name, pod.get("status") or {}) for name, pod in pods)
    return {name: host for name, status in found if status.get("phase") not in _ENDED and (host := _address(status))}


def _address(status: Mapping[str, Any]) -> str:
    """Of the first family that ZeroMQ speaks unasked, which is IPv4."""
    listed = [str(each.get("ip", "")) for each in status.get("podIPs") or ()]
    return next((address for address in listed if ":" not in address), str(status.get("podIP") or ""))


def gateway_is_ready(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a gateway's pod is Ready: only then the Service leads to it."""
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for pod in _gateway_pods(deployment, pods)
        for condition in pod.get("status", {}).get("conditions") or ()
    )


def given_the_control_key(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Slots, and gateways' pods, that read the Secret which only the operator should: those that 0.1.0 made and that still run."""
    return frozenset(
        pod_label(pod, SLOT_LABEL) or pod["metadata"]["name"]
        for pod in pods
        if is_pod_of(deployment, pod) and control_secret(deployment) in _secrets_read_by(pod)
    )


def _secrets_read_by(pod: Mapping[str, Any]) -> set[str]:
    """By the environment of its containers."""
    return {
        variable["valueFrom"]["secretKeyRef"]["name"]
        for container in pod.get("spec", {}).get("containers") or ()
        for variable in container.get("env") or ()
        if "secretKeyRef" in (variable.get("valueFrom") or {})
    }


def _gateway_pods(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (pod for pod in pods if is_pod_of(deployment, pod) and pod_label(pod, COMPONENT_LABEL) == GATEWAY)


def _ready(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    conditions = node.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == "Ready"), None)


def _ready_since(ready: Mapping[str, Any] | None) -> datetime | None:
    text = (ready or {}).get("lastTransitionTime")
    return moment(text) if text else None


def _away_since(node: Mapping[str, Any], ready: Mapping[str, Any] | None) -> datetime | None:
    if ready is not None and ready["status"] == "True":
        return None
    since = (ready or {}).get("lastTransitionTime")  # which the API server does not insist on
    return moment(since or node["metadata"]["creationTimestamp"])


def _pod_view(pod: Mapping[str, Any]) -> PodView:
    status = pod.get("status", {})
    states = [container.get("state") or {} for container in status.get("containerStatuses") or ()]
    started = next((each["running"].get("startedAt") for each in states if each.get("running")), None)
    ends = pod["metadata"].get("deletionTimestamp")
    place = next((c for c in status.get("conditions") or () if c["type"] == "PodScheduled"), None)
    waiting = place is not None and place["status"] == "False"
    notes = pod["metadata"].get("annotations") or {}
    return PodView(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        stateful_set=pod_label(pod, SLOT_LABEL),
        node=pod.get("spec", {}).get("nodeName", ""),
        made_at=moment(pod["metadata"]["creationTimestamp"]),
        restarts=sum(container.get("restartCount", 0) for container in status.get("containerStatuses") or ()),
        waiting_since=moment(place["lastTransitionTime"]) if place and waiting else None,
        waiting_for=place.get("message", "") if place and waiting else "",
        trouble=pod_trouble(pod),
        out_of_memory_at=out_of_memory_at(pod),
        to_end_by=moment(ends) if ends else None,
        back_off_seconds=back_off_seconds(pod),
        is_running=not any(set(state) & {"waiting", "terminated"} for state in states),
        started_at=moment(started) if started else None,
        image=next((each.get("image", "") for each in pod.get("spec", {}).get("containers") or ()), ""),
        template=notes.get(TEMPLATE_ANNOTATION, ""),
        device=notes.get(DEVICE_ANNOTATION, ""),
    )
