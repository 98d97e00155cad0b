"""The operator's model of a cluster with real processes in its pods, and a planner that deals its nodes to replicas of two stages."""

from collections.abc import Callable, Collection

import msgspec

from strata_operator.act.planner_call import Answer, Question
from strata_operator.api import LLMDeployment, deployment_from_object
from strata_planner.contract.control import GatewayRequest, GatewayStatus, OrderRequest, SlotRequest, SlotStatus
from strata_planner.contract.plan import DeviceRef, MicroBatch, Plan, Replica, StandingOrder
from strata_planner.replan.repair import RepairNote
from strata_runtime.loading.precision_switch import FORMAT_OF_BITS
from tests.chain.arithmetic import DIGEST, LAYERS
from tests.chain.gateway_process import GatewayProcess
from tests.chain.slot_process import LAYER_BYTES, SlotProcess
from tests.chain.virtual_network import Host, Network
from tests.operator.cluster_model import Kubernetes, Object, Process
from tests.operator.fakes import FakeGateway, FakeSlot, a_plan
from tests.operator.virtual_operator import Planned, PretendedPlanner

NAME = "chat"
PAGES, PAGE_TOKENS = 32, 4
LEAST_BITS = 4
POOL_BYTES = 2 * DIGEST * PAGES * PAGE_TOKENS  # of a layer, for keys and values
TIGHT_BYTES = (
    2 * (LAYER_BYTES + POOL_BYTES) + 1_000
)  # of each of a node's two devices: a role of all layers fits, and nothing beside it
ROOMY_BYTES = 2 * TIGHT_BYTES


class ChainSlot(FakeSlot):
    """A slot's process, as the model of a cluster and the controller see it."""

    def __init__(self, name: str, process: SlotProcess) -> None:
        self.name, self.process = name, process
        self.incarnation = process.slot._incarnation

    @property
    def refuses(self) -> str:
        return self.process.refuses

    @refuses.setter
    def refuses(self, reason: str) -> None:
        self.process.refuses = reason

    @property
    def committed(self) -> int:
        return self.status().committed_epoch

    def status(self) -> SlotStatus:
        status: SlotStatus = self.process.inside(self.process.slot.status)
        return status

    def handle(self, message: SlotRequest) -> SlotStatus:
        return self.process.handle(message)

    def finish_loading(self) -> None: ...

    def lose(self, peer: str) -> None: ...


class ChainGateway(FakeGateway):
    def __init__(self, process: GatewayProcess) -> None:
        self.process = process
        self.incarnation = process.dispatcher.incarnation

    def status(self) -> GatewayStatus:
        return self.process.dispatcher.status()

    def handle(self, message: GatewayRequest) -> GatewayStatus:
        return self.process.handle(message)


class Chain(Kubernetes):
    """Pods with real processes in them."""

    def __init__(self, *nodes: str, keep: Callable[[int], int], usable_bytes: int = TIGHT_BYTES) -> None:
        """`usable_bytes`: of each device."""
        super().__init__()
        self.usable_bytes = usable_bytes
        self.network = Network(self.time, keep)
        self.hosts: dict[str, Host] = {}  # by pod
        self.found: list[str] = []  # laws that are broken
        for node in nodes:
            self.add_node(node)

    def _started(self, pod: Object, make: Callable[[], FakeSlot | FakeGateway]) -> FakeSlot | FakeGateway | None:
        for process in self._slots_of(pod):
            process.hangs = pod["spec"].get("nodeName") in self.faults.hangs
        uid = pod["metadata"]["uid"]
        is_new = uid not in self.processes
        fake = super()._started(pod, make)
        if fake is None or not is_new:
            return fake
        name = pod["metadata"]["name"]
        host = self.hosts[name] = Host(name, broken=self.found)
        if isinstance(fake, FakeSlot):
            process = SlotProcess(self.time, host, fake.name, self.processes[uid].key, 2 * self.usable_bytes)
            process.told, process.broken, process.exits = self.told, self.found, lambda: self._exits(host, pod)
            real: FakeSlot | FakeGateway = ChainSlot(fake.name, process)
        else:
            real = ChainGateway(GatewayProcess(self.time, host, self.told, lambda *what: self._ordered(host, *what)))
        self.processes[uid] = Process(self.processes[uid].key, real)
        return real

    def _ordered(self, gateway: Host, slot: str, request: OrderRequest) -> SlotStatus | None:
        """What a gateway asks of a slot by its standing orders' key; None: it is not reached."""
        for process in self.slots().values():
            if process.name == slot and self.network.reach(gateway, process.host):
                return process.ordered(request)
        return None

    def _slots_of(self, pod: Object) -> list[SlotProcess]:
        slot = self.slot_of(pod)
        return [slot.process] if isinstance(slot, ChainSlot) else []

    def stop(self, pod: Object) -> None:
        process = self.processes.pop(pod["metadata"]["uid"], None)
        if process is None:
            return
        if isinstance(process.speaks, ChainGateway):
            process.speaks.process.dies()
        host = self.hosts.pop(pod["metadata"]["name"], None)
        if host is not None:
            self.network.dies(host)
        self.told()

    def _exits(self, host: Host, pod: Object) -> None:
        if self.hosts.get(host.name) is host:
            self.stop(pod)

    def is_stopped(self, pod: Object) -> bool:
        host = self.hosts.get(pod["metadata"]["name"])
        return host is not None and host.frozen

    def slots(self) -> dict[str, SlotProcess]:
        """By pod."""
        running = ((pod, self.slot_of(pod)) for pod in self.pods_of(NAME))
        return {pod["metadata"]["name"]: each.process for pod, each in running if isinstance(each, ChainSlot)}

    @property
    def gateways(self) -> dict[str, GatewayProcess]:
        """By pod."""
        running = (
            (pod["metadata"]["name"], self.processes.get(pod["metadata"]["uid"])) for pod in self.gateways_of(NAME)
        )
        return {name: each.speaks.process for name, each in running if each and isinstance(each.speaks, ChainGateway)}


