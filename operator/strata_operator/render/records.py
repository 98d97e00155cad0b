"""An epoch with why it was made: what the ConfigMap of an epoch says beside its plan, and back.

Written by the controller when it makes an epoch, read at every look: the operator keeps nothing that is not here or in
status. Knows no API client.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import ValidationError

from strata_operator.api import LLMDeployment, LLMDeploymentSpec
from strata_operator.api.spec import ReplanningSpec, RuntimeSpec
from strata_operator.render import epoch_objects, read_epoch
from strata_operator.render.digest import PLANNED_OF_RUNTIME, PLANNED_PARTS, same_spec
from strata_operator.render.epoch import Epoch
from strata_operator.render.names import EPOCH_LABEL
from strata_planner.contract.values import ContractError, Value, from_json, to_json
from strata_planner.question.cluster import Cluster
from strata_planner.replan.repair import RepairNote

REASON = "strata.dev/reason"
NODE = "strata.dev/node"
SPEC_DIGEST = "strata.dev/spec-digest"
INVENTORY_DIGEST = "strata.dev/inventory-digest"
SECONDS_TO_PLAN = "strata.dev/seconds-to-plan"
WITHOUT = "strata.dev/without"
MARGIN = "strata.dev/memory-margin"
PLANNED_IN = "strata.dev/planned-in"
RENEWALS = "strata.dev/renewals"
REPAIR = "strata.dev/repair"
GAIN = "strata.dev/gain"
NOTICED = "strata.dev/noticed"
PLANNED = "strata.dev/planned"
WEIGHED = "strata.dev/weighed"
HURRIED = "strata.dev/hurried"
SPEC_FILE = "spec.json"
ORDERED = "StandingOrder"  # of one that was made while no operator was there
RENEWED = "SlotLost"  # the reason of an epoch whose plan is that of the last one
NODE_BACK = "NodeBack"  # of one whose plan is that in force, while a repair of it was prepared

Object = dict[str, Any]


class Weighed(Value, frozen=True):
    """What was chosen for a slot whose process was gone, and the seconds that each way would take from then on, as predicted."""

    chosen: Literal["restart", "takeover"]
    restart_seconds: float
    takeover_seconds: float


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an epoch is made and of what. `node`: the one that was lost or left out."""

    reason: str  # CamelCase
    spec_digest: str
    inventory_digest: str
    node: str = ""
    seconds_to_plan: float = 0.0
    without: str = ""  # digest of the nodes that were left out of the inventory
    margin: float = 0.0  # share of each device's memory that was left free beyond the rules
    planned_in: int = 0  # the epoch that this plan was made for; 0: this one
    renewals: int = 0  # epochs of this plan in a row that did not last
    repair: RepairNote | None = None  # the plan is the repair of a loss, made without any search
    gain: float | None = None  # of a better plan, over the one before
    noticed: datetime | None = None  # when the wish for this plan was first seen
    planned: datetime | None = None  # when it was made
    weighed: Weighed | None = None  # of a slot that was lost: what was chosen, restart or takeover
    hurried: bool = False  # the plan is what a short search has found while others waited


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """An epoch as it is kept in the cluster."""

    epoch: Epoch
    cluster: Cluster  # what its plan was made for, as far as it takes it: no other nodes
    cause: Cause
    at: datetime
    spec: LLMDeploymentSpec | None = None  # the parts that the plan was made from; None: of a release that kept none

    @property
    def planned_in(self) -> int:
        return self.cause.planned_in or self.epoch.number


@dataclass(frozen=True, slots=True)
class UnreadRecord:
    """An epoch that another release wrote, or something that only looks like one. `number` 0: it has none."""

    name: str
    number: int
    reason: str


def as_planned(deployment: LLMDeployment, record: EpochRecord | None) -> LLMDeployment:
    """The deployment as this epoch was planned for: what is served, and what a loss is repaired by, while another spec has
    no plan. Fields that no plan is made from are today's.
    """
    if record is None or record.spec is None or same_spec(deployment, record.cause.spec_digest):
        return deployment
    old, now = record.spec, deployment.spec
    parts: dict[str, Any] = {name: getattr(old, name) for name in PLANNED_PARTS}
    parts["runtime"] = now.runtime.model_copy(update=_planned_of(old.runtime))
    parts["replanning"] = _with_kept(now.replanning, old.replanning)
    return deployment.model_copy(update={"spec": now.model_copy(update=parts)})


def record_objects(deployment: LLMDeployment, epoch: Epoch, cluster: Cluster, cause: Cause) -> tuple[Object, Object]:
    """The Secret and the ConfigMap to create, in this order."""
    secret, config_map = epoch_objects(deployment, epoch, cluster)
    config_map["data"][SPEC_FILE] = _planned_spec(deployment.spec).model_dump_json(by_alias=True, exclude_defaults=True)
    config_map["metadata"]["annotations"] = {
        REASON: cause.reason,
        NODE: cause.node,
        SPEC_DIGEST: cause.spec_digest,
        INVENTORY_DIGEST: cause.inventory_digest,
        SECONDS_TO_PLAN: f"{cause.seconds_to_plan:.3f}",
        WITHOUT: cause.without,
        MARGIN: f"{cause.margin:g}",
        PLANNED_IN: str(cause.planned_in or epoch.number),
        RENEWALS: str(cause.renewals),
        **_told(cause),
    }
    return secret, config_map


