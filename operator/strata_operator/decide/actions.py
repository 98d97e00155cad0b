"""What `reconcile` may decide, as values. The controller carries them out; doing one twice does no harm."""

from dataclasses import dataclass
from typing import Any, Literal

from strata_operator.api import LLMDeploymentStatus
from strata_operator.decide.epochs import SendToGateway, SendToSlot
from strata_operator.decide.standing_orders import Ordered, OrderTerms
from strata_operator.render.records import EpochRecord


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan on a fresh inventory, without some nodes; the plan found becomes the next epoch."""

    reason: str  # CamelCase, for status
    without: frozenset[str] = frozenset()
    node: str = ""  # the node that is the reason
    recorded: bool = False  # by the spec that the newest epoch was planned for, not by the object's
    margin: float = 0.0  # share of each device's memory to leave free beyond the rules
    optional: bool = False  # only a plan that gains `replanning.minGain` over the running one
    repair: bool = False  # of the plan in force, in milliseconds, where it can be repaired
    # Of `without`, those that are there, whose layers the others take over: nothing is searched for where there is no repair.
    taken_over: frozenset[str] = frozenset()
    early: bool = False  # it is made and not taken yet: it may not be wanted, or status does not say what is remembered


@dataclass(frozen=True, slots=True)
class RenewEpoch:
    """The same plan in a new epoch: its slots lost what they had in the last one. `back_to`: the plan of that epoch, which is in force, in place of a repair
    that is prepared; None: the newest one's.
    """

    number: int
    message: str
    renewals: int = 1  # how many in a row did not last, this one included
    back_to: EpochRecord | None = None


@dataclass(frozen=True, slots=True)
class RecordOrder:
    """The epoch that a standing order has made while no operator was there: as it is served, so that it is gone on from."""

    ordered: Ordered


@dataclass(frozen=True, slots=True)
class GiveOrders:
    """The standing orders of the epoch in force, to each gateway that routes to it and has not been given them."""

    terms: OrderTerms


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of one manifest."""

    manifest: dict[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class DeleteStatefulSet:
    name: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Only the pod with this uid. `grace_seconds`: what its process has to end by itself; 0: the pod is gone at once, as its node is and
    nobody else can confirm its end; None: the pod's own.
    """

    name: str
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class DeleteEpoch:
    """An old record: ConfigMap and Secret."""

    number: int


@dataclass(frozen=True, slots=True)
class SetStatus:
    status: LLMDeploymentStatus


@dataclass(frozen=True, slots=True)
class Emit:
    """An event on the deployment that a person can read."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action = (
    MakePlan
    | RenewEpoch
    | RecordOrder
    | GiveOrders
    | Apply
    | SendToSlot
    | SendToGateway
    | DeleteStatefulSet
    | DeletePod
    | DeleteEpoch
    | SetStatus
    | Emit
)
