"""Control messages: how a controller gives slots their roles and a gateway its leaders (protocol: changing the epoch).

Sent as JSON over a ROUTER socket of the slot or gateway. Every request is answered by a whole status, and a watcher gets
a status at every change: nothing depends on an event that could be missed.

    controller -> slot      Prepare | Commit | SetBits | GetStatus | Watch      -> SlotStatus
    controller -> gateway   SetRoute | SetOrders | GetStatus | Watch            -> GatewayStatus
    gateway -> slot         CarryOut | CommitOrder | GetStatus                  -> SlotStatus, while nobody controls
"""

from typing import Literal

import msgspec

from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.keys import RoleKeys
from strata_planner.contract.roles import Role
from strata_planner.contract.shadows import ShadowOrder, ShadowState
from strata_planner.contract.values import Value

# Of one control message. The longest are a `Prepare`, which holds the addresses of all slots (some 100 bytes each), and statuses.
LARGEST_CONTROL_BYTES = 4 << 20
# What a slot of this release takes, as its status tells: 0, all that 0.1.0 does; 1, role keys, too; 2, planned steps, shadows and orders for pages, too;
# 3, standing orders, too
CONTROL_PROTOCOL = 3

STEP_TIMEOUT_SECONDS = 30  # that a step may always be still; an object that says nothing else has it


class SlotAddress(Value, frozen=True, omit_defaults=True):
    """Where a slot listens. Role i takes its frames at `data_port + i`, requests (when it leads) at `request_port + i`."""

    host: str
    control_port: int
    data_port: int
    request_port: int
    pages_port: int = 0  # where it gives KV pages while they move; 0: nowhere


class PageSource(Value, frozen=True, omit_defaults=True):
    """A slot that has pages of layers which a role gets: where it gives them from its own prepare until it has given all behind the commit."""

    replica: int
    stage: int
    layers: tuple[int, ...]
    slot: str
    endpoint: str
    key: str  # secret of that port
    waits: bool = False  # its replica has lost a stage: nothing is served while pages are fetched


class PageGiving(Value, frozen=True):
    """A slot that has pages for others: at which port it gives them, by which secret, to how many roles."""

    port: int
    key: str
    takers: int


class PlannedStep(Value, frozen=True):
    """Seconds that a step takes by the plan, at most: at the stage of a role, and on its way through all stages of the replica."""

    stage_seconds: float = 0.0
    pipeline_seconds: float = 0.0


class Prepare(Value, frozen=True, tag="prepare", omit_defaults=True):
    """Load what these roles need, keep serving the epoch in force. Idempotent; a higher epoch supersedes.

    Roles of a replica that was formed in an earlier epoch go on as they run: nothing of them is loaded, their connections keep that epoch's keys.
    A slot without a part in the next epoch that has pages for it is told so with no role: it serves until the commit, then gives what is left and is idle.
    A field at its default is left out, so that slots of an earlier release, which do not know it, take the rest.
    """

    epoch: int
    key: str  # secret of this epoch's request ports
    roles: tuple[Role, ...]
    slots: dict[str, SlotAddress]  # every slot of the plan
    role_keys: tuple[RoleKeys, ...] = ()  # of each role; without any, `key` is the secret of all data ports, too
    formed: tuple[int, ...] = ()  # of each role, the epoch in which its replica was formed; without any, this one
    shadow: ShadowOrder | None = None  # what the slot keeps of others from the commit on; None: nothing
    steps: tuple[PlannedStep, ...] = ()  # of each role; what takes far longer counts as hung
    sources: tuple[PageSource, ...] = ()  # of pages that other slots have for these roles
    giving: PageGiving | None = None  # what this slot has for others

    def formed_in(self, place: int) -> int:
        """Of the role at this place of the list."""
        return self.formed[place] if self.formed else self.epoch


class Commit(Value, frozen=True, tag="commit"):
    """Switch to the prepared epoch: new neighbours, new key, but for the replicas that go on. KV stays where its layer and its leader stay."""

    epoch: int


class SetBits(Value, frozen=True, tag="setBits"):
    """Give layers of a running role other bits, each between two steps: sequences go on, their KV stays.

    Says what is wanted, not what to do: layers that have these bits stay as they are. Holds until its replica is formed anew, as the plan then says.
    """

    epoch: int
    replica: int
    stage: int
    bits: dict[int, int]  # layer (numbered as in the whole model) -> 3..8 or 16


class GetStatus(Value, frozen=True, tag="getStatus"):
    """Answer with the status, change nothing."""


