"""`reconcile` over a pretended cluster: a whole life step by step, and what each trouble leads to, by name."""

import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from strata_operator.api import LLMDeployment, LLMDeploymentSpec, LLMDeploymentStatus, deployment_from_object
from strata_operator.decide.actions import (
    Action,
    Apply,
    DeleteEpoch,
    DeletePod,
    DeleteStatefulSet,
    Emit,
    MakePlan,
    RenewEpoch,
    SetStatus,
)
from strata_operator.decide.epochs import Observed, SendToGateway, SendToSlot, highest_epoch
from strata_operator.decide.reconcile import reconcile
from strata_operator.decide.troubles import UNSCHEDULABLE
from strata_operator.decide.view import NodeView, PlanFailure, PodView, View
from strata_operator.decide.wishes import plan_key, without_digest
from strata_operator.render.digest import spec_digest
from strata_operator.render.epoch import Epoch
from strata_operator.render.records import RENEWED, Cause, EpochRecord, as_planned
from strata_planner.question.cluster import Cluster, Device, Node
from tests.operator.fakes import FakeGateway, FakeSlot, a_plan, addresses_of

DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "strata.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u1", "generation": 1},
    "spec": {"model": {"uri": "file:///models/tiny"}, "replanning": {"gracePeriodSeconds": 5}},
}
EVERYTHING = ("a", "b", "c")