def _told(cause: Cause) -> dict[str, str]:
    """What only some epochs have."""
    notes = {
        REPAIR: to_json(cause.repair).decode() if cause.repair else "",
        GAIN: "" if cause.gain is None else f"{cause.gain:.4f}",
        NOTICED: exact_stamp(cause.noticed) if cause.noticed else "",
        PLANNED: exact_stamp(cause.planned) if cause.planned else "",
        WEIGHED: to_json(cause.weighed).decode() if cause.weighed else "",
        HURRIED: "true" if cause.hurried else "",
    }
    return {name: text for name, text in notes.items() if text}


def epoch_number(thing: Object) -> int:
    """As the label of its ConfigMap or Secret says; 0 where that is no number of an epoch."""
    text = str((thing["metadata"].get("labels") or {}).get(EPOCH_LABEL, ""))
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else 0


def read_record(secret: Object, config_map: Object) -> EpochRecord:
    """Raises ContractError for what this release cannot read: another one's, or a stranger's."""
    try:
        return _read(secret, config_map)
    except ContractError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ContractError(f"is no record of an epoch ({type(error).__name__}: {error}); delete it") from error


def _read(secret: Object, config_map: Object) -> EpochRecord:
    epoch, cluster = read_epoch(secret, config_map)
    meta = config_map["metadata"]
    notes = meta.get("annotations") or {}
    cause = Cause(
        reason=notes.get(REASON, ""),
        spec_digest=notes.get(SPEC_DIGEST, ""),
        inventory_digest=notes.get(INVENTORY_DIGEST, ""),
        node=notes.get(NODE, ""),
        seconds_to_plan=float(notes.get(SECONDS_TO_PLAN, "0")),
        without=notes.get(WITHOUT, ""),
        margin=float(notes.get(MARGIN, "0")),
        planned_in=int(notes.get(PLANNED_IN, "0")),
        renewals=int(notes.get(RENEWALS, "0")),
        repair=from_json(notes[REPAIR], RepairNote) if notes.get(REPAIR) else None,
        gain=float(notes[GAIN]) if notes.get(GAIN) else None,
        noticed=moment(notes[NOTICED]) if notes.get(NOTICED) else None,
        planned=moment(notes[PLANNED]) if notes.get(PLANNED) else None,
        weighed=from_json(notes[WEIGHED], Weighed) if notes.get(WEIGHED) else None,
        hurried=notes.get(HURRIED) == "true",
    )
    spec = _read_spec(config_map["data"].get(SPEC_FILE))
    return EpochRecord(epoch, cluster, cause, moment(meta["creationTimestamp"]), spec)


def _planned_spec(spec: LLMDeploymentSpec) -> LLMDeploymentSpec:
    """Only what plans are made from."""
    parts: dict[str, Any] = {name: getattr(spec, name) for name in PLANNED_PARTS}
    replanning = _with_kept(ReplanningSpec(), spec.replanning)
    return LLMDeploymentSpec(**parts, runtime=RuntimeSpec(**_planned_of(spec.runtime)), replanning=replanning)


def _with_kept(replanning: ReplanningSpec, planned: ReplanningSpec) -> ReplanningSpec:
    """The wishes of replanning that plans are made from: what is kept for losses."""
    kept = {name: getattr(planned.takeover, name) for name in ("shadow", "standing_orders")}
    if all(getattr(replanning.takeover, name) == value for name, value in kept.items()):
        return replanning
    return replanning.model_copy(update={"takeover": replanning.takeover.model_copy(update=kept)})


def _planned_of(runtime: RuntimeSpec) -> dict[str, Any]:
    return {name: getattr(runtime, name) for name in PLANNED_OF_RUNTIME}


def _read_spec(text: str | None) -> LLMDeploymentSpec | None:
    """None where another release wrote what this one does not know: the object's spec then stands in."""
    try:
        return LLMDeploymentSpec.model_validate_json(text) if text else None
    except ValidationError:
        return None


def usable_records(
    read: Iterable[EpochRecord], unread: Iterable[UnreadRecord]
) -> tuple[tuple[EpochRecord, ...], tuple[UnreadRecord, ...]]:
    """The epochs to go on from, by number, and what was passed over.

    Where the newest epoch cannot be read there is none to go on from: a new plan is made, with a number above all of them.
    """
    epochs = sorted(read, key=lambda record: record.epoch.number)
    passed = tuple(sorted(unread, key=lambda each: each.number))
    newest = epochs[-1].epoch.number if epochs else 0
    return () if passed and passed[-1].number > newest else tuple(epochs), passed


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def stamp(at: datetime) -> str:
    """As Kubernetes writes a time."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def exact_stamp(at: datetime) -> str:
    """With milliseconds."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
