"""Fluent builders of the objects that operator tests read: `a_node("a").with_gpus("T4", 2)`."""

import copy
import json
from typing import Any, Self

from strata_operator.api import LLMDeployment, deployment_from_object


class DeploymentBuilder:
    """An LLMDeployment; `with_spec(workload={...})` merges into its spec."""

    def __init__(self, name: str) -> None:
        self.object: dict[str, Any] = {
            "apiVersion": "strata.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}", "generation": 1},
            "spec": {"model": {"uri": "hf://owner/name"}, "workload": {}, "placement": {}},
        }

    def with_spec(self, **changes: Any) -> Self:
        _merge(self.object["spec"], changes)
        return self

    def with_status(self, **changes: Any) -> Self:
        _merge(self.object.setdefault("status", {}), changes)
        return self

    def in_namespace(self, namespace: str) -> Self:
        self.object["metadata"]["namespace"] = namespace
        return self

    def to_object(self) -> dict[str, Any]:
        return copy.deepcopy(self.object)

    def build(self) -> LLMDeployment:
        return deployment_from_object(json.loads(json.dumps(self.object)))


def a_deployment(name: str = "chat") -> DeploymentBuilder:
    return DeploymentBuilder(name)


def _merge(target: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = copy.deepcopy(value)
