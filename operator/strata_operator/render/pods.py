"""What slot and gateway pods share: the restricted security profile, the model's volumes, the environment.

Called by slot and gateway. The template depends on the deployment's spec and the recorded image, never on a plan.
"""

from collections.abc import Mapping
from typing import Any

from strata_operator.api import LLMDeployment
from strata_operator.render.names import CONTROL_KEY_VARIABLE, CONTROL_SECRET_KEY, process_secret, service_account
from strata_operator.render.objects import Object

USER_ID = 65532
MODELS_FOLDER = "/models"
CACHE_FOLDER = "/cache"
_SCRATCH = "strata-scratch"
_MODEL = "strata-model"
_DRAFT_MODEL = "strata-draft-model"
_CACHE = "strata-cache"

POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def pod_spec(deployment: LLMDeployment, container: Object) -> Object:
    """A pod around one container: account, security, volumes; the user's overlay is in it."""
    overlay = deployment.spec.runtime.pod
    priority = {"priorityClassName": overlay.priority_class_name} if overlay.priority_class_name else {}
    return {
        "serviceAccountName": service_account(deployment),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [*_volumes(deployment), *overlay.volumes],
        **priority,
    }


def container(
    deployment: LLMDeployment, name: str, process: str, image: str, command: list[str], environment: Mapping[str, str]
) -> Object:
    """The part of a container that does not differ between slot and gateway, but for `environment`. `process`: whose key it gets."""
    overlay = deployment.spec.runtime.pod
    return {
        "name": name,
        "image": image,
        "command": command,
        "env": _environment(deployment, process, environment),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [*_mounts(deployment), *overlay.volume_mounts],
    }


def tolerations(deployment: LLMDeployment, seconds: int | None) -> list[Object]:
    """The user's, and those of a node that is away: for `seconds`, or without limit."""
    limit: Object = {} if seconds is None else {"tolerationSeconds": seconds}
    away = [
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", **limit}
        for state in ("not-ready", "unreachable")
    ]
    own = [each.model_dump(by_alias=True, exclude_none=True) for each in deployment.spec.placement.tolerations]
    return [*own, *away]


def _environment(deployment: LLMDeployment, process: str, own: Mapping[str, str]) -> list[Object]:
    """Ours, with the user's in place of ours where a name is the same; the API refuses the control key there."""
    model = deployment.spec.model
    ours: list[Object] = [
        {"name": CONTROL_KEY_VARIABLE, "valueFrom": _secret_key(process_secret(process), CONTROL_SECRET_KEY)},
        {"name": "STRATA_LOG_FORMAT", "value": "json"},
        {"name": "HOME", "value": "/tmp"},  # noqa: S108  inside the pod, a volume of its own
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        *({"name": name, "value": value} for name, value in own.items()),
    ]
    if downloads(deployment):
        # Beside the download, what slots keep of the layers that they quantize; for other models it lies below HOME.
        ours += [{"name": name, "value": CACHE_FOLDER} for name in ("HF_HOME", "XDG_CACHE_HOME")]
    if model.token_secret_ref is not None:
        secret = model.token_secret_ref
        ours.append({"name": "HF_TOKEN", "valueFrom": _secret_key(secret.name, secret.key)})
    users = [each.model_dump(by_alias=True, exclude_none=True) for each in deployment.spec.runtime.pod.env]
    named = {each["name"]: each for each in [*ours, *users]}
    return list(named.values())


def _secret_key(name: str, key: str) -> Object:
    return {"secretKeyRef": {"name": name, "key": key}}


def _volumes(deployment: LLMDeployment) -> list[Object]:
    cache = deployment.spec.model.cache
    volumes: list[Object] = [{"name": _SCRATCH, "emptyDir": {}}]
    for name, claim in _claims(deployment).items():
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    if downloads(deployment):
        kept: Any = (
            {"emptyDir": {}}
            if cache is None
            else {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim}}
        )
        volumes.append({"name": _CACHE, **kept})
    return volumes


def _mounts(deployment: LLMDeployment) -> list[Object]:
    mounts: list[Object] = [{"name": _SCRATCH, "mountPath": "/tmp"}]  # noqa: S108  inside the pod
    for name, claim in _claims(deployment).items():
        mounts.append({"name": name, "mountPath": f"{MODELS_FOLDER}/{claim}", "readOnly": True})
    if downloads(deployment):
        mounts.append({"name": _CACHE, "mountPath": CACHE_FOLDER})
    return mounts


def _claims(deployment: LLMDeployment) -> dict[str, str]:
    """Volume -> claim, each claim once."""
    model, draft = claim_of(deployment.spec.model.uri), claim_of(draft_uri(deployment))
    found = {_MODEL: model, _DRAFT_MODEL: None if draft == model else draft}
    return {name: claim for name, claim in found.items() if claim is not None}


def draft_uri(deployment: LLMDeployment) -> str:
    """Of the small model that drafts; empty: there is none."""
    small = deployment.spec.runtime.speculation.draft_model
    return "" if small is None else small.uri


def downloads(deployment: LLMDeployment) -> bool:
    """Whether pods fetch a model from the hub."""
    return any(uri.startswith("hf://") for uri in (deployment.spec.model.uri, draft_uri(deployment)))


def claim_of(uri: str) -> str | None:
    """The claim of a `pvc://claim/path`."""
    return uri.removeprefix("pvc://").partition("/")[0] if uri.startswith("pvc://") else None
