"""The two objects that the operator writes about a deployment beside what it renders: its status and its events. Pure."""

import uuid
from datetime import datetime
from typing import Any

from strata_operator.api import API_VERSION, KIND, LLMDeployment, LLMDeploymentStatus
from strata_operator.api.status import MAX_SENTENCE, RECONCILE_ERROR, read_status, shortened
from strata_operator.decide.actions import Emit

Object = dict[str, Any]

REPORTER = "strata.dev/operator"
NOTE_BYTES, REASON_BYTES = 1024, 128  # the API server takes no longer ones, counted in UTF-8


def status_object(deployment: LLMDeployment, status: LLMDeploymentStatus) -> Object:
    """For a server-side apply of the status subresource: what it no longer holds disappears. Only over the version that
    the decision was made on: who was wrong about the object's state must not say how it is.
    """
    meta = deployment.metadata
    thing = {"name": meta.name, "namespace": meta.namespace, "resourceVersion": meta.resource_version}
    return _status_of(thing, status.model_dump(mode="json", by_alias=True, exclude_none=True))


def failed_status_object(thing: Object, reason: str, sentence: str, now: datetime) -> Object | None:
    """The status of a deployment that could not be looked at: as it was, with the condition ReconcileError. None where it
    says so already. `thing`: as listed; nothing else of it is trusted to parse.
    """
    meta, before = thing["metadata"], read_status(thing.get("status"))
    others = [each for each in before.get("conditions", ()) if each["type"] != RECONCILE_ERROR]
    (old,) = [each for each in before.get("conditions", ()) if each["type"] == RECONCILE_ERROR] or [{}]
    told = {"type": RECONCILE_ERROR, "status": "True", "reason": reason, "message": shortened(sentence, MAX_SENTENCE)}
    if told.items() <= old.items():
        return None
    stamp = old.get("lastTransitionTime") or now.strftime("%Y-%m-%dT%H:%M:%SZ")
    told |= {"lastTransitionTime": stamp, "observedGeneration": int(meta.get("generation") or 0)}
    return _status_of(meta, {"phase": "Failed", **before, "conditions": [*others, told]})


def _status_of(meta: Object, status: Object) -> Object:
    version = {"resourceVersion": meta["resourceVersion"]} if meta.get("resourceVersion") else {}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": meta["name"], "namespace": meta["namespace"], **version},
        "status": status,
    }


def event_object(deployment: LLMDeployment, event: Emit, now: datetime) -> Object:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{deployment.name}.{uuid.uuid4().hex[:16]}", "namespace": deployment.namespace},
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": REPORTER,
        "reportingInstance": "strata-operator",
        "action": "Reconcile",
        "type": event.type,
        "reason": _cut(event.reason, REASON_BYTES),
        "note": _cut(event.message, NOTE_BYTES),
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": deployment.name,
            "namespace": deployment.namespace,
            "uid": deployment.metadata.uid,
        },
    }


def _cut(text: str, most_bytes: int) -> str:
    return text.encode(errors="replace")[:most_bytes].decode(errors="ignore")
