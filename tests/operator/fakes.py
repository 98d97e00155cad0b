"""A slot and a gateway without models or sockets: they answer control messages as the real ones do."""

import itertools
from dataclasses import dataclass

import msgspec

from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.control import (
    CONTROL_PROTOCOL,
    GATEWAY_PROTOCOL,
    Commit,
    EpochChange,
    GatewayStatus,
    GetStatus,
    HungStep,
    LayerSwitch,
    PeerLoss,
    Prepare,
    PrepareState,
    RoleStats,
    SetBits,
    SetRoute,
    SlotAddress,
    SlotStatus,
    SwitchState,
    Took,
    Watch,
)
from strata_planner.contract.formats import DEFAULT_FORMAT_OF_BITS
from strata_planner.contract.plan import (
    PLAN_VERSION,
    DeviceRef,
    MicroBatch,
    Plan,
    Prediction,
    Replica,
    Stage,
    StageMemory,
    StageTimes,
)
from strata_planner.contract.roles import Role
from strata_planner.contract.shadows import ShadowOrder, ShadowState
from strata_planner.question.cluster import CUDA_OVERHEAD_BYTES

_INCARNATIONS = itertools.count(1)
_NOTHING = PrepareState(epoch=0, phase="none")


@dataclass
class RunningRole:
    """One role that runs. What it has computed is lost with it: `formed` names it."""

    role: Role
    formed: int
    failure: str = ""

    def stats(self) -> RoleStats:
        who = (self.role.replica, self.role.stage)
        return RoleStats(*who, 0, 0.0, 0.0, 0, 0, 0, formed=self.formed, failure=self.failure)


