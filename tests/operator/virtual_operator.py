"""The real controller on the model of a cluster: a way to its API server that fails at will, processes that answer or do not, a
planner that takes its time.

Everything is in one thread and lives by the model's virtual time, so that the same faults always lead to the same end.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import msgspec

from strata_operator.act.clock import Clock
from strata_operator.act.control_client import KNOCK_SECONDS, Control, Endpoint, Message, NoAnswerError
from strata_operator.act.controller import Controller, ControllerOptions
from strata_operator.act.lease import NotLeadingError
from strata_operator.act.planner_call import Answer, Question
from strata_operator.api import LLMDeployment, deployment_from_object
from strata_operator.decide.view import Door
from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import REQUEST_SECONDS, Kube
from strata_operator.observe.kube import Request as Sent
from strata_planner.contract.control import GetStatus, Status, Watch
from strata_planner.contract.plan import DeviceRef, Plan, Speculation, Stage
from strata_planner.contract.shadows import Shadow
from strata_planner.question.cluster import Cluster
from strata_planner.replan.repair import RepairNote
from tests.operator.cluster_model import Kubernetes
from tests.operator.fake_api import Request
from tests.operator.fakes import FakeSlot, a_plan

Fault = int | Literal["slow", "lost", "late", "silent", "unanswered", "broken"]
CODES: tuple[Fault, ...] = (403, 409, 422, 429, 500, 503)
FAULTS: tuple[Fault, ...] = (*CODES, "slow", "lost", "late", "silent", "unanswered", "broken")
SLOW_SECONDS = 1.0
LATE_SECONDS = 5.0  # after whoever asked has given up
WIDEST = 2  # nodes that the pretended planner uses at most
OPTIONS = ControllerOptions(namespaces=(), runtime_image="runtime:1", operator_namespace="strata")


@dataclass
class ApiFaults:
    """What becomes of requests. `lost`: done, and the connection breaks; `late`: done after the time-out; `silent`: never done;
    `unanswered`: done at once, and nothing comes until the time-out; `broken`: done, and the answer is a 500.
    """

    coming: list[Fault | None] = field(default_factory=list)  # of the next requests, the last first
    of: Literal["reads", "writes", "all"] = "all"  # which of them
    lasting: dict[tuple[str, str], Fault] = field(default_factory=dict)  # by verb and part of the path

    def end(self) -> None:
        self.coming.clear()
        self.lasting.clear()

    def met_by(self, request: Sent) -> Fault | None:
        for (method, part), fault in self.lasting.items():
            if request.method == method and part in request.path:
                return fault
        is_read = request.method == "GET"
        meant = {"reads": is_read, "writes": not is_read, "all": True}[self.of]
        return self.coming.pop() if self.coming and meant else None


class ModelWire:
    """To the model's API server. `on_request` is called before each request; `writes`: how many were sent."""

    def __init__(self, cluster: Kubernetes, faults: ApiFaults) -> None:
        self._cluster, self._faults = cluster, faults
        self._late: list[tuple[asyncio.TimerHandle, Sent]] = []
        self.on_request: Callable[[Sent], None] = lambda _: None
        self.writes = 0

    def beside(self) -> "ModelWire":
        return self

    async def send(self, request: Sent, seconds: Callable[[], float]) -> tuple[int, Any]:
        limit = seconds()
        await asyncio.sleep(0)  # whoever else has something to do, does it first
        self.writes += request.method != "GET"
        self.on_request(request)
        match self._faults.met_by(request):
            case int(code):
                return code, {"message": f"the fault {code}"}
            case "slow":
                await asyncio.sleep(SLOW_SECONDS)
            case "lost":
                self._answer(request)
                raise ConnectionResetError("the answer was lost")
            case "late":
                loop = asyncio.get_running_loop()
                self._late.append((loop.call_later(limit + LATE_SECONDS, self._answer, request), request))
                await asyncio.sleep(limit)
                raise TimeoutError
            case "broken":
                self._answer(request)
                return 500, {"message": "it broke after that"}
            case "silent" | "unanswered" as fault:
                if fault == "unanswered":
                    self._answer(request)
                await asyncio.sleep(limit)
                raise TimeoutError
        return self._answer(request)

    def land(self) -> None:
        """What is late arrives now: whoever sent it has ended, and the next one waits for that."""
        for handle, request in self._late:
            if handle.when() > self._cluster.time.time():
                handle.cancel()
                self._answer(request)
        self._late.clear()

    def _answer(self, request: Sent) -> tuple[int, Any]:
        """Copies, as on a real wire: nobody sees what becomes of an object afterwards."""
        query: dict[str, list[str]] = {name: [value] for name, value in request.query}
        sent = Request(request.method, request.path, query, request.content_type, _copied(request.body))
        code, answer = self._cluster.answer(sent)
        return code, _copied(answer)


