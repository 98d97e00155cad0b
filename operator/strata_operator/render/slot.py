"""A slot as a StatefulSet of one pod, bound to its node and holding its devices. Called by render."""

import hashlib
import json

from strata_operator.api import LLMDeployment
from strata_operator.render.names import (
    CONTROL_PORT,
    DATA_PORT,
    DEVICE_ANNOTATION,
    REQUEST_PORT,
    SLOT,
    TEMPLATE_ANNOTATION,
    slot_labels,
    slots_service,
)
from strata_operator.render.objects import Object, RenderOptions, metadata
from strata_operator.render.pods import claim_of, container, downloads, draft_uri, pod_spec, tolerations
from strata_operator.render.requests import MEMORY, parse_quantity
from strata_operator.render.slots import Slot, device_requests, encode_asked, encode_device
from strata_planner.contract.control import STEP_TIMEOUT_SECONDS
from strata_planner.contract.environment import SLOT_ENVIRONMENT

# What a slot on GPUs asks of its host; `runtime.pod.resources` replaces it.
_HOST_REQUESTS = {"cpu": "1", "memory": "2Gi"}
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  inside the pod


def slot_statefulset(deployment: LLMDeployment, slot: Slot, options: RenderOptions) -> Object:
    """Its template changes only with the slot's identity, the spec and the recorded image, and then restarts nothing:
    `OnDelete` leaves the moment to the controller.
    """
    own_labels = slot_labels(deployment, slot.name)
    annotations = {
        **deployment.spec.runtime.pod.annotations,
        DEVICE_ANNOTATION: encode_device(slot.device),
        TEMPLATE_ANNOTATION: _template(deployment, slot, options),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(deployment, slot.name, own_labels),
        "spec": {
            "serviceName": slots_service(deployment),
            "replicas": 1,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": own_labels},
            "template": {
                "metadata": {"labels": own_labels, "annotations": annotations},
                "spec": _pod(deployment, slot, options),
            },
        },
    }


def _template(deployment: LLMDeployment, slot: Slot, options: RenderOptions) -> str:
    """A digest of what is asked of the pod, by the user and by the plan. How this release writes it down is left out: an upgrade
    of the operator ends no slot.
    """
    model = deployment.spec.model
    asked = {
        "image": options.image,
        "device": encode_asked(slot.device),
        "pod": deployment.spec.runtime.pod.model_dump(mode="json", exclude_defaults=True),
        "tolerations": [each.model_dump(exclude_defaults=True) for each in deployment.spec.placement.tolerations],
        "token": model.token_secret_ref and model.token_secret_ref.model_dump(),
        "cache": model.cache and model.cache.model_dump(),
        "downloads": downloads(deployment),
        "claim": claim_of(model.uri),
    }
    if own := _step_timeout(deployment):
        asked["stepTimeout"] = own
    if (claim := claim_of(draft_uri(deployment))) is not None:
        asked["draftClaim"] = claim
    if (shadow := deployment.spec.replanning.takeover.shadow) is not None and not slot.is_cpu:
        asked["shadow"] = shadow.max_memory
    if (log := deployment.spec.runtime.boundary_log) is not None and not slot.is_cpu:
        asked["boundaryLog"] = log.max_memory
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _pod(deployment: LLMDeployment, slot: Slot, options: RenderOptions) -> Object:
    command = [
        *("python", "-m", "strata_runtime.pipeline.slot"),
        *("--name", slot.name, "--host", "0.0.0.0"),  # noqa: S104  the pod's own address, behind the NetworkPolicy
        *("--control-port", str(CONTROL_PORT), "--threads", str(slot.device.threads)),
        *(("--ranks", str(slot.device.count)) if slot.device.count > 1 else ()),
    ]
    listening = {"tcpSocket": {"port": "control"}}
    made = {
        **container(
            deployment, SLOT, slot.name, options.image, command, {**SLOT_ENVIRONMENT, **_step_timeout(deployment)}
        ),
        "ports": [
            {"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"},
            {"name": "data", "containerPort": DATA_PORT, "protocol": "TCP"},
            {"name": "requests", "containerPort": REQUEST_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(deployment, slot),
        # Importing torch from a cold disk takes a while; from then on the port answers whatever the slot computes.
        "startupProbe": {**listening, "periodSeconds": 2, "failureThreshold": 150},
        "readinessProbe": {**listening, "periodSeconds": 5},
        "livenessProbe": {**listening, "periodSeconds": 10, "failureThreshold": 6},
    }
    pod = pod_spec(deployment, made)
    if slot.device.count > 1 and not slot.is_cpu:
        _give_shared_memory(pod)
    return {
        **pod,
        "affinity": {"nodeAffinity": _only_on(slot.node)},
        "tolerations": tolerations(deployment, seconds=None),
        "terminationGracePeriodSeconds": 10,
    }


def _give_shared_memory(pod: Object) -> None:
    """Ranks on GPUs that cannot read each other's memory meet there, and a runtime's own 64 MB are too few for NCCL; what is used counts as the pod's."""
    (made,) = pod["containers"]
    if all(each.get("mountPath") != _SHARED_MEMORY for each in made["volumeMounts"]):
        pod["volumes"].append({"name": "strata-shared-memory", "emptyDir": {"medium": "Memory"}})
        made["volumeMounts"].append({"name": "strata-shared-memory", "mountPath": _SHARED_MEMORY})


def _step_timeout(deployment: LLMDeployment) -> dict[str, str]:
    """In the environment: a release that does not know it takes no notice. Nothing at its default, as pods of earlier releases have it."""
    seconds = deployment.spec.runtime.step_timeout_seconds
    return {} if seconds == STEP_TIMEOUT_SECONDS else {"STRATA_STEP_TIMEOUT_SECONDS": str(seconds)}


def _resources(deployment: LLMDeployment, slot: Slot) -> Object:
    """Devices are the plan's and win; the rest is the user's, or a default for the host side of GPUs."""
    overlay = deployment.spec.runtime.pod.resources
    devices = device_requests(slot.device)
    if slot.is_cpu:
        limits = {**overlay.limits, MEMORY: devices[MEMORY]}
        return {"requests": {**overlay.requests, **devices}, "limits": limits}
    return {
        "requests": {**_host_requests(deployment), **overlay.requests, **devices},
        "limits": {**overlay.limits, **devices},
    }


def _host_requests(deployment: LLMDeployment) -> Object:
    """With the memory that shadows and what is handed on may take beside the rest."""
    wished = deployment.spec.replanning.takeover.shadow, deployment.spec.runtime.boundary_log
    more = [parse_quantity(wish.max_memory) for wish in wished if wish is not None]
    return (
        {**_HOST_REQUESTS, MEMORY: str(int(sum(more, parse_quantity(_HOST_REQUESTS[MEMORY]))))}
        if more
        else _HOST_REQUESTS
    )


def _only_on(node: str) -> Object:
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
