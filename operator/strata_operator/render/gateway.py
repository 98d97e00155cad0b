"""The gateways' Deployment, the Service that clients use, and the headless one of their other ports. Called by render."""

from strata_operator.api import LLMDeployment
from strata_operator.api.spec import GatewaySpec
from strata_operator.render.names import (
    CONTROL_PORT,
    GATEWAY,
    HTTP_PORT,
    JOURNAL_PORT,
    gateway_control_service,
    gateway_name,
    labels,
)
from strata_operator.render.objects import Object, RenderOptions, metadata
from strata_operator.render.pods import container, pod_spec, tolerations

_KEYS_VOLUME = "strata-api-keys"
_KEYS_FOLDER = "/etc/strata/api-keys"
_SECONDS_ON_A_LOST_NODE = 5


def gateway_objects(deployment: LLMDeployment, options: RenderOptions) -> list[Object]:
    return [_service(deployment), _control_service(deployment), _deployment(deployment, options)]


def _deployment(deployment: LLMDeployment, options: RenderOptions) -> Object:
    own_labels = labels(deployment, GATEWAY)
    annotations = deployment.spec.runtime.pod.annotations
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, gateway_name(deployment), own_labels),
        "spec": {
            "replicas": deployment.spec.gateway.replicas,
            "revisionHistoryLimit": 1,
            # One after the other, and none beside those that were asked for: nodes may have room for no more.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "selector": {"matchLabels": own_labels},
            "template": {
                "metadata": {"labels": own_labels, "annotations": dict(annotations)},
                "spec": _pod(deployment, options),
            },
        },
    }


def _pod(deployment: LLMDeployment, options: RenderOptions) -> Object:
    asked = deployment.spec.gateway
    keys = asked.api_keys_secret_ref
    command = [
        *("python", "-m", "strata_runtime.gateway"),
        *("--host", "0.0.0.0", "--port", str(HTTP_PORT)),  # noqa: S104  the pod's own address
        *("--control-host", "0.0.0.0", "--control-port", str(CONTROL_PORT)),  # noqa: S104  likewise
        *("--model-uri", options.model_uri or deployment.spec.model.uri, "--served-model-name", deployment.name),
        *(() if keys is None else ("--api-keys-file", f"{_KEYS_FOLDER}/{keys.key}")),
        *page_flags(asked),
        *_twin_flags(deployment),
    ]
    made = container(deployment, GATEWAY, gateway_name(deployment), options.image, command, environment={})
    made |= {
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"},
            *([{"name": "journal", "containerPort": JOURNAL_PORT, "protocol": "TCP"}] if asked.replicas > 1 else []),
        ],
        "resources": asked.resources.model_dump(by_alias=True),
        "startupProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 2, "failureThreshold": 150},
        # Ready as soon as it serves HTTP, pipeline or not: requests that come during a change of epoch are held.
        "readinessProbe": {"httpGet": {"path": "/metrics", "port": "http"}, "periodSeconds": 2, "timeoutSeconds": 5},
        "livenessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 10, "failureThreshold": 6},
    }
    pod = pod_spec(deployment, made) | {"tolerations": tolerations(deployment, seconds=_SECONDS_ON_A_LOST_NODE)}
    if asked.replicas > 1:
        pod["topologySpreadConstraints"] = [_apart(deployment)]
    if keys is not None:
        secret = {"secretName": keys.name, "items": [{"key": keys.key, "path": keys.key}]}
        pod["volumes"].append({"name": _KEYS_VOLUME, "secret": secret})
        made["volumeMounts"].append({"name": _KEYS_VOLUME, "mountPath": _KEYS_FOLDER, "readOnly": True})
    return pod


def _twin_flags(deployment: LLMDeployment) -> list[str]:
    """Gateways find each other by the name of all of them, whoever of the operator and its API server is away."""
    if deployment.spec.gateway.replicas == 1:
        return []
    host = f"{gateway_control_service(deployment)}.{deployment.namespace}.svc"
    return ["--journal-port", str(JOURNAL_PORT), "--peers", f"{host}:{JOURNAL_PORT}"]


def _apart(deployment: LLMDeployment) -> Object:
    """On one node only where there is no other: its loss would be that of all gateways."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels(deployment, GATEWAY)},
    }


def page_flags(asked: GatewaySpec) -> list[str]:
    """What a gateway's process is told of web pages; `strata up` tells its own the same."""
    origins = ["--allowed-origins", ",".join(asked.allowed_origins)] if asked.allowed_origins else []
    return origins + ["--docs"] * asked.docs


def _service(deployment: LLMDeployment) -> Object:
    own_labels = labels(deployment, GATEWAY)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, gateway_name(deployment), own_labels),
        "spec": {
            "type": deployment.spec.gateway.service.type,
            "selector": own_labels,
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _control_service(deployment: LLMDeployment) -> Object:
    own_labels = labels(deployment, GATEWAY)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, gateway_control_service(deployment), own_labels),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": own_labels,
            "ports": [
                {"name": "control", "port": CONTROL_PORT, "targetPort": "control", "protocol": "TCP"},
                {"name": "journal", "port": JOURNAL_PORT, "targetPort": JOURNAL_PORT, "protocol": "TCP"},
            ],
        },
    }
