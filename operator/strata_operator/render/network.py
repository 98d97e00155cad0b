"""Who may reach whom: the slots' headless Service, two NetworkPolicies, the disruption budgets. Called by render.

Roles change, so slots may reach each other whatever the plan says: the policy is per deployment, not per neighbour. The
connections are those of docs/structure.md; a test holds the two together.
"""

from strata_operator.api import LLMDeployment
from strata_operator.render.names import (
    APP,
    COMPONENT_LABEL,
    CONTROL_PORT,
    DATA_PORT,
    GATEWAY,
    HTTP_PORT,
    INSTANCE_LABEL,
    JOURNAL_PORT,
    MOST_ROLES,
    NAME_LABEL,
    OPERATOR,
    REQUEST_PORT,
    SLOT,
    gateway_name,
    labels,
    slots_service,
)
from strata_operator.render.objects import Object, RenderOptions, metadata
from strata_operator.render.pods import downloads

_DNS: Object = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
_HUB: Object = {"ports": [{"protocol": "TCP", "port": 443}]}


def network_objects(deployment: LLMDeployment, options: RenderOptions) -> list[Object]:
    return [
        _headless_service(deployment),
        _slot_policy(deployment, options),
        _gateway_policy(deployment, options),
        _disruption_budget(deployment, SLOT, slots_service(deployment), most=1 if options.lets_go else 0),
        _disruption_budget(deployment, GATEWAY, gateway_name(deployment), most=1),
    ]


def _headless_service(deployment: LLMDeployment) -> Object:
    """Slots are reached before they are ready: being ready is what their control port tells."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, slots_service(deployment), labels(deployment, SLOT)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _selector(deployment, SLOT),
            "ports": [{"name": "control", "port": CONTROL_PORT, "targetPort": "control", "protocol": "TCP"}],
        },
    }


def _slot_policy(deployment: LLMDeployment, options: RenderOptions) -> Object:
    slots, gateway = _pods(_selector(deployment, SLOT)), _pods(_selector(deployment, GATEWAY))
    return _policy(
        deployment,
        SLOT,
        ingress=[
            {"from": [slots], "ports": [_range(DATA_PORT)]},
            {"from": [gateway], "ports": [_range(REQUEST_PORT)]},
            {
                "from": [_operator(options), *([gateway] if _has_orders(deployment) else [])],
                "ports": [_port(CONTROL_PORT)],
            },
        ],
        egress=[{"to": [slots], "ports": [_range(DATA_PORT)]}, *_common_egress(deployment)],
    )


def _gateway_policy(deployment: LLMDeployment, options: RenderOptions) -> Object:
    slots, gateways = _pods(_selector(deployment, SLOT)), _pods(_selector(deployment, GATEWAY))
    journals: Object = {"ports": [_port(JOURNAL_PORT)]}
    return _policy(
        deployment,
        GATEWAY,
        ingress=[
            {"ports": [_port(HTTP_PORT)]},  # clients and the metrics scraper, from anywhere that reaches the Service
            {"from": [_operator(options)], "ports": [_port(CONTROL_PORT)]},
            {"from": [gateways], **journals},
        ],
        egress=[
            {
                "to": [slots],
                "ports": [_range(REQUEST_PORT), *([_port(CONTROL_PORT)] if _has_orders(deployment) else [])],
            },
            {"to": [gateways], **journals},
            *_common_egress(deployment),
        ],
    )


def _policy(deployment: LLMDeployment, component: str, ingress: list[Object], egress: list[Object]) -> Object:
    """Naming both types makes everything that is not listed forbidden."""
    name = gateway_name(deployment) if component == GATEWAY else slots_service(deployment)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(deployment, name, labels(deployment, component)),
        "spec": {
            "podSelector": {"matchLabels": _selector(deployment, component)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _has_orders(deployment: LLMDeployment) -> bool:
    """Gateways then open slots' control ports, with a key that is good for standing orders alone."""
    return deployment.spec.replanning.takeover.wants_orders


def _common_egress(deployment: LLMDeployment) -> list[Object]:
    """Names, and the models' source; claims are mounted by the node and need no connection of the pod."""
    return [_DNS, _HUB] if downloads(deployment) else [_DNS]


def _disruption_budget(deployment: LLMDeployment, component: str, name: str, most: int) -> Object:
    """A drain waits for the plan that does without the node's slots, which then end by themselves, and takes gateways one by one; those that are not
    healthy never stand in its way.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(deployment, name, labels(deployment, component)),
        "spec": {
            "maxUnavailable": most,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": _selector(deployment, component)},
        },
    }


def _selector(deployment: LLMDeployment, component: str) -> dict[str, str]:
    return {NAME_LABEL: APP, INSTANCE_LABEL: deployment.name, COMPONENT_LABEL: component}


def _pods(selector: dict[str, str]) -> Object:
    return {"podSelector": {"matchLabels": selector}}


def _operator(options: RenderOptions) -> Object:
    """The operator's pods, as the chart labels them, in the operator's namespace."""
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.operator_namespace}},
        "podSelector": {"matchLabels": {NAME_LABEL: APP, COMPONENT_LABEL: OPERATOR}},
    }


def _port(number: int) -> Object:
    return {"protocol": "TCP", "port": number}


def _range(first: int) -> Object:
    return {"protocol": "TCP", "port": first, "endPort": first + MOST_ROLES - 1}
