"""Names, labels, ports and addresses of a deployment's objects: one place, so that whoever looks for a pod finds it.

Called by render (which makes the objects), inventory (which recognises them) and the controllers (which reach them).
A slot's StatefulSet has the name that the plan gives the slot (strata_planner.naming). Knows no plan.
"""

from strata_operator.api import LLMDeployment
from strata_planner.contract.control import SlotAddress

CONTROL_PORT = 7070
DATA_PORT = 7071
REQUEST_PORT = 7171
MOST_ROLES = 100  # data and request ports of a slot are this many, from the first on
PAGES_PORT = 7170  # the last of the data ports: who may reach these may reach it
HTTP_PORT = 8000
JOURNAL_PORT = 7072  # of a gateway, for the other ones

NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGER_LABEL = "app.kubernetes.io/managed-by"
SLOT_LABEL = "strata.dev/slot"
EPOCH_LABEL = "strata.dev/epoch"
DEVICE_ANNOTATION = "strata.dev/device"  # on slot pods: the planner's Device that the pod holds, as JSON
TEMPLATE_ANNOTATION = "strata.dev/template"  # on slot pods: a digest of what the user and the plan ask of the pod

APP = "strata"
SLOT = "slot"
GATEWAY = "gateway"
OPERATOR = "operator"
CONTROL_KEY_VARIABLE = "STRATA_CONTROL_KEY"
CONTROL_SECRET_KEY = "key"  # noqa: S105  the field of the Secret


def labels(deployment: LLMDeployment, component: str) -> dict[str, str]:
    """What every object of a component carries and selectors choose by."""
    return {NAME_LABEL: APP, INSTANCE_LABEL: deployment.name, COMPONENT_LABEL: component, MANAGER_LABEL: APP}


def slot_labels(deployment: LLMDeployment, slot: str) -> dict[str, str]:
    return {**labels(deployment, SLOT), SLOT_LABEL: slot}


def slots_service(deployment: LLMDeployment) -> str:
    """The headless Service that gives slot pods their host names."""
    return f"{deployment.name}-slots"


def gateway_name(deployment: LLMDeployment) -> str:
    """The gateways' Deployment, and the Service that clients use."""
    return f"{deployment.name}-gateway"


def gateway_control_service(deployment: LLMDeployment) -> str:
    """The headless Service of the gateways' other ports; it resolves to each of them, before it is ready."""
    return f"{deployment.name}-gateway-control"


def control_secret(deployment: LLMDeployment) -> str:
    """The Secret whose `key` those of all control ports follow from. No pod reads it."""
    return f"{deployment.name}-control"


def process_secret(name: str) -> str:
    """The Secret whose `key` opens the control port of the slot or gateway of this name."""
    return f"{name}-key"


def epoch_name(deployment: LLMDeployment, epoch: int) -> str:
    """The ConfigMap that holds an epoch's plan, and the Secret that holds its key."""
    return f"{deployment.name}-epoch-{epoch}"


def service_account(deployment: LLMDeployment) -> str:
    return f"{deployment.name}-runtime"


def slot_address(deployment: LLMDeployment, slot: str) -> SlotAddress:
    """Where the slot that the plan calls `slot` listens, inside the cluster."""
    return SlotAddress(
        host=f"{slot}-0.{slots_service(deployment)}.{deployment.namespace}.svc",
        control_port=CONTROL_PORT,
        data_port=DATA_PORT,
        request_port=REQUEST_PORT,
        pages_port=PAGES_PORT,
    )


def gateway_url(deployment: LLMDeployment) -> str:
    """Base address of the OpenAI API inside the cluster."""
    return f"http://{gateway_name(deployment)}.{deployment.namespace}:{HTTP_PORT}"
