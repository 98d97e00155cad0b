"""Which nodes a deployment may use, and why not: system, readiness, taints, selector, exclusion. Pure, over Node objects.

Called by inventory. Every refusal is a sentence: node, what is wrong, what to do. Knows nothing of devices.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from strata_operator.api import LLMDeployment
from strata_operator.api.pod import Toleration
from strata_operator.api.spec import PlacementSpec

_SYSTEM = "kubernetes.io/os"
_CORDON = "node.kubernetes.io/unschedulable"
# Slots tolerate these without limit: whether the node is lost is for the controller to decide.
_ALWAYS_TOLERATED = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}


def node_name(node: Mapping[str, Any]) -> str:
    return str(node["metadata"]["name"])


def node_labels(node: Mapping[str, Any]) -> Mapping[str, str]:
    return node["metadata"].get("labels") or {}


def why_unusable(node: Mapping[str, Any], deployment: LLMDeployment) -> str | None:
    """Why neither new nor running slots may be on the node; None when they may."""
    placement = deployment.spec.placement
    return (
        _not_placed(node, placement)  # first: what becomes of such a node is no news to the deployment
        or _gone(node)
        or _of_another_system(node)
        or _not_ready(node)
        or _evicting(node, placement)
    )


def why_closed(node: Mapping[str, Any], deployment: LLMDeployment) -> str | None:
    """Why no further pod may come to the node, while those that run there may stay; None when it is open."""
    if node.get("spec", {}).get("unschedulable"):
        return "is cordoned; uncordon it to use it"
    taints = _untolerated(node, deployment.spec.placement, "NoSchedule")
    return _taint_sentence(taints[0]) if taints else None


def tolerates(toleration: Toleration, taint: Mapping[str, Any]) -> bool:
    """The scheduler's rule: an empty key with Exists tolerates all, an empty effect tolerates every effect."""
    if toleration.effect not in {None, taint.get("effect")}:
        return False
    if toleration.key not in {None, taint["key"]}:
        return False
    return toleration.operator == "Exists" or (toleration.value or "") == (taint.get("value") or "")


def _gone(node: Mapping[str, Any]) -> str | None:
    return "is being deleted" if node["metadata"].get("deletionTimestamp") else None


def _of_another_system(node: Mapping[str, Any]) -> str | None:
    """Which the kubelet says itself, by a label."""
    system = node_labels(node).get(_SYSTEM, "linux")
    return None if system == "linux" else f"has {_SYSTEM}={system}; slots run on linux alone"


def _not_ready(node: Mapping[str, Any]) -> str | None:
    conditions: Iterable[Mapping[str, Any]] = node.get("status", {}).get("conditions") or []
    ready = next((condition for condition in conditions if condition["type"] == "Ready"), None)
    if ready is not None and ready["status"] == "True":
        return None
    return f"is not Ready ({'' if ready is None else ready.get('reason', '')})".replace(" ()", "")


def _not_placed(node: Mapping[str, Any], placement: PlacementSpec) -> str | None:
    if node_name(node) in placement.exclude:
        return "is excluded by spec.placement.exclude"
    labels = node_labels(node)
    missing = {key: value for key, value in placement.node_selector.items() if labels.get(key) != value}
    if missing:
        wanted = ", ".join(f"{key}={value}" for key, value in sorted(missing.items()))
        return f"lacks {wanted}, which spec.placement.nodeSelector asks for"
    return None


def _evicting(node: Mapping[str, Any], placement: PlacementSpec) -> str | None:
    taints = _untolerated(node, placement, "NoExecute")
    return _taint_sentence(taints[0]) if taints else None


def _untolerated(node: Mapping[str, Any], placement: PlacementSpec, effect: str) -> list[Mapping[str, Any]]:
    return [
        taint
        for taint in node.get("spec", {}).get("taints") or []
        if taint.get("effect") == effect
        and taint["key"] != _CORDON
        and not (effect == "NoExecute" and taint["key"] in _ALWAYS_TOLERATED)
        and not any(tolerates(toleration, taint) for toleration in placement.tolerations)
    ]


def _taint_sentence(taint: Mapping[str, Any]) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return (
        f"has the taint {taint['key']}{value}:{taint['effect']}; add it to spec.placement.tolerations to use the node"
    )
