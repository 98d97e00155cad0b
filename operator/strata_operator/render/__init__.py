"""A deployment's plan as Kubernetes objects: plain dicts, made by pure functions, applied by someone else.

| module  | what it makes                                                                  |
|---------|--------------------------------------------------------------------------------|
| objects | metadata, owner references, labels                                             |
| pods    | what slot and gateway pods share: security, volumes, environment               |
| slot    | a StatefulSet per slot                                                         |
| gateway | the gateways' Deployment and Services                                          |
| network | the headless Service of the slots, NetworkPolicies, the disruption budgets     |
| epoch   | the immutable ConfigMap and Secret of one epoch                                |

Roles never show in a pod template: they come by `prepare`, so that a new plan on the same devices changes no pod. Objects
are owned by the LLMDeployment and carry no finalizers: deleting it takes them along, also when no operator runs.
"""

from typing import Any

from strata_operator.api import LLMDeployment
from strata_operator.render.epoch import epoch_objects, read_epoch
from strata_operator.render.gateway import gateway_objects
from strata_operator.render.names import gateway_url, slot_address
from strata_operator.render.network import network_objects
from strata_operator.render.objects import (
    RenderOptions,
    control_secret_object,
    gateway_secret_object,
    image_for,
    service_account_object,
    slot_secret_object,
)
from strata_operator.render.slot import slot_statefulset
from strata_operator.render.slots import Slot

__all__ = ["RenderOptions", "epoch_objects", "gateway_url", "image_for", "read_epoch", "render", "slot_address"]


def render(deployment: LLMDeployment, slots: tuple[Slot, ...], options: RenderOptions) -> list[dict[str, Any]]:
    """Every object that serves a plan with these slots (`slots_of`), in the order to apply them; epochs are apart.

    Two plans with the same slots give the same objects.
    """
    return [
        service_account_object(deployment),
        control_secret_object(deployment, options.control_key),
        *(slot_secret_object(deployment, slot.name, options.control_key) for slot in slots),
        gateway_secret_object(deployment, options.control_key),
        *network_objects(deployment, options),
        *(slot_statefulset(deployment, slot, options) for slot in slots),
        *gateway_objects(deployment, options),
    ]
