"""The two objects that the operator writes about a deployment beside what it renders: its status and its events. Pure."""

import uuid
from datetime import UTC, datetime
from typing import Any

from strata_operator.api import API_VERSION, KIND, LLMDeployment, LLMDeploymentStatus
from strata_operator.decide.actions import Emit

Object = dict[str, Any]

REPORTER = "strata.dev/operator"
NOTE_CHARACTERS = 1024  # the API server takes no longer note


def status_object(deployment: LLMDeployment, status: LLMDeploymentStatus) -> Object:
    """For a server-side apply of the status subresource: what it no longer holds disappears."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": deployment.name, "namespace": deployment.namespace},
        "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def event_object(deployment: LLMDeployment, event: Emit) -> Object:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{deployment.name}.{uuid.uuid4().hex[:16]}", "namespace": deployment.namespace},
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": REPORTER,
        "reportingInstance": "strata-operator",
        "action": "Reconcile",
        "type": event.type,
        "reason": event.reason,
        "note": event.message[:NOTE_CHARACTERS],
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": deployment.name,
            "namespace": deployment.namespace,
            "uid": deployment.metadata.uid,
        },
    }
