"""An epoch with why it was made: what the ConfigMap of an epoch says beside its plan, and back.

Written by the controller when it makes an epoch, read at every look: the operator keeps nothing that is not here or in
status. Knows no API client.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from strata_operator.api import LLMDeployment
from strata_operator.decide.epochs import Epoch
from strata_operator.render import epoch_objects, read_epoch
from strata_operator.render.names import EPOCH_LABEL
from strata_planner.contract.values import ContractError
from strata_planner.question.cluster import Cluster

REASON = "strata.dev/reason"
NODE = "strata.dev/node"
SPEC_DIGEST = "strata.dev/spec-digest"
INVENTORY_DIGEST = "strata.dev/inventory-digest"
SECONDS_TO_PLAN = "strata.dev/seconds-to-plan"
RENEWED = "SlotLost"  # the reason of an epoch whose plan is that of the last one

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an epoch is made and of what. `node`: the one that was lost or left out."""

    reason: str  # CamelCase
    spec_digest: str
    inventory_digest: str
    node: str = ""
    seconds_to_plan: float = 0.0


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """An epoch as it is kept in the cluster."""

    epoch: Epoch
    cluster: Cluster  # what its plan was made for
    cause: Cause
    at: datetime


@dataclass(frozen=True, slots=True)
class UnreadRecord:
    """An epoch that another release wrote, or something that only looks like one. `number` 0: it has none."""

    name: str
    number: int
    reason: str


def record_objects(deployment: LLMDeployment, epoch: Epoch, cluster: Cluster, cause: Cause) -> tuple[Object, Object]:
    """The Secret and the ConfigMap to create, in this order."""
    secret, config_map = epoch_objects(deployment, epoch, cluster)
    config_map["metadata"]["annotations"] = {
        REASON: cause.reason,
        NODE: cause.node,
        SPEC_DIGEST: cause.spec_digest,
        INVENTORY_DIGEST: cause.inventory_digest,
        SECONDS_TO_PLAN: f"{cause.seconds_to_plan:.3f}",
    }
    return secret, config_map


def epoch_number(config_map: Object) -> int:
    """As its label says; 0 where that is no number of an epoch."""
    text = str((config_map["metadata"].get("labels") or {}).get(EPOCH_LABEL, ""))
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
    )
    return EpochRecord(epoch, cluster, cause, moment(meta["creationTimestamp"]))


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