class ChainPlanner(PretendedPlanner):
    _cluster: Chain
    """Pairs of nodes, a replica each. A repair leaves what is whole, and gives a lost stage's layers to its neighbour, which has all of them at half the bits
    then.
    """

    async def answer(self, question: Question) -> Answer:
        nodes = [node.name for node in question.cluster.nodes]
        self.plans.append(Planned(self._cluster.now(), NAME, question.reason, tuple(nodes)))
        deployment = deployment_from_object(question.deployment)
        if not nodes:
            return Answer(None, "Infeasible", "there are too few nodes")
        pairs = [tuple(nodes[at : at + 2]) for at in range(0, len(nodes), 2)]
        if question.repair and question.running is not None:
            had = [[stage.node for stage in replica.stages] for replica in question.running.replicas]
            left = [(tuple(node for node in each if node in nodes), len(each)) for each in had]
            if left := [(each, before) for each, before in left if each]:
                note = RepairNote("neighbours", 1, 2, 1 << 20, 0.5, 3.5)
                hurt = {number for number, (each, before) in enumerate(left) if len(each) < before}
                plan = plan_of(deployment, [each for each, _ in left], self._cluster.usable_bytes, hurt)
                return Answer(plan, repair=note)
        gain = None if question.running is None else self.gain
        return Answer(with_orders(deployment, pairs, self._cluster.usable_bytes), gain=gain)


def with_orders(deployment: LLMDeployment, pairs: list[tuple[str, ...]], usable_bytes: int) -> Plan:
    """Where they are wanted, the neighbour of a lost slot takes its layers."""
    plan = plan_of(deployment, pairs, usable_bytes)
    if deployment.spec.replanning.takeover.standing_orders is None:
        return plan
    orders = []
    for number, pair in enumerate(pairs):
        for lost, left in ((pair[0], pair[1:]), (pair[-1], pair[:-1])):
            if left:
                after = plan_of(deployment, [left], usable_bytes)
                replica = msgspec.structs.replace(after.replicas[0], replica=number)
                lost_slot = (f"{deployment.name}-{lost}",)
                orders.append(StandingOrder(lost_slot, (replica,), plan.prediction, "neighbours", 1, 0, 1 << 20, 0.5))
    return msgspec.structs.replace(plan, orders=tuple(orders))


def plan_of(
    deployment: LLMDeployment, pairs: list[tuple[str, ...]], usable_bytes: int, hurt: Collection[int] = ()
) -> Plan:
    """`usable_bytes`: of each device. `hurt`: replicas that have half the bits."""
    replicas = []
    for number, nodes in enumerate(pairs):
        bits = max(LEAST_BITS, deployment.spec.precision.allowed[0] // (2 if number in hurt else 1))
        plan = a_plan(*(f"{deployment.name}-{node}" for node in nodes), layers=LAYERS, bits=bits)
        (replica,) = plan.replicas
        stages = []
        for stage, node in zip(replica.stages, nodes, strict=True):
            weights = LAYER_BYTES * bits // 16 * len(stage.bits)
            pool = POOL_BYTES * len(stage.bits)
            memory = msgspec.structs.replace(stage.memory, weights_bytes=weights, kv_bytes=pool, overhead_bytes=0, total_bytes=weights + pool)  # fmt: skip
            devices = tuple(DeviceRef("Tesla-T4", index, usable_bytes) for index in range(2))
            formats = (FORMAT_OF_BITS[bits],) * len(stage.bits)  # planes, which are moved in place
            stages.append(msgspec.structs.replace(stage, node=node, devices=devices, memory=memory, format=formats))
        batch = MicroBatch(prefill=2, decode=4, max_step_tokens=16)
        replicas.append(Replica(number, tuple(stages), batch, concurrency=4))
    log = deployment.spec.runtime.boundary_log
    pages = 0 if log is None else int(log.max_memory.removesuffix("k"))
    return msgspec.structs.replace(plan, replicas=tuple(replicas), page_tokens=PAGE_TOKENS, boundary_log_pages=pages)
