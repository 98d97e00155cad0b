"""What is kept of an object of Kubernetes: the fields that decide something. Pure.

Called by `stock` with every object that it hears of. Two objects that are cut alike decide alike: a node's heartbeat, a probe of somebody's
pod or a count of replicas changes nothing here, so nobody looks because of it.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from strata_operator.errors import InvalidInputError
from strata_operator.observe.kube import CLAIMS, DEPLOYMENTS_OF_STRATA, NODES, STATEFUL_SETS, Kind
from strata_operator.render.names import APP, MANAGER_LABEL
from strata_operator.render.requests import CPU, GPU, MEMORY, Amounts, pod_requests

Object = dict[str, Any]

ENDED = {"Succeeded", "Failed"}  # phases of pods that hold nothing any more
_COUNTED = (CPU, MEMORY, GPU)


class PodKept(msgspec.Struct, frozen=True, gc=False):
    """`node`: empty where the pod holds nothing of one. `requests`: of what inventories count. `thing`: of Strata's own pods alone."""

    node: str
    requests: Amounts
    thing: Object | None = None


def cut(kind: Kind, thing: Object) -> Object:
    """For all kinds but pods."""
    return _CUTS.get(kind, _as_it_is)(thing)


def cut_pod(pod: Object) -> PodKept:
    labels = pod["metadata"].get("labels") or {}
    holds = (pod.get("status") or {}).get("phase") not in ENDED
    node = str((pod.get("spec") or {}).get("nodeName") or "") if holds else ""
    return PodKept(node, _requests(pod) if node else {}, _as_it_is(pod) if labels.get(MANAGER_LABEL) == APP else None)


def _requests(pod: Object) -> Amounts:
    """Nothing of a pod whose amounts nobody can read: the API server lets none through."""
    try:
        asked = pod_requests(pod)
    except InvalidInputError:
        return {}
    return {name: asked[name] for name in _COUNTED if name in asked}


def _as_it_is(thing: Object) -> Object:
    """Without what says only who wrote which field, and which version it is."""
    return _without(thing, "managedFields", "resourceVersion")


def _deployment(thing: Object) -> Object:
    """With its version: status is written over no other than was read."""
    return _without(thing, "managedFields")


def _without(thing: Object, *names: str) -> Object:
    return {**thing, "metadata": {name: value for name, value in thing["metadata"].items() if name not in names}}


def _node(node: Object) -> Object:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = [
        {name: value for name, value in condition.items() if name != "lastHeartbeatTime"}
        for condition in status.get("conditions") or ()
        if condition["type"] == "Ready"
    ]
    return {
        "metadata": _meta(node, "labels"),
        "spec": _some(spec, "unschedulable", "taints"),
        "status": {
            "allocatable": status.get("allocatable"),
            "conditions": ready,
            **_some(status, "addresses", "daemonEndpoints"),
        },
    }


def _stateful_set(thing: Object) -> Object:
    template = thing["spec"]["template"]["metadata"]
    return {
        "metadata": _meta(thing, "labels", "ownerReferences"),
        "spec": {"template": {"metadata": _some(template, "annotations")}},
    }


def _claim(claim: Object) -> Object:
    return {
        "metadata": _meta(claim),
        "spec": _some(claim.get("spec") or {}, "accessModes"),
        "status": _some(claim.get("status") or {}, "accessModes"),
    }


def _meta(thing: Object, *more: str) -> Object:
    return _some(thing["metadata"], "name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", *more)


def _some(fields: Object, *names: str) -> Object:
    return {name: fields[name] for name in names if name in fields}


_CUTS: dict[Kind, Callable[[Object], Object]] = {
    DEPLOYMENTS_OF_STRATA: _deployment,
    NODES: _node,
    STATEFUL_SETS: _stateful_set,
    CLAIMS: _claim,
}
