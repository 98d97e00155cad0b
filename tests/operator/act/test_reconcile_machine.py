"""The operator's state machine: whatever goes wrong, and in whatever order, the real controller leads back to service.

The API server answers 403, 409, 422, 429, 500, 503, late, or not at all; nodes flap, vanish, are cordoned and cut off; slots refuse, hang
and run out of memory; pods find no place; plans take long and fail; specs are edited, also to what cannot be planned, and also while a look
is at it; the operator is started anew or deposed. Time is virtual.
"""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from strata_operator.observe.kube import Request
from strata_operator.render.names import EPOCH_LABEL, INSTANCE_LABEL
from strata_operator.render.records import REASON
from strata_planner.contract.control import Commit, Prepare
from strata_planner.contract.plan import Plan
from tests.laws import share
from tests.operator.cluster_model import GPUS, Kubernetes, status_of
from tests.operator.fakes import FakeSlot
from tests.operator.virtual_operator import FAULTS, ApiFaults, Fault, ModelControl, PretendedPlanner, VirtualOperator

NODES = ("a", "b", "c", "d")
NAMES = ("one", "two")
HOUR = timedelta(hours=1)
PLANS_PER_HOUR = 16  # of a deployment, beside those that a loss or a person asks for
LOSSES_PER_HOUR = 75
TROUBLE = {"PrepareRefused", "PrepareStalled", "Unschedulable", "ImageUnusable"}
WISHED = {"Created", "SpecChanged"}
REFUSABLE = (
    ("GET", "/nodes"), ("GET", "/secrets"), ("GET", "/configmaps"), ("POST", "/events"), ("POST", "/configmaps"), ("POST", "/secrets"),
    ("PATCH", "/status"), ("PATCH", "/statefulsets"), ("PATCH", "/deployments"), ("PATCH", "/networkpolicies"),
    ("DELETE", "/statefulsets"), ("DELETE", "/pods"), ("DELETE", "/configmaps"), ("DELETE", "/secrets"),
)  # fmt: skip
KINDS = {"statefulsets", "deployments", "services", "secrets", "networkpolicies", "serviceaccounts", "poddisruptionbudgets"}  # fmt: skip
nodes = st.sampled_from(NODES)
names = st.sampled_from(NAMES)
within = st.sampled_from([0, 0, 0, 1, 7, 8, 9, 10, 12, 15, 20])  # so many requests into a look; 0: before it


