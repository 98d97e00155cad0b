"""The operator's state machine: whatever goes wrong, and in whatever order, `reconcile` leads back to service.

Nodes flap, vanish and are cordoned; slots refuse, hang and run out of memory; pods find no place; specs are edited, also
to what cannot be planned; writes are refused or their answers lost; the operator is started anew. Time is virtual.
"""

from datetime import timedelta
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata_operator.decide.actions import Action, MakePlan, SetStatus
from strata_operator.decide.epochs import SendToSlot
from strata_operator.decide.view import View
from strata_planner.contract.control import Commit, Prepare
from tests.operator.cluster_model import GPUS, Kubernetes, Operator, Planned, a_served, status_of

NODES = ("a", "b", "c", "d")
NAMES = ("one", "two")
HOUR = timedelta(hours=1)
PLANS_PER_HOUR = 16  # of a deployment, beside those that a loss or a person asks for
LOSSES_PER_HOUR = 75
TROUBLE = {"PrepareRefused", "PrepareStalled", "Unschedulable"}
nodes = st.sampled_from(NODES)
names = st.sampled_from(NAMES)


class Life(RuleBasedStateMachine):
    """Two deployments on four nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Kubernetes(*NODES)
        for name in NAMES:
            self.cluster.objects["LLMDeployment", name] = a_served(name)
        self.plans: list[Planned] = []
        self.edited = dict.fromkeys(NAMES, self.cluster.now)
        self.operator_starts_anew()

    @rule()
    def operator_starts_anew(self) -> None:
        self.operator = Operator(self.cluster)
        self.operator.plans = self.plans
        self.operator.on_action = self.check
        self.edited = dict.fromkeys(NAMES, self.cluster.now)  # what had failed is tried once more

    @rule(seconds=st.sampled_from([1, 10, 70, 700, 2000]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.tick(seconds)
        self.looks()

    @rule(node=nodes)
    def node_goes_away(self, node: str) -> None:
        if self.cluster.is_up(node):
            self.cluster.set_ready(node, "Unknown")
        self.cluster.tick(10)
        self.looks()

    @rule(node=nodes)
    def node_comes_back(self, node: str) -> None:
        if ("Node", node) not in self.cluster.objects:
            self.cluster.add_node(node)
        elif not self.cluster.is_up(node):
            self.cluster.set_ready(node, "True")
        self.looks()

    @rule(node=nodes)
    def node_vanishes(self, node: str) -> None:
        if ("Node", node) in self.cluster.objects:
            self.cluster.remove_node(node)
        self.looks()

    @rule(node=nodes, closed=st.booleans())
    def node_is_cordoned(self, node: str, closed: bool) -> None:  # noqa: FBT001
        if ("Node", node) in self.cluster.objects:
            self.cluster.cordon(node, closed=closed)
        self.looks()

    @rule(node=nodes, what=st.sampled_from(["refuses", "hangs", "no_place", "out_of_memory"]), wrong=st.booleans())
    def slots_of_a_node_fail(self, node: str, what: str, wrong: bool) -> None:  # noqa: FBT001
        failing: set[str] = getattr(self.cluster.faults, what)
        failing.add(node) if wrong else failing.discard(node)
        for pod in self.cluster.pods_on(node) if wrong else ():  # what comes back meets it
            self.cluster.end(pod)
        self.looks()

    @rule(name=names, what=st.sampled_from(["refuses", "hangs", "no_place"]), bits=st.sampled_from([4, 8, 16]))
    def slots_fail_everywhere_for_an_hour(self, name: str, what: str, bits: int) -> None:
        getattr(self.cluster.faults, what).update(NODES)
        self.spec_is_edited(name, bits)
        for _ in range(12):
            self.cluster.tick(300)
            self.looks(2)

    @rule(quota=st.booleans())
    def a_quota_forbids_pods(self, quota: bool) -> None:  # noqa: FBT001
        self.cluster.faults.quota = quota
        self.looks()

    @rule(name=names, slot=st.integers(0, 1))
    def a_pod_is_deleted(self, name: str, slot: int) -> None:
        pods = [pod["metadata"]["name"] for pod in self.cluster.all("Pod") if pod["metadata"]["name"].startswith(name)]
        if slot < len(pods):
            self.cluster._delete("Pod", pods[slot], "", force=False)
        self.looks()

    @rule(name=names, bits=st.sampled_from([4, 8, 16]))
    def spec_is_edited(self, name: str, bits: int) -> None:
        self.edit(name, "precision", {"allowed": [bits]})

    @rule(name=names, stages=st.sampled_from([1, 7]))
    def spec_asks_for_stages(self, name: str, stages: int) -> None:
        self.edit(name, "placement", {"minStages": stages})

    @rule(name=names, value=st.sampled_from("xyz"))
    def environment_is_edited(self, name: str, value: str) -> None:
        runtime = self.cluster.objects["LLMDeployment", name]["spec"]["runtime"]
        self.edit(name, "runtime", {**runtime, "pod": {"env": [{"name": "X", "value": value}]}})

    @rule(name=names, image=st.sampled_from(["runtime:1", "runtime:2"]), bits=st.sampled_from([4, 8, 16]))
    def image_is_edited(self, name: str, image: str, bits: int) -> None:
        self.cluster.objects["LLMDeployment", name]["spec"]["precision"] = {"allowed": [bits]}
        self.edit(name, "runtime", {"image": image})

    @precondition(lambda self: not self.cluster.faults.writes)
    @rule(faults=st.lists(st.sampled_from(["refused", "lost"]), min_size=1, max_size=6))
    def writes_fail(self, faults: list[Any]) -> None:
        self.cluster.faults.writes = faults
        self.looks()

    def edit(self, name: str, part: str, value: Any) -> None:
        thing = self.cluster.objects["LLMDeployment", name]
        if thing["spec"].get(part) != value:
            thing["spec"][part] = value
            thing["metadata"]["generation"] += 1
            self.edited[name] = self.cluster.now
        self.looks()

    def looks(self, most: int = 4) -> None:
        for _ in range(most):
            acted = self.operator.look()
            self.cluster.tick(1)
            if not acted:
                return

    def check(self, view: View, action: Action) -> None:
        """What an action rests on is in status before."""
        if isinstance(action, MakePlan) and action.reason in TROUBLE:
            assert view.newest is not None
            assert view.newest.epoch.number in {each.epoch for each in view.deployment.status.exclusions}
        if isinstance(action, SendToSlot) and isinstance(action.message, Commit):
            assert view.deployment.status.committed_epoch == action.message.epoch
        if isinstance(action, SendToSlot) and isinstance(action.message, Prepare):
            slots = {stage.slot for stage in view.stages()}
            assert len({pod.image for pod in view.pods if pod.stateful_set in slots}) == 1
        if isinstance(action, SetStatus):
            assert action.status.observed_generation == view.deployment.metadata.generation

    @invariant()
    def no_device_is_dealt_twice(self) -> None:
        snapshot = self.operator.snapshot()
        dealt: dict[str, int] = {}
        for name in NAMES:
            for record in self.operator.records(snapshot, name)[-1:]:
                for stage in record.epoch.plan.stages:
                    dealt[stage.node] = dealt.get(stage.node, 0) + len(stage.devices)
        assert all(count <= GPUS for count in dealt.values()), dealt

    @invariant()
    def records_are_few(self) -> None:
        assert len(self.cluster.all("ConfigMap")) <= 12 * len(NAMES)

    @invariant()
    def plans_are_bounded(self) -> None:
        wished = {"Created", "SpecChanged"}
        for name in NAMES:
            since = max(self.edited[name], self.cluster.now - HOUR)
            recent = [plan for plan in self.plans if plan.deployment == name and plan.at >= since]
            lost = sum(plan.wish.reason == "NodeLost" for plan in recent)
            made = sum(plan.wish.reason not in {*wished, "NodeLost"} for plan in recent)
            assert lost <= LOSSES_PER_HOUR
            assert made <= PLANS_PER_HOUR, [(p.at, p.wish) for p in recent]

    def teardown(self) -> None:
        """All faults end: it serves, or says by name what a person must change, and then nothing moves any more."""
        self.cluster.faults.end()
        for node in NODES:
            self.node_comes_back(node)
            self.cluster.cordon(node, closed=False)
        for _ in range(8):
            self.cluster.tick(1800)
            for _ in range(25):
                if not self.operator.look():
                    break
                self.cluster.tick(1)
            else:
                raise AssertionError("it acts without end")
        settled = self.cluster.now - HOUR
        assert not [plan for plan in self.plans if plan.at > settled]
        for name in NAMES:
            self.check_settled(name)

    def check_settled(self, name: str) -> None:
        status = status_of(self.cluster, name)
        thing = self.cluster.objects["LLMDeployment", name]
        conditions = {each.type: each for each in status.conditions}
        cannot = thing["spec"]["placement"].get("minStages", 1) > len(NODES)
        has_plan = bool(self.operator.snapshot().records_of("default", name))
        assert conditions["Ready"].status == ("True" if has_plan else "False"), status
        assert conditions["Planned"].status == ("False" if cannot else "True"), status
        assert status.phase == ("Ready" if has_plan else "Failed")
        assert {each.observed_generation for each in status.conditions} == {thing["metadata"]["generation"]}
        image = thing["spec"]["runtime"]["image"]
        pods = [pod for pod in self.cluster.all("Pod") if pod["metadata"]["name"].startswith(name)]
        assert {pod["spec"]["containers"][0]["image"] for pod in pods} <= {image}
        assert conditions["Updated"].status == "True"


Life.TestCase.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
TestLife = Life.TestCase