class Pretended:
    """A cluster as values. Slots are named after their nodes; `step` lets the operator look and act once."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.spec = copy.deepcopy(DEPLOYMENT["spec"])
        self.status = LLMDeploymentStatus()
        self.records: list[EpochRecord] = []
        self.away: dict[str, datetime] = {}
        self.nodes = {"a", "b"}
        self.slots: dict[str, FakeSlot] = {}
        self.made: dict[str, datetime] = {}
        self.pods: dict[str, PodView] = {}
        self.gateway: FakeGateway | None = None
        self.applied: set[str] = set()
        self.failures: dict[str, PlanFailure] = {}
        self.too_small = False
        self.gateway_ready = True
        self.events: list[str] = []

    def deployment(self) -> LLMDeployment:
        made = deployment_from_object({**DEPLOYMENT, "spec": self.spec})
        return made.model_copy(update={"status": self.status})

    def view(self) -> View:
        usable = sorted(self.nodes - set(self.away))
        newest = self.records[-1] if self.records else None
        planned = sorted({stage.slot for stage in newest.epoch.plan.replicas[0].stages}) if newest else []
        alive = {name: slot for name, slot in self.slots.items() if name in self.nodes and name not in self.away}
        return View(
            now=self.now,
            deployment=self.deployment(),
            records=tuple(self.records),
            nodes={name: NodeView(name, self.away.get(name)) for name in self.nodes},
            pods=tuple(self.pods.values()),
            stateful_sets=dict(self.made),
            templates={},
            seen=Observed(
                slots={name: slot.status() for name, slot in alive.items() if name in planned},
                gateways={"gateway": self.gateway.status()} if self.gateway else {},
                addresses=addresses_of(*planned),
            ),
            inventory_digest=f"{usable}{self.too_small}",
            devices=len(usable),
            refused=tuple(f"node {name}: is not Ready" for name in sorted(self.away)),
            manifests=(
                *({"kind": "StatefulSet", "metadata": {"name": slot}} for slot in planned),
                *([{"kind": "Deployment", "metadata": {"name": "gateway"}}] if planned else []),
            ),
            applied=frozenset(self.applied),
            usable=frozenset(usable),
            failures=dict(self.failures),
            gateway_ready=self.gateway_ready,
        )

    def step(self) -> list[str]:
        """One look; returns what was done, in words. Slots load at once."""
        view = self.view()
        done = []
        for action in reconcile(view):
            self._do(action, view)
            if not isinstance(action, SetStatus | Emit):
                done.append(_words(action))
        for slot in self.slots.values():
            slot.finish_loading()
        return done

    def settle(self) -> list[str]:
        done: list[str] = []
        for _ in range(20):
            before = self.status
            now = self.step()
            done += now
            if not now and self.status == before:
                return done
        raise AssertionError(f"never settles: {done}")

    def condition(self, name: str) -> tuple[str, str]:
        found = next(condition for condition in self.status.conditions if condition.type == name)
        return found.status, found.reason

    def message(self, name: str) -> str:
        return next(condition.message for condition in self.status.conditions if condition.type == name)

    def _do(self, action: Action, view: View) -> None:  # noqa: C901  one case per action
        match action:
            case MakePlan():
                if not action.early:
                    self._plan(action, view)
            case RenewEpoch(number=number):
                last = self.records[-1]
                cause = replace(last.cause, reason=RENEWED, planned_in=last.planned_in, renewals=action.renewals)
                self._record(Epoch(number, f"key-{number}", last.epoch.plan), cause)
            case Apply(manifest=manifest, digest=digest):
                self.applied.add(digest)
                self._apply(manifest["kind"], manifest["metadata"]["name"])
            case SendToSlot(slot=slot, message=message):
                self.slots[slot].handle(message)
            case SendToGateway(message=route):
                assert self.gateway
                self.gateway.handle(route)
            case DeleteStatefulSet(name=name):
                del self.made[name]
                if name in self.nodes and name not in self.away:  # else nobody confirms the pod's end
                    self._end_pod(name)
            case DeletePod(name=name):
                self._end_pod(name)
            case DeleteEpoch(number=number):
                self.records = [record for record in self.records if record.epoch.number != number]
            case SetStatus(status=status):
                self.status = status
            case Emit(reason=reason, message=message):
                self.events.append(f"{reason}: {message}")

    def _plan(self, wish: MakePlan, view: View) -> None:
        usable = sorted(self.nodes - set(self.away) - wish.without)
        deployment = as_planned(view.deployment, view.newest) if wish.recorded else view.deployment
        key = plan_key(view, wish)
        plan = None
        if not self.too_small and usable and deployment.spec.placement.min_stages <= len(usable):
            plan = a_plan(*usable[:2])
        if plan is None or (wish.optional and view.newest and plan == view.newest.epoch.plan):
            said = "needs 9 GiB; the cluster has 8 GiB"
            self.failures[key] = PlanFailure(key, "Infeasible", said, self.now, wish.reason, kept=wish.optional)
            return
        self.failures = {}
        number = 1 + highest_epoch(view.ledger, view.seen)
        without = without_digest(view, wish.without)
        cause = Cause(
            wish.reason, spec_digest(deployment), view.inventory_digest, wish.node, 0.1, without, margin=wish.margin
        )
        self._record(Epoch(number, f"key-{number}", plan), cause, deployment.spec)

    def _record(self, epoch: Epoch, cause: Cause, spec: LLMDeploymentSpec | None = None) -> None:
        cluster = Cluster(nodes=tuple(Node(name, (Device("cpu", memory_bytes=1),)) for name in EVERYTHING))
        self.records.append(EpochRecord(epoch, cluster, cause, self.now, spec or self.records[-1].spec))

    def _apply(self, kind: str, name: str) -> None:
        if kind == "Deployment":
            self.gateway = self.gateway or FakeGateway()
        elif name not in self.made:
            self.made[name] = self.now
            self.slots[name] = FakeSlot(name)
            self.pods[name] = PodView(f"{name}-0", f"uid-{name}", name, name, self.now)

    def _end_pod(self, name: str) -> None:
        slot = name.removesuffix("-0")
        del self.pods[slot], self.slots[slot]


def _words(action: Action) -> str:  # noqa: PLR0911  one case per action
    match action:
        case MakePlan():
            return f"plan: {action.reason}"
        case RenewEpoch():
            return f"renew {action.number}"
        case Apply():
            return f"apply {action.manifest['metadata']['name']}"
        case SendToSlot():
            return f"{type(action.message).__name__.lower()} {action.message.epoch} at {action.slot}"
        case SendToGateway():
            return f"route {action.message.epoch}"
        case DeleteStatefulSet() | DeletePod():
            return f"delete {action.name}"
        case DeleteEpoch():
            return f"forget {action.number}"
        case _:
            raise AssertionError(action)


@pytest.fixture
def pretended() -> Pretended:
    return Pretended()


@pytest.fixture
def serving(pretended: Pretended) -> Pretended:
    pretended.settle()
    return pretended


def test_a_life_from_creation_to_a_lost_node_and_back(pretended: Pretended) -> None:
    world = pretended
    assert world.step() == ["plan: Created"]
    assert (world.status.phase, world.condition("Planned")) == ("Planning", ("Unknown", "Planning"))
    assert world.step() == ["apply a", "apply b", "apply gateway"]
    assert world.status.phase == "Loading"
    assert world.condition("Planned") == ("True", "Created")
    assert world.step() == ["prepare 1 at a", "prepare 1 at b"]
    assert world.step() == []  # that it is committed is recorded first, alone
    assert world.status.committed_epoch == 1
    assert world.step() == ["commit 1 at a", "commit 1 at b"]
    assert world.step() == ["route 1"]
    assert world.step() == []
    assert (world.status.phase, world.condition("Ready")) == ("Ready", ("True", "Serving"))
    assert (world.status.stages_ready, world.status.devices) == ("2/2", "2 x cpu")

    world.nodes.add("c")
    assert world.settle() == []  # a node more is no reason to move
    world.away["b"] = world.now
    assert world.step() == []  # the grace period
    assert world.condition("Degraded") == ("True", "StagesNotReady")
    world.now += timedelta(seconds=5)
    assert world.step() == ["plan: NodeLost"]
    assert world.settle() == [
        *("apply c", "prepare 2 at a", "prepare 2 at c", "commit 2 at a", "commit 2 at c", "route 2"),
        *("delete b", "delete b-0"),
    ]
    assert world.status.phase == "Ready"
    (replan,) = world.status.replans
    assert (replan.epoch, replan.reason, replan.node, replan.seconds_to_ready) == (2, "NodeLost", "b", 0.0)
    assert any(event.startswith("NodeLost: Planned: epoch 2: ") for event in world.events)


def test_looking_twice_changes_nothing(serving: Pretended) -> None:
    assert reconcile(serving.view()) == ()


def test_a_node_that_was_removed_is_lost_at_once(serving: Pretended) -> None:
    serving.nodes = {"a", "c"}
    assert serving.step() == ["plan: NodeLost"]
    serving.settle()
    assert serving.status.phase == "Ready"


def test_a_slot_that_answers_is_not_lost_whatever_its_node_says(serving: Pretended) -> None:
    view = serving.view()
    away = {name: NodeView(name, serving.now - timedelta(minutes=1)) for name in serving.nodes}
    assert not [action for action in reconcile(_with(view, nodes=away)) if isinstance(action, MakePlan)]


def test_what_does_not_fit_is_said_and_not_tried_again_until_something_changes(pretended: Pretended) -> None:
    pretended.too_small = True
    assert pretended.settle() == ["plan: Created"]
    assert pretended.status.phase == "Failed"
    assert pretended.condition("Planned") == ("False", "Infeasible")
    assert "needs 9 GiB" in pretended.message("Planned")
    pretended.too_small = False
    assert pretended.step() == ["plan: Created"]
    pretended.settle()
    assert pretended.status.phase == "Ready"


def test_too_little_left_after_a_loss_is_degraded_with_the_sentence(serving: Pretended) -> None:
    serving.too_small = True
    serving.nodes = {"a"}
    assert serving.settle() == ["plan: NodeLost"]
    assert serving.status.phase == "Degraded"
    assert serving.condition("Degraded") == ("True", "Infeasible")
    serving.too_small = False
    serving.settle()
    assert (serving.status.phase, serving.status.stages_ready) == ("Ready", "1/1")


def test_another_spec_leads_to_another_plan(serving: Pretended) -> None:
    serving.spec["precision"] = {"allowed": [8]}
    assert serving.step() == ["plan: SpecChanged"]
    serving.settle()
    assert (serving.status.phase, serving.status.committed_epoch) == ("Ready", 2)


def test_what_does_not_concern_the_plan_leads_to_none(serving: Pretended) -> None:
    serving.spec["gateway"] = {"service": {"type": "NodePort"}}
    assert serving.settle() == []


def test_a_paused_deployment_is_left_as_it_is(serving: Pretended) -> None:
    serving.spec["paused"] = True
    serving.nodes = {"a"}
    assert serving.settle() == []
    assert serving.status.phase == "Paused"
    serving.spec["paused"] = False
    assert serving.step() == ["plan: NodeLost"]


def test_a_slot_that_was_started_anew_gets_a_new_epoch_of_the_same_plan(serving: Pretended) -> None:
    serving.slots["b"].restart()
    assert serving.step() == ["renew 2"]
    serving.settle()
    assert (serving.status.phase, serving.status.committed_epoch) == ("Ready", 2)
    assert serving.status.replans[0].reason == "SlotLost"


def test_epochs_that_never_last_are_renewed_with_pauses(serving: Pretended) -> None:
    renewed = 0
    for _ in range(40):
        serving.slots["b"].failure = "a step failed"
        renewed += sum(word.startswith("renew") for word in serving.step())
    assert renewed == 3
    serving.now += timedelta(seconds=10)
    assert any(word.startswith("renew") for word in serving.step())


def test_a_pod_that_finds_no_place_leads_to_a_plan_without_its_node(pretended: Pretended) -> None:
    pretended.nodes.add("c")
    pretended.step()
    pretended.step()
    waiting = {"waiting_since": pretended.now, "waiting_for": "0/3 nodes are available: insufficient memory"}
    pretended.pods["b"] = PodView("b-0", "uid-b", "b", "", pretended.now, **waiting)
    pretended.slots["b"].refuses = "never asked"
    assert "plan: Unschedulable" not in pretended.step()
    pretended.now += UNSCHEDULABLE
    assert pretended.step() == []  # it is remembered first, alone
    assert pretended.step() == ["plan: Unschedulable"]
    pretended.settle()
    assert [stage.node for stage in pretended.status.stages] == ["a", "c"]
    assert pretended.status.replans[0].node == "b"


def test_a_refused_prepare_leads_to_a_plan_without_its_node(serving: Pretended) -> None:
    serving.nodes.add("c")
    serving.spec["precision"] = {"allowed": [8]}
    serving.slots["b"].refuses = "layer 3 is missing from the checkpoint"
    assert "plan: PrepareRefused" in serving.settle()
    assert [stage.node for stage in serving.status.stages] == ["a", "c"]


def test_a_stateful_set_that_someone_deleted_comes_back(serving: Pretended) -> None:
    del serving.made["b"]
    serving._end_pod("b")
    assert serving.step() == ["plan: Takeover", "apply b"]  # which is made in case that it does not
    serving.settle()
    assert serving.status.phase == "Ready"


def test_status_and_records_stay_bounded(serving: Pretended) -> None:
    for round_ in range(15):
        serving.now += timedelta(minutes=2)
        serving.spec["workload"] = {"concurrency": round_ + 1}
        serving.settle()
    assert len(serving.status.replans) == 12
    assert len(serving.records) <= 4
    assert serving.status.phase == "Ready"


def test_the_spec_digest_ignores_what_no_plan_depends_on() -> None:
    plain = deployment_from_object(DEPLOYMENT)
    other = deployment_from_object({**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "paused": True}})
    bits = deployment_from_object({**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "precision": {"allowed": [4]}}})
    assert spec_digest(plain) == spec_digest(other) != spec_digest(bits)


def _with(view: View, **changes: Any) -> View:
    fields = {name: getattr(view, name) for name in View.__dataclass_fields__}
    return View(**{**fields, **changes})


def test_it_is_ready_when_clients_reach_the_gateway(pretended: Pretended) -> None:
    pretended.gateway_ready = False
    pretended.settle()
    assert pretended.status.phase == "Loading"
    assert pretended.condition("Ready") == ("False", "GatewayNotReady")
    assert pretended.message("Ready") == "the gateway has no pod that is ready yet"
    pretended.gateway_ready = True
    pretended.settle()
    assert pretended.status.phase == "Ready"