def _copied(thing: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(thing))


class ModelControl:
    """Control ports of the model's processes. `on_message`: what was said to whom, before it is heard."""

    def __init__(self, cluster: Kubernetes) -> None:
        self._cluster = cluster
        self.on_message: Callable[[FakeSlot | Any, Message], None] = lambda _, __: None
        self.messages = 0
        self.watched: list[str] = []  # hosts of the processes that hear us

    async def ask(self, endpoint: Endpoint, message: Message, timeout_seconds: float) -> Status:
        process, node = self._reached(endpoint)
        if not isinstance(message, GetStatus | Watch):
            self.messages += 1
            if process is not None:
                self.on_message(process, message)
        answer = process.handle(message) if process is not None else None
        self._cluster.told()
        if answer is None or node in self._cluster.faults.mute:
            await asyncio.sleep(timeout_seconds)
            raise NoAnswerError(endpoint.host)
        await asyncio.sleep(0)
        return answer

    async def knock(self, endpoint: Endpoint) -> Door:
        """Whether the node has power and is not cut off: its kernel answers for processes that are gone or stopped."""
        pods = (each for each in self._cluster.all("pods") if each["status"].get("podIP") == endpoint.host)
        pod = next(pods, None)
        node = str(pod["spec"].get("nodeName", "")) if pod else ""
        if pod is not None and self._cluster.is_up(node) and node not in self._cluster.faults.unreachable:
            return "taken" if self._cluster.listens(pod) else "refused"
        await asyncio.sleep(KNOCK_SECONDS)
        return ""

    async def watch(self, endpoint: Endpoint, broken: Callable[[], None]) -> AsyncGenerator[Status | None]:
        """As the real one, which asks again and again, it tells what has not changed, too."""
        self.watched.append(endpoint.host)
        try:
            while True:
                moved = self._cluster.moved
                process, _ = self._reached(endpoint)
                yield process.status() if process is not None else None
                await moved.wait()
        finally:
            self.watched.remove(endpoint.host)

    def _reached(self, endpoint: Endpoint) -> tuple[Any, str]:
        """The process behind an address, if it can be reached and the key opens its port; and the node that it is on."""
        pods = (each for each in self._cluster.all("pods") if each["status"].get("podIP") == endpoint.host)
        pod = next(pods, None)
        process = self._cluster.processes.get(pod["metadata"]["uid"]) if pod else None
        node = str(pod["spec"].get("nodeName", "")) if pod else ""
        faults = self._cluster.faults
        if process is None or process.key != endpoint.secret or node in faults.unreachable | faults.deaf:
            return None, node
        if pod is not None and self._cluster.is_stopped(pod):
            return None, node
        return process.speaks, node


@dataclass(frozen=True)
class Planned:
    """A plan that was asked for."""

    at: datetime
    deployment: str
    reason: str
    nodes: tuple[str, ...]