class FakeSlot:
    """Loads when told to (`finish_loading`), refuses with `refuses`, is started anew by `restart`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refuses = ""
        self.protocol = CONTROL_PROTOCOL
        self.ever_prepared: set[int] = set()
        self.restart()

    def restart(self) -> None:
        self.incarnation = f"{self.name}-{next(_INCARNATIONS)}"
        self.prepare = _NOTHING
        self.committed = 0
        self.ever_committed: list[int] = []
        self.lost: tuple[PeerLoss, ...] = ()
        self.failure = ""
        self.hung: tuple[HungStep, ...] = ()
        self.overdue: tuple[HungStep, ...] = ()
        self.switches: tuple[SwitchState, ...] = ()
        self.asked: Prepare | None = None
        self.kept: ShadowOrder | None = None
        self.running: dict[int, RunningRole] = {}  # by place
        self.took: Took | None = None

    def status(self) -> SlotStatus:
        return SlotStatus(
            slot=self.name,
            incarnation=self.incarnation,
            committed_epoch=self.committed,
            prepare=self.prepare,
            lost_peers=self.lost,
            private_bytes=0,
            idle_bytes=0,
            roles=tuple(each.stats() for _, each in sorted(self.running.items())),
            failure=self.failure or next((each.failure for each in self.running.values() if each.failure), ""),
            switches=self.switches,
            protocol=self.protocol,
            shadow=None if self.kept is None else ShadowState("held", 1 << 20, len(self.kept.layers)),
            hung=self.hung,
            overdue=self.overdue,
            took=self.took,
        )

    def handle(self, message: Prepare | Commit | SetBits | GetStatus | Watch) -> SlotStatus:
        if isinstance(message, SetBits):
            self.switches = (self._switch(message),)
        if (
            isinstance(message, Prepare)
            and message.epoch > max(self.prepare.epoch, self.committed)
            and self._going_on(message) is not None
        ):
            self.asked = message
            total = sum(role.layers[1] - role.layers[0] + 1 for role in message.roles)
            self.prepare = PrepareState(epoch=message.epoch, phase="loading", layers_total=total)
            if self.refuses:
                self.prepare = PrepareState(epoch=message.epoch, phase="refused", reason=self.refuses)
        if isinstance(message, Commit) and self._has_prepared(message.epoch) and message.epoch > self.committed:
            self._switch_over()
            self.ever_committed.append(message.epoch)
        return self.status()

    def _going_on(self, prepare: Prepare) -> "dict[int, RunningRole] | None":
        """None: something that is to go on does not run here."""
        kept = {}
        for place, role in enumerate(prepare.roles):
            if prepare.formed_in(place) != prepare.epoch:
                here = self.running.get(place)
                if here is None or (here.role, here.formed) != (role, prepare.formed_in(place)):
                    return None
                kept[place] = here
        return kept

    def _switch_over(self) -> None:
        assert self.asked is not None
        kept = self._going_on(self.asked)
        assert kept is not None, "a role that was to go on has ended before its commit"
        formed = {place: RunningRole(role, self.asked.epoch) for place, role in enumerate(self.asked.roles)}
        self.running = {**formed, **kept}
        self.committed, self.failure = self.asked.epoch, ""
        self.kept = self.asked.shadow
        members = {each.role.next.slot for each in kept.values()} | {each.role.previous.slot for each in kept.values()}
        self.lost = tuple(peer for peer in self.lost if peer.slot in members)

    def _switch(self, request: SetBits) -> SwitchState:
        """At once: each layer from 16 bits, or none where it refuses."""
        if self.refuses:
            return SwitchState(request, "refused", reason=self.refuses)
        done = tuple(
            LayerSwitch(layer, 16, bits, 7, 0.02, 0.0001, 0.004, 0, 1 << 20) for layer, bits in request.bits.items()
        )
        return SwitchState(request, "switched", done)

    def finish_loading(self) -> None:
        if self.prepare.phase == "loading":
            self.prepare = msgspec.structs.replace(
                self.prepare, phase="prepared", layers_loaded=self.prepare.layers_total
            )
            self.ever_prepared.add(self.prepare.epoch)

    def lose(self, peer: str) -> None:
        if self.committed:
            self.lost = (PeerLoss(slot=peer, reason="connection closed"),)

    def hang(self) -> None:
        """A step of its first role does, and it says so."""
        role = self.running[0].role
        self.hung = (HungStep(role.replica, role.stage, "step 7 has not got on for 30.1 s, with 30 allowed"),)

    def _has_prepared(self, epoch: int) -> bool:
        return self.prepare.epoch == epoch and self.prepare.phase == "prepared"


class FakeGateway:
    """Reaches every leader it is told of at once."""

    def __init__(self) -> None:
        self.protocol = GATEWAY_PROTOCOL
        self.restart()

    def restart(self) -> None:
        self.incarnation = f"gateway-{next(_INCARNATIONS)}"
        self.route: SetRoute | None = None
        self.lost: set[str] = set()  # leaders
        self.drafted: DraftCounts | None = None
        self.cost = EpochChange(0)  # of every change
        self.tells = True  # of changes: nobody waits
        self.epochs: list[int] = []

    def status(self) -> GatewayStatus:
        return GatewayStatus(
            incarnation=self.incarnation,
            epoch=self.route.epoch if self.route else 0,
            leaders_connected=sum(each.slot not in self.lost for each in self.route.leaders) if self.route else 0,
            running_requests=0,
            drafted=self.drafted,
            changes=tuple(msgspec.structs.replace(self.cost, epoch=each) for each in self.epochs) if self.tells else (),
            replicas=tuple(leader.replica for leader in self.route.leaders) if self.route else (),
            protocol=self.protocol,
        )

    def handle(self, message: SetRoute | GetStatus | Watch) -> GatewayStatus:
        if isinstance(message, SetRoute) and self.route and message.epoch == self.route.epoch:
            more = [each for each in message.leaders if each not in self.route.leaders]
            self.route = msgspec.structs.replace(self.route, leaders=(*self.route.leaders, *more))
        elif isinstance(message, SetRoute) and message.epoch > (self.route.epoch if self.route else 0):
            self.route, self.lost = message, set()
            self.epochs = [*self.epochs, message.epoch][-8:]
        return self.status()


def a_plan(*slots: str, layers: int = 4, bits: int = 16, model_uri: str = "file:///models/tiny") -> Plan:
    """Layers shared out evenly over `slots`, one stage each, on a node named after the slot."""
    cuts = [layers * place // len(slots) for place in range(len(slots) + 1)]
    stages = tuple(_stage(place, slots, (cuts[place], cuts[place + 1] - 1), bits) for place in range(len(slots)))
    return Plan(
        version=PLAN_VERSION,
        model_uri=model_uri,
        architecture="LlamaForCausalLM",
        num_layers=layers,
        compute_type="float32",
        max_model_len=64,
        page_tokens=16,
        replicas=(Replica(0, stages, MicroBatch(prefill=1, decode=1, max_step_tokens=64), concurrency=1),),
        prediction=Prediction(
            tokens_per_second=10.0,
            ttft_ms=1.0,
            tpot_ms=1.0,
            latency_seconds=1.0,
            quality_penalty=0.0,
            sensitivity_source="prior",
            bound_by=f"time of stage 0 ({slots[0]})",
        ),
    )


def replicas_of(*plans: Plan) -> Plan:
    """One plan of several replicas."""
    replicas = tuple(msgspec.structs.replace(plan.replicas[0], replica=number) for number, plan in enumerate(plans))
    return msgspec.structs.replace(plans[0], replicas=replicas)


def addresses_of(*slots: str) -> dict[str, SlotAddress]:
    return {
        slot: SlotAddress(host=slot, control_port=7000, data_port=7100, request_port=7200, pages_port=7300)
        for slot in slots
    }


def _stage(place: int, slots: tuple[str, ...], layers: tuple[int, int], bits: int) -> Stage:
    count = layers[1] - layers[0] + 1
    return Stage(
        stage=place,
        slot=slots[place],
        node=slots[place],
        devices=(DeviceRef(type="cpu", index=0, usable_bytes=1 << 30),),
        tensor_parallel=1,
        leader=place == 0,
        layers=layers,
        bits=(bits,) * count,
        format=(DEFAULT_FORMAT_OF_BITS[bits],) * count,
        kv_bits=16,
        kv_page_budget=32,
        embedding=place == 0,
        head=place == len(slots) - 1,
        memory=StageMemory(
            weights_bytes=1 << 20,
            embedding_bytes=0,
            kv_bytes=1 << 16,
            temporary_bytes=0,
            overhead_bytes=CUDA_OVERHEAD_BYTES,  # a small stage on a GPU has more of it than of all else
            total_bytes=(1 << 20) + (1 << 16),
        ),
        times=StageTimes(
            prefill_seconds=0.01,
            decode_seconds=0.001,
            prefill_transfer_seconds=0.0,
            decode_transfer_seconds=0.0,
            source="roofline",
        ),
    )
