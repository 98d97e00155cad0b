"""An epoch with why it was made: what the ConfigMap of an epoch says beside its plan, and back.

Written by the controller when it makes an epoch, read at every look: the operator keeps nothing that is not here or in
status. Knows no API client.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from strata_operator.api import LLMDeployment
from strata_operator.decide.epochs import Epoch
from strata_operator.render import epoch_objects, read_epoch
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


def spec_digest(deployment: LLMDeployment) -> str:
    """Of the part of the spec that plans are made from: another one leads to a new plan."""
    spec = deployment.spec
    parts = (spec.model, spec.workload, spec.objective, spec.precision, spec.placement, spec.planning)
    text = json.dumps([part.model_dump(mode="json") for part in parts] + [spec.runtime.compute_type], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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


def read_record(secret: Object, config_map: Object) -> EpochRecord:
    """Raises ContractError when another release wrote what this one cannot read."""
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


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