class PretendedPlanner:
    """Always the same for the same: all free GPUs of the first nodes by name. `seconds`: so long each plan takes."""

    def __init__(self, cluster: Kubernetes) -> None:
        self._cluster = cluster
        self.seconds = 0.0
        self.breaks = False
        self.keeps, self.reads = 0.5, 1 << 20  # what a repair gives, and has the busiest slot read
        self.lowers = 2  # layers that a repair gives fewer bits
        self.repairs = False  # a loss is repaired by the devices that are left of the plan
        self.gain = 0.5  # of every better plan
        self.hurries = False  # as if others waited for their first plans
        self.says: Callable[[Plan], Plan] = lambda plan: plan  # what a plan says of itself
        self.plans: list[Planned] = []
        self.on_question: Callable[[Question], None] = lambda _: None
        self.under_way = 0

    def warm(self) -> None: ...

    async def close(self) -> None: ...

    async def answer(self, question: Question) -> Answer:
        if question.only_repair and not self.repairs:
            return Answer(None, "NoRepair", "none is pretended")
        name = question.deployment["metadata"]["name"]
        nodes = tuple(node.name for node in question.cluster.nodes)
        self.plans.append(Planned(self._cluster.now(), name, question.reason, nodes))
        self.on_question(question)
        self.under_way += 1
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.under_way -= 1
        if self.breaks:
            return Answer(None, "PlannerFault", "planning failed", passing=True)
        deployment = deployment_from_object(question.deployment)
        if question.repair and self.repairs and question.running is not None:
            left = question.cluster.restricted_to({stage.node for stage in question.running.stages})
            if repaired := plan_of(deployment, left):
                note = RepairNote("neighbours", 1, self.lowers, 1 << 20, self.keeps, 3.5, read_bytes=self.reads)
                return Answer(repaired, repair=note)
        if question.running is not None and not question.repair and self.gain < deployment.spec.replanning.min_gain:
            return Answer(question.running, gain=self.gain)
        plan = plan_of(deployment, question.cluster)
        gain = None if question.running is None else self.gain
        hurried = self.hurries and question.running is None
        return (
            Answer(self.says(plan), gain=gain, hurried=hurried)
            if plan
            else Answer(None, "Infeasible", "there are too few nodes")
        )


def plan_of(deployment: LLMDeployment, cluster: Cluster) -> Plan | None:
    nodes = cluster.nodes[:WIDEST]
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
    wish = deployment.spec.runtime.speculation
    return msgspec.structs.replace(
        plan,
        shadows=_shadows(stages) if deployment.spec.replanning.takeover.shadow else (),
        replicas=(msgspec.structs.replace(plan.replicas[0], stages=stages),),
        speculation=Speculation(wish.mode, wish.tokens, wish.draft_bits),
    )


def _shadows(stages: tuple[Stage, ...]) -> tuple[Shadow, ...]:
    """The first slot keeps the first layer of each other one."""
    first, *others = stages
    return tuple(
        Shadow(
            slot=first.slot,
            node=first.node,
            against=each.node,
            layers=each.layers[:1],
            format=each.format[:1],
            layer_bytes=(1 << 20,),
            read_bytes=1 << 20,
            room_bytes=1 << 30,
        )
        for each in others
    )


class VirtualOperator:
    """One process of the operator: what it keeps in memory ends with it."""

    def __init__(
        self, cluster: Kubernetes, faults: ApiFaults, control: ModelControl, planner: PretendedPlanner
    ) -> None:
        self._cluster, self._planner = cluster, planner
        self.wire, self.control = ModelWire(cluster, faults), control
        self._leads = True
        self.controller = Controller(
            Kube(self.wire, self),
            OPTIONS,
            lambda: self._leads,
            planner,
            control=Control(control.ask, control.watch, control.knock),
            clock=Clock(cluster.now, cluster.time.time),
        )

    def seconds_left(self) -> float:
        """The fence."""
        if not self._leads:
            raise NotLeadingError("another operator leads")
        return REQUEST_SECONDS

    def unsaid_epoch(self, uid: str) -> int | None:
        """Committed by a status that the API server would not take: what serves goes on from it all the same."""
        kept = self.controller._kept.get(uid)
        return kept.unsaid.committed_epoch if kept and kept.unsaid else None

    def depose(self) -> None:
        """Another operator leads: what was sent has arrived by then."""
        self._leads = False
        self.wire.land()

    def look(self) -> bool:
        """Once; whether anything was done, said or asked, or is still under way."""
        before = self._done()
        self._cluster.time.run_until_complete(self._look())
        return self._done() != before or self._planner.under_way > 0

    def close(self) -> None:
        self._cluster.time.run_until_complete(self.controller.close())
        self.wire.land()

    async def _look(self) -> None:
        with suppress(NotReadyError):
            await self.controller.look()
        await asyncio.sleep(0.01)  # plans that take no time are done

    def _done(self) -> tuple[int, int, int]:
        return self.wire.writes, self.control.messages, len(self._planner.plans)
