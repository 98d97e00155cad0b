"""The Kubernetes API in the few verbs that the operator uses, over the official client. Knows no deployment.

Server-side apply sends `application/apply-patch+yaml`: the typed client's `patch_*` sends a strategic merge even when it is
given a field manager, so that a field dropped from a manifest would stay in the object. Objects are plain dicts.
"""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import kubernetes.client
import kubernetes.config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ConflictError, DynamicApiError, NotFoundError

from strata_operator.errors import NotReadyError

FIELD_MANAGER = "strata-operator"
APPLY = "application/apply-patch+yaml"
REQUEST_SECONDS = 30.0
THREADS = 16

Object = dict[str, Any]


class AlreadyExistsError(NotReadyError):
    """The object exists: someone else created it. Look again."""


class StaleError(NotReadyError):
    """The object is gone, or is another one of the same name. Look again."""


class RefusedError(NotReadyError):
    """The API server answers, but not this request: what it holds, an admission webhook or the account's rights forbid it."""


class Fence(Protocol):
    """Says, right before every write, whether it may still be made."""

    def seconds_left(self) -> float:
        """So long the write may take. Raises NotReadyError where nothing may be written any more."""
        ...


class _NoFence:
    def seconds_left(self) -> float:
        return REQUEST_SECONDS


@dataclass(frozen=True, slots=True)
class Kind:
    """Where objects of a kind are found."""

    group_version: str  # "v1", "apps/v1"
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        root = "api" if "/" not in self.group_version else "apis"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        parts = [f"/{root}/{self.group_version}{place}/{self.plural}", name, subresource]
        return "/".join(part for part in parts if part)


NODES = Kind("v1", "nodes", namespaced=False)
PODS = Kind("v1", "pods")
EVENTS = Kind("events.k8s.io/v1", "events")
CONFIG_MAPS = Kind("v1", "configmaps")
SECRETS = Kind("v1", "secrets")
CLAIMS = Kind("v1", "persistentvolumeclaims")
STATEFUL_SETS = Kind("apps/v1", "statefulsets")
LEASES = Kind("coordination.k8s.io/v1", "leases")
DEPLOYMENTS_OF_STRATA = Kind("strata.dev/v1alpha1", "llmdeployments")

_RENDERED = {
    "ConfigMap": CONFIG_MAPS,
    "Secret": SECRETS,
    "StatefulSet": STATEFUL_SETS,
    "LLMDeployment": DEPLOYMENTS_OF_STRATA,
    "Service": Kind("v1", "services"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "Deployment": Kind("apps/v1", "deployments"),
    "NetworkPolicy": Kind("networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
}


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    return _RENDERED[manifest["kind"]]


class Kube:
    """One API server. Every call runs in a thread; raises NotReadyError where the server does not answer or refuses.

    Behind a fence, every write asks it last: between a decision and its request a lease may have ended. Each has threads of its
    own, so that requests that hang (an admission webhook that is away takes its whole time-out) hold up nobody else's.
    """

    def __init__(self, client: kubernetes.client.ApiClient, fence: Fence | None = None) -> None:
        self._api = client
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="kube")
        self._client = DynamicClient(client, discoverer=lambda *_: None)
        self._fence = fence or _NoFence()

    def behind(self, fence: Fence) -> "Kube":
        """The same server for whoever may only write while `fence` says so."""
        return Kube(self._api, fence)

    async def list(self, kind: Kind, namespace: str = "", labels: str = "") -> list[Object]:
        answer = await self._call("get", kind.path(namespace), **({"label_selector": labels} if labels else {}))
        return list(answer.get("items") or ())

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        try:
            return await self._call("get", kind.path(namespace, name))
        except StaleError:
            return None

    async def create(self, kind: Kind, manifest: Object) -> Object:
        """Raises AlreadyExistsError."""
        return await self._call("post", kind.path(manifest["metadata"].get("namespace", "")), body=manifest)

    async def replace(self, kind: Kind, manifest: Object) -> Object:
        """With the resource version it was read at. Raises AlreadyExistsError (another version) and StaleError (gone)."""
        meta = manifest["metadata"]
        return await self._call("put", kind.path(meta.get("namespace", ""), meta["name"]), body=manifest)

    async def apply(self, manifest: Object, subresource: str = "", *, force: bool = True) -> Object:
        """Server-side apply as the one owner of the fields in `manifest`; fields it no longer holds disappear.

        Without `force`, fields that others have set to something else are a conflict: AlreadyExistsError.
        With a resource version in its metadata only that version is changed: raises AlreadyExistsError for another one.
        """
        meta = manifest["metadata"]
        path = kind_of(manifest).path(meta.get("namespace", ""), meta["name"], subresource)
        query = [("fieldManager", FIELD_MANAGER), ("force", str(force).lower())]
        return await self._call("patch", path, body=manifest, content_type=APPLY, query_params=query)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str = "", force: bool = False) -> None:
        """Gone already is as good. `uid`: only that object, not another of its name. `force`: without a grace period."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if force:
            options["gracePeriodSeconds"] = 0
        try:
            await self._call("delete", kind.path(namespace, name), body=options)
        except (StaleError, AlreadyExistsError):
            return

    async def _call(self, method: str, path: str, **more: Any) -> Object:
        def call() -> Object:
            seconds = REQUEST_SECONDS if method == "get" else min(REQUEST_SECONDS, self._fence.seconds_left())
            answer = self._client.request(
                method, path, serialize=False, _request_timeout=max(1, int(seconds)), **more
            )  # whole seconds: older clients take no others
            return dict(json.loads(answer.data))

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except NotReadyError:
            raise  # the fence's
        except ConflictError as error:
            raise AlreadyExistsError(f"{method} {path}: {_why(error)}") from error
        except NotFoundError as error:
            raise StaleError(f"{method} {path}: {_why(error)}") from error
        except DynamicApiError as error:
            raise RefusedError(f"the API server answers {error.status} to {method} {path}: {_why(error)}") from error
        except Exception as error:  # urllib3's, without importing it
            raise NotReadyError(f"{method} {path}: no answer from the API server: {error}") from error


def connect() -> Kube:
    """With the pod's service account, else with the current context of the kubeconfig. Raises NotReadyError."""
    try:
        kubernetes.config.load_incluster_config()
    except kubernetes.config.ConfigException:
        try:
            kubernetes.config.load_kube_config()
        except (kubernetes.config.ConfigException, OSError) as error:
            raise NotReadyError(f"no Kubernetes to connect to: {error}; set KUBECONFIG or run in a pod") from error
    configuration = kubernetes.client.Configuration.get_default_copy()
    configuration.retries = (
        False  # a write that is sent again by itself would pass the fence: whoever wants it looks again
    )
    return Kube(kubernetes.client.ApiClient(configuration))


def _why(error: DynamicApiError) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