class Life(RuleBasedStateMachine):
    """Two deployments on four nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Kubernetes(*NODES)
        self.api = ApiFaults()
        self.planner = PretendedPlanner(self.cluster)
        self.planner.on_question = self.noted(self.check_question)
        self.broken: list[Exception] = []  # found amid the controller, which lives on whatever is raised there
        self.said: dict[str, Any] = {}  # the status that was written last, or tried
        self.former: dict[str, Any] = {}  # that of one that is made anew amid a look: what was begun for it goes on
        self.keys: dict[tuple[str, int], str] = {}  # of epochs, by deployment's uid
        self.due: tuple[int, Callable[[], None]] | None = None
        self.deposed: VirtualOperator | None = None
        self.status_writes = 0
        for name in NAMES:
            self.cluster.serve(name)
        self.edited = dict.fromkeys(NAMES, self.cluster.now())
        self.operator = self.a_new_operator()

    def a_new_operator(self) -> VirtualOperator:
        self.edited = dict.fromkeys(NAMES, self.cluster.now())  # what had failed is tried once more
        operator = VirtualOperator(self.cluster, self.api, ModelControl(self.cluster), self.planner)
        operator.wire.on_request = self.noted(self.check_request)
        operator.control.on_message = self.noted(self.check_message)
        return operator

    def noted(self, check: Callable[..., None]) -> Callable[..., None]:
        def checked(*what: Any) -> None:
            try:
                check(*what)
            except Exception as error:  # noqa: BLE001  raised by the invariant
                self.broken.append(error)

        return checked

    # What happens.

    @rule(deposed=st.booleans(), keyless=st.sampled_from(("nobody", "nobody", *NAMES)))
    def operator_starts_anew(self, deposed: bool, keyless: str) -> None:  # noqa: FBT001
        """Deposed, the old one goes on with what it had under way, and must change nothing. `keyless` lost its control key before."""
        self.cluster.objects.pop(f"/api/v1/namespaces/default/secrets/{keyless}-control", None)
        if self.deposed is not None:
            self.deposed.close()
        self.deposed = self.operator if deposed else None
        self.operator.depose() if deposed else self.operator.close()
        self.operator = self.a_new_operator()
        self.looks()

    @rule(seconds=st.sampled_from([1, 10, 70, 700, 2000]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.tick(seconds)
        self.looks()

    @rule(node=nodes, power=st.booleans(), within=within)
    def node_goes_away(self, node: str, power: bool, within: int) -> None:  # noqa: FBT001
        self.happens(lambda: self.known(node) and self.cluster.set_ready(node, "Unknown", power=power), within)
        self.cluster.tick(10)
        self.looks()

    @rule(node=nodes, within=within)
    def node_falls_silent(self, node: str, within: int) -> None:
        """It loses its power, and is called Ready for a while."""
        self.happens(lambda: self.known(node) and self.cluster.set_ready(node, "True", power=False), within)
        self.looks()

    @rule(node=nodes)
    def node_comes_back(self, node: str) -> None:
        if not self.known(node):
            self.cluster.add_node(node)
        elif not self.cluster.is_ready(node) or not self.cluster.is_up(node):
            self.cluster.set_ready(node, "True")
        self.looks()

    @rule(node=nodes, within=within)
    def node_vanishes(self, node: str, within: int) -> None:
        self.happens(lambda: self.known(node) and self.cluster.remove_node(node), within)

    @rule(node=nodes, closed=st.booleans(), within=within)
    def node_is_cordoned(self, node: str, closed: bool, within: int) -> None:  # noqa: FBT001
        self.happens(lambda: self.known(node) and self.cluster.cordon(node, closed=closed), within)

    @rule(
        node=nodes,
        what=st.sampled_from(["refuses", "hangs", "no_place", "no_image", "out_of_memory", "unreachable", "mute"]),
        wrong=st.booleans(),
    )
    def slots_of_a_node_fail(self, node: str, what: str, wrong: bool) -> None:  # noqa: FBT001
        failing: set[str] = getattr(self.cluster.faults, what)
        failing.add(node) if wrong else failing.discard(node)
        for pod in self.cluster.pods_on(node) if wrong and what not in {"unreachable", "mute"} else ():
            self.cluster.end(pod)  # what comes back meets it
        self.looks()

    @rule(name=names, what=st.sampled_from(["refuses", "hangs", "no_place"]), bits=st.sampled_from([4, 8, 16]))
    def slots_fail_everywhere_for_an_hour(self, name: str, what: str, bits: int) -> None:
        getattr(self.cluster.faults, what).update(NODES)
        self.spec_is_edited(name, bits, 0)
        for _ in range(12):
            self.cluster.tick(300)
            self.looks(2)

    @rule(quota=st.booleans())
    def a_quota_forbids_pods(self, quota: bool) -> None:  # noqa: FBT001
        self.cluster.faults.quota = quota
        self.looks()

    @rule(field=st.sampled_from(["stages", "conditions", "replans", "url"]), pruned=st.booleans())
    def a_webhook_prunes_status(self, field: str, pruned: bool) -> None:  # noqa: FBT001
        self.cluster.faults.pruned.add(field) if pruned else self.cluster.faults.pruned.discard(field)
        self.looks()

    @rule(name=names, slot=st.integers(0, 1), for_good=st.booleans(), within=within)
    def a_pod_ends(self, name: str, slot: int, for_good: bool, within: int) -> None:  # noqa: FBT001
        ends = self.cluster.kill if for_good else self.cluster.mark
        for pod in self.cluster.pods_of(name)[slot : slot + 1]:
            self.happens(lambda pod=pod: ends(pod), within)

    @rule(name=names)
    def the_gateway_ends(self, name: str) -> None:
        for pod in self.cluster.all("pods"):
            if pod["metadata"]["name"] == f"{name}-gateway-x":
                self.cluster.end(pod)
        self.looks()

    @rule(name=names, bits=st.sampled_from([4, 8, 16]), within=within)
    def spec_is_edited(self, name: str, bits: int, within: int) -> None:
        self.edit(name, within, precision={"allowed": [bits]})

    @rule(name=names, stages=st.sampled_from([1, 7]), within=within)
    def spec_asks_for_stages(self, name: str, stages: int, within: int) -> None:
        self.edit(name, within, placement={"minStages": stages})

    @rule(name=names, value=st.sampled_from("xyz"), within=within)
    def environment_is_edited(self, name: str, value: str, within: int) -> None:
        image = self.cluster.spec_of(name)["runtime"]["image"]
        self.edit(name, within, runtime={"image": image, "pod": {"env": [{"name": "X", "value": value}]}})

    @rule(name=names, image=st.sampled_from(["runtime:1", "runtime:2"]), bits=st.sampled_from([4, 8, 16]))
    def image_is_edited(self, name: str, image: str, bits: int) -> None:
        self.edit(name, 0, runtime={"image": image}, precision={"allowed": [bits]})

    @rule(name=names, paused=st.booleans())
    def deployment_is_paused(self, name: str, paused: bool) -> None:  # noqa: FBT001
        self.edit(name, 0, paused=paused)

    @rule(name=names, waits=st.booleans(), within=within)
    def deployment_is_made_anew(self, name: str, waits: bool, within: int) -> None:  # noqa: FBT001
        """By the same name, before or after what the first one owned is gone."""

        def made_anew() -> None:
            self.cluster.abandon(name)
            if waits:
                self.cluster.tick(1)
            self.cluster.serve(name)
            self.edited[name] = self.cluster.now()
            self.former[name] = self.said.pop(name, None)

        self.happens(made_anew, 0 if waits else within)
        self.former.clear()

    @rule(seconds=st.sampled_from([0, 1, 40, 400]), breaks=st.booleans())
    def plans_take(self, seconds: int, breaks: bool) -> None:  # noqa: FBT001
        self.planner.seconds, self.planner.breaks = seconds, breaks
        self.looks()

    @rule(
        faults=st.lists(st.sampled_from((None, None, *FAULTS)), min_size=1, max_size=12),
        of=st.sampled_from(["reads", "writes", "all"]),
    )
    def requests_fail(self, faults: list[Any], of: Any) -> None:
        self.api.coming, self.api.of = faults, of
        self.looks()

    @rule(what=st.sampled_from(REFUSABLE), fault=st.sampled_from((None, *FAULTS)))
    def a_kind_is_refused_from_now_on(self, what: tuple[str, str], fault: Fault | None) -> None:
        self.api.lasting.pop(what, None)
        if fault is not None:
            self.api.lasting[what] = fault
        self.looks()

    def known(self, node: str) -> bool:
        return self.cluster.one("nodes", node) is not None

    def edit(self, name: str, within: int, **parts: Any) -> None:
        def edited() -> None:
            if self.cluster.edit(name, **parts):
                self.edited[name] = self.cluster.now()

        self.happens(edited, within)

    def happens(self, event: Callable[[], Any], within: int = 0) -> None:
        """Before the next look, or in the midst of it."""
        if within == 0:
            event()
        else:
            self.due = (within, event)
        self.looks()
        if self.due is not None:
            self.due = None
            event()
            self.looks()

    def looks(self, most: int = 4) -> None:
        for _ in range(most):
            acted = self.operator.look()
            self.cluster.tick(1)
            if not acted:
                return

    # What holds at every moment.

    def check_request(self, request: Request) -> None:
        """What is written rests on what was said before."""
        if self.due is not None:
            left, event = self.due
            self.due = (left - 1, event) if left > 1 else None
            if left <= 1:
                event()
        if request.method == "GET":
            return
        assert request.body
        name = request.body.get("metadata", {}).get("name", "")
        if request.path.endswith("/status"):
            self.check_status(name, request.body)
        if request.path.endswith("/configmaps"):
            self.check_record(request.body)

    def check_status(self, name: str, body: dict[str, Any]) -> None:
        self.status_writes += 1
        there = self.cluster.objects[f"/apis/strata.dev/v1alpha1/namespaces/default/llmdeployments/{name}"]["metadata"]
        status, version = body["status"], body["metadata"]["resourceVersion"]
        assert "ReconcileError" not in {each["type"] for each in status["conditions"]}, status
        if version == there["resourceVersion"]:
            assert status["observedGeneration"] == there["generation"]
            self.said[name] = status

    def check_record(self, record: dict[str, Any]) -> None:
        """A plan for trouble is made after the trouble was said."""
        meta = record["metadata"]
        if meta["annotations"][REASON] in TROUBLE:
            number, name = int(meta["labels"][EPOCH_LABEL]), meta["labels"][INSTANCE_LABEL]
            assert max(each["epoch"] for each in self.said[name]["exclusions"]) < number

    def check_question(self, question: Any) -> None:
        name = question.deployment["metadata"]["name"]
        if question.reason in TROUBLE:
            newest = max(int(each["metadata"]["labels"][EPOCH_LABEL]) for each in self.records_of(name))
            assert newest in {each["epoch"] for each in self.said[name]["exclusions"]}

    def check_message(self, process: Any, message: Any) -> None:
        if not isinstance(process, FakeSlot):
            return
        name = process.name.partition("-")[0]
        if isinstance(message, Commit):
            said = {status["committedEpoch"] for status in (self.said.get(name), self.former.get(name)) if status}
            assert message.epoch in {*said, self.operator.unsaid_epoch(self.cluster.uid_of(name))}
        if isinstance(message, Prepare):
            uid = self.cluster.uid_of(name)
            assert self.keys.setdefault((uid, message.epoch), message.key) == message.key
            pods = [pod for pod in self.cluster.pods_of(name) if pod["metadata"]["name"][:-2] in message.slots]
            assert len({pod["spec"]["containers"][0]["image"] for pod in pods}) == 1

    @invariant()
    def what_was_done_was_right(self) -> None:
        if self.broken:
            raise self.broken[0]

    @invariant()
    def no_device_is_dealt_twice(self) -> None:
        newest = [Plan.decode(record["data"]["plan.json"]) for name in NAMES for record in self.records_of(name)[-1:]]
        dealt = Counter(stage.node for plan in newest for stage in plan.stages for _ in stage.devices)
        assert all(count <= GPUS for count in dealt.values()), dealt

    @invariant()
    def records_are_few(self) -> None:
        refused = {what for what in self.api.lasting if what[0] == "DELETE"}
        assert refused or len(self.cluster.all("configmaps")) <= 12 * len(NAMES)

    @invariant()
    def plans_are_bounded(self) -> None:
        for name in NAMES:
            since = max(self.edited[name], self.cluster.now() - HOUR)
            recent = [plan for plan in self.planner.plans if plan.deployment == name and plan.at >= since]
            reasons = Counter(plan.reason for plan in recent)
            assert reasons["NodeLost"] <= LOSSES_PER_HOUR
            made = sum(count for reason, count in reasons.items() if reason not in {*WISHED, "NodeLost"})
            assert made <= PLANS_PER_HOUR, [(p.at, p.reason) for p in recent]

    def records_of(self, name: str) -> list[Any]:
        """Of the deployment that is there now, by number; those without their Secret are none."""
        owned = [each for each in self.cluster.all("configmaps") if self.cluster.is_owned_by(each, name)]
        kept = [each for each in owned if self.cluster.one("secrets", each["metadata"]["name"])]
        return sorted(kept, key=lambda each: int(each["metadata"]["labels"][EPOCH_LABEL]))

    # What it comes to.

    def teardown(self) -> None:
        """All faults end: it serves, or says by name what a person must change, and then nothing moves any more."""
        try:
            self.comes_to_rest()
        finally:
            for operator in (self.operator, self.deposed):
                if operator is not None:
                    operator.close()
            self.cluster.time.close()

    def comes_to_rest(self) -> None:
        self.cluster.faults.end()
        self.api.end()
        self.planner.seconds, self.planner.breaks = 0, False
        for node in NODES:
            self.node_comes_back(node)
            self.cluster.cordon(node, closed=False)
        for _ in range(8):
            written = self.status_writes
            self.cluster.tick(1800)
            for _ in range(25):
                if not self.operator.look():
                    break
                self.cluster.tick(1)
            else:
                raise AssertionError("it acts without end")
        self.what_was_done_was_right()
        assert self.status_writes == written, "status is written again and again"
        assert not [plan for plan in self.planner.plans if plan.at > self.cluster.now() - HOUR]
        for name in NAMES:
            self.check_settled(name)

    def check_settled(self, name: str) -> None:
        status, spec = status_of(self.cluster, name), self.cluster.spec_of(name)
        conditions = {each.type: each for each in status.conditions}
        generation = self.cluster.generation_of(name)
        assert {each.observed_generation for each in status.conditions} == {generation}
        assert "ReconcileError" not in conditions
        if spec.get("paused"):
            assert status.phase == "Paused"
            return
        cannot = spec["placement"].get("minStages", 1) > len(NODES)
        has_plan = bool(self.records_of(name))
        assert conditions["Ready"].status == ("True" if has_plan else "False"), status
        assert conditions["Planned"].status == ("False" if cannot else "True"), status
        assert conditions["Rendered"].status == ("True" if has_plan else "False"), status
        assert status.phase == ("Ready" if has_plan else "Failed")
        assert {pod["spec"]["containers"][0]["image"] for pod in self.cluster.pods_of(name)} <= {
            spec["runtime"]["image"]
        }
        assert conditions["Updated"].status == "True"
        owned = [path for path, each in self.cluster.objects.items() if self.cluster.is_owned_by(each, name)]
        assert not has_plan or {path.split("/")[-2] for path in owned} >= KINDS
        keys = {int(path.rpartition("-")[2]) for path in owned if "/secrets/" in path and "-epoch-" in path}
        recorded = {int(each["metadata"]["labels"][EPOCH_LABEL]) for each in self.records_of(name)}
        assert all(
            number > max(recorded, default=0) for number in keys - recorded
        )  # the next attempt goes on from there


Life.TestCase.settings = settings(max_examples=share(40, 16), stateful_step_count=12, deadline=None)
TestLife = Life.TestCase