class Watch(Value, frozen=True, tag="watch"):
    """Answer with the status now and again at every change, until the connection ends."""


class Leader(Value, frozen=True, omit_defaults=True):
    """Where a gateway reaches one replica, and how much of the load it should get."""

    replica: int
    slot: str
    endpoint: str
    tokens_per_second: float  # planned capacity: the weight in routing
    formed: int = 0  # the epoch in which the replica was formed, and its messages name; 0: the route's
    key: str = ""  # secret of its request port; "": the route's


class SetRoute(Value, frozen=True, tag="setRoute"):
    """The leaders of the committed epoch. Running requests are replayed at them, but those of replicas that go on: they stay where they are. Told again with
    more of them, once further replicas serve the epoch.
    """

    epoch: int
    key: str  # secret of this epoch's request ports
    leaders: tuple[Leader, ...]
    max_model_len: int


class CarryOut(Value, frozen=True, tag="carryOut"):
    """A standing order's prepare for one slot, as its controller has written and sealed it. Taken only where no controller was heard for so long, by a slot
    that serves the epoch `after` or nothing.
    """

    after: int
    silence_seconds: float
    prepare: str  # a Prepare, as JSON
    seal: str  # `seal_of` the slot's secret and `sealed`

    @property
    def sealed(self) -> str:
        return f"{self.after}/{float(self.silence_seconds)!r}/{self.prepare}"  # 10 is 10.0 once it was sent


class CommitOrder(Value, frozen=True, tag="commitOrder"):
    """All have prepared the epoch of a standing order: switch to it."""

    epoch: int


class OrderedEpoch(Value, frozen=True, omit_defaults=True):
    """One standing order with all that carrying it out takes. `lost`: the slots that it does without; none: replicas are formed anew as they were."""

    number: int  # of the epoch that it makes, which nobody else makes
    slots: dict[str, CarryOut]  # of that epoch
    route: SetRoute
    lost: tuple[str, ...] = ()
    renewed: tuple[int, ...] = ()  # replicas


class SlotDoor(Value, frozen=True):
    """Where a slot takes standing orders: the public half of its control port's key, and the secret that opens that for nothing else."""

    host: str
    port: int
    public_key: str
    secret: str


class SetOrders(Value, frozen=True, tag="setOrders"):
    """What a gateway may do about a loss once it has heard no controller for `silence_seconds`. `grace_seconds`: how long a slot may be away before the plan
    goes on without it. Those of a lower epoch are out of date.
    """

    epoch: int  # in force
    last: int  # the highest number that is kept for orders
    silence_seconds: float
    grace_seconds: float
    replicas: dict[int, tuple[str, ...]]  # the slots of each
    doors: dict[str, SlotDoor]  # of all slots of the plan
    orders: tuple[OrderedEpoch, ...]  # by rising number


SlotRequest = Prepare | Commit | SetBits | CarryOut | CommitOrder | GetStatus | Watch
OrderRequest = CarryOut | CommitOrder | GetStatus
GatewayRequest = SetRoute | SetOrders | GetStatus | Watch


class PrepareState(Value, frozen=True):
    """How far the newest prepare is. `reason` says why it was refused.

    `progress` grows as long as a prepare goes on, with every tensor that is stored and every MiB that is fetched: one that stays is stuck.
    """

    epoch: int
    phase: Literal["none", "loading", "prepared", "refused"]
    reason: str = ""
    layers_loaded: int = 0
    layers_total: int = 0
    progress: int = 0


class LayerSwitch(Value, frozen=True):
    """One layer that got other bits, and what it took."""

    layer: int
    bits_before: int
    bits: int
    before_step: int  # of the role in its epoch: the first that computed with these bits
    read_seconds: float  # while steps went on
    swap_seconds: float  # between two steps
    return_seconds: float  # giving memory back, while steps went on
    added_bytes: int
    returned_bytes: int


SwitchPhase = Literal["waiting", "switching", "switched", "refused", "failed"]
SWITCH_OVER: tuple[SwitchPhase, ...] = ("switched", "refused", "failed")


class SwitchState(Value, frozen=True):
    """How far a request is. `refused`: nothing was changed; `failed`: the layers in `done` have changed, the others have not."""

    request: SetBits
    phase: SwitchPhase
    done: tuple[LayerSwitch, ...] = ()
    reason: str = ""


class PeerLoss(Value, frozen=True):
    """A neighbour this slot cannot reach in the committed epoch."""

    slot: str
    reason: str


