"""What every rendered object has in common, and the smallest objects. Called by the other modules of render."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata_operator.api import API_VERSION, KIND, LLMDeployment
from strata_operator.errors import InvalidInputError
from strata_operator.render.names import (
    APP,
    CONTROL_SECRET_KEY,
    GATEWAY,
    INSTANCE_LABEL,
    MANAGER_LABEL,
    control_secret,
    gateway_name,
    labels,
    process_secret,
    service_account,
    slot_labels,
)
from strata_planner.contract.keys import gateway_secret, slot_secret

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What the operator knows beside the object. `image`: see `image_for`. `model_uri`: the plan's, which names a commit
    where the object's does not; empty: the object's. `lets_go`: slots of a cordoned node may be evicted, since no plan does without them.
    """

    image: str
    control_key: str
    operator_namespace: str
    model_uri: str = ""
    lets_go: bool = False


def image_for(deployment: LLMDeployment, default: str) -> str:
    """The runtime image: the user's, else the one recorded in status, else `default` (then to be recorded).

    Raises InvalidInputError when there is none.
    """
    image = deployment.spec.runtime.image or deployment.status.image or default
    if not image:
        problem = "spec.runtime.image: is required where the operator has no default; name the image that runs slots"
        raise InvalidInputError(f"{deployment.namespace}/{deployment.name}", [problem])
    return image


def metadata(deployment: LLMDeployment, name: str, own_labels: dict[str, str]) -> Object:
    return {
        "name": name,
        "namespace": deployment.namespace,
        "labels": own_labels,
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": deployment.name,
                "uid": deployment.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def service_account_object(deployment: LLMDeployment) -> Object:
    """Slots and gateway ask nothing of Kubernetes: an account without a token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(deployment, service_account(deployment), labels(deployment, APP)),
        "automountServiceAccountToken": False,
    }


def control_secret_object(deployment: LLMDeployment, key: str) -> Object:
    """What the secrets of all control ports follow from. It lives as long as the deployment; pods get only their own."""
    return _secret(deployment, control_secret(deployment), labels(deployment, APP), key)


def slot_secret_object(deployment: LLMDeployment, slot: str, control_key: str) -> Object:
    """The key of a slot's control port, which its pod reads at its start."""
    return _secret(deployment, process_secret(slot), slot_labels(deployment, slot), slot_secret(control_key, slot))


def gateway_secret_object(deployment: LLMDeployment, control_key: str) -> Object:
    """The same for the gateway."""
    name = process_secret(gateway_name(deployment))
    return _secret(deployment, name, labels(deployment, GATEWAY), gateway_secret(control_key))


def _secret(deployment: LLMDeployment, name: str, own_labels: dict[str, str], key: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(deployment, name, own_labels),
        "type": "Opaque",
        "stringData": {CONTROL_SECRET_KEY: key},
    }


def is_own(deployment: LLMDeployment, thing: Mapping[str, Any]) -> bool:
    """Whether it is of this very deployment, or of nobody and labelled as its own (one that was deleted without its objects)."""
    owners = owners_of(thing)
    if owners:
        return any(each.get("uid") == deployment.metadata.uid for each in owners)
    said = thing["metadata"].get("labels") or {}
    return (said.get(MANAGER_LABEL), said.get(INSTANCE_LABEL)) == (APP, deployment.name)


def secret_text(secret: Mapping[str, Any], key: str) -> str:
    """As it was written. Raises KeyError, TypeError or ValueError where it holds no text under the key."""
    return base64.b64decode(secret["data"][key]).decode()


def owners_of(thing: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(thing["metadata"].get("ownerReferences") or ())