class HungStep(Value, frozen=True):
    """What a role of this slot is at, or waits for, a step or what comes before the first, does not get on: for far longer than it ever took."""

    replica: int
    stage: int
    reason: str


class RoleStats(Value, frozen=True, omit_defaults=True):
    """What one role has done since its replica was formed: for busy shares and for measured beside predicted. Only roles that run have any."""

    replica: int
    stage: int
    steps: int
    busy_seconds: float
    wall_seconds: float
    prefill_tokens: int
    decode_tokens: int
    frames_dropped: int
    bits: tuple[int, ...] = ()  # of each layer now
    formed: int = 0  # the epoch in which its replica was formed; 0: a release that knows only whole epochs
    failure: str = ""  # a step failed: the replica needs to be formed anew
    sent_bytes: int = 0  # of hidden states, from its first rank to the next stage's
    shared_bytes: int = 0  # of what came in, from its first rank to the others
    refilled: int = 0  # tokens x layers that were computed again in blocks that had been kept


class Took(Value, frozen=True):
    """Seconds that the process of a slot took from its birth until it listened, and for its first load of so many layers, downloads included."""

    start_seconds: float
    load_seconds: float
    layers: int


class SlotStatus(Value, frozen=True, tag="slot", omit_defaults=True):
    """The state of a slot. `incarnation` changes when its process is started anew: its roles and KV are gone then. A field at its default is left out,
    for controllers of an earlier release.
    """

    slot: str
    incarnation: str
    committed_epoch: int  # 0: none
    prepare: PrepareState
    lost_peers: tuple[PeerLoss, ...]
    private_bytes: int  # private memory of the process now, and of those of its stages' other ranks
    idle_bytes: int  # the same before anything was loaded
    roles: tuple[RoleStats, ...]
    failure: str = ""  # a step failed: the slot needs a new epoch
    switches: tuple[SwitchState, ...] = ()  # the newest requests for other bits, in their order
    protocol: int = 0
    shadow: ShadowState | None = None  # None: nothing is asked of it
    hung: tuple[HungStep, ...] = ()  # its process is to be ended: nothing else ends such a step
    overdue: tuple[HungStep, ...] = ()  # of roles that lead: the stages behind have not got on, whichever it is
    took: Took | None = None  # None: it has loaded nothing yet


class EpochChange(Value, frozen=True, omit_defaults=True):
    """What the change to an epoch cost those whom a gateway serves, from the loss that led to it on. Told once nobody waits for it any more."""

    epoch: int
    held: int = 0  # requests that no leader had for a while, those included that came meanwhile
    lost: int = 0  # of them, those that ended in an error then
    pause_seconds: float = 0.0  # the longest, from one token to the next; 0: no answer had begun
    resumed_at: float = 0.0  # when the first of them got a token, in seconds since 1970; 0: none did
    recomputed_tokens: int = 0  # of prompts and answers that had begun, through all layers
    refilled_tokens: int = 0  # through the layers alone that were lost


ADDS_LEADERS = 1  # the protocol of gateways that take more leaders of the epoch that they route to
GATEWAY_PROTOCOL = ADDS_LEADERS


class GatewayStatus(Value, frozen=True, tag="gateway", omit_defaults=True):
    """The state of a gateway: the epoch it routes to and the leaders that have said hello in it. `drafted`: since it started; None: nothing was.
    `changes`: the last ones that are over, oldest first. `replicas`: those whose leaders it was told. `protocol`: what it understands; 0: release 0.1.0.
    """

    incarnation: str
    epoch: int
    leaders_connected: int
    running_requests: int
    drafted: DraftCounts | None = None
    changes: tuple[EpochChange, ...] = ()
    replicas: tuple[int, ...] = ()
    protocol: int = 0


def news_of(status: SlotStatus | GatewayStatus) -> SlotStatus | GatewayStatus:
    """What watchers are told of at once: counts that grow with every step are no news."""
    return msgspec.structs.replace(status, drafted=None) if isinstance(status, GatewayStatus) else status


Status = SlotStatus | GatewayStatus

encode = msgspec.json.encode
prepare_decoder: msgspec.json.Decoder[Prepare] = msgspec.json.Decoder(Prepare)
slot_request_decoder: msgspec.json.Decoder[SlotRequest] = msgspec.json.Decoder(SlotRequest)
gateway_request_decoder: msgspec.json.Decoder[GatewayRequest] = msgspec.json.Decoder(GatewayRequest)
status_decoder: msgspec.json.Decoder[Status] = msgspec.json.Decoder(Status)
