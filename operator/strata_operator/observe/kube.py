"""The Kubernetes API in the few verbs that the operator uses, over the official client. Knows no deployment.

Server-side apply sends `application/apply-patch+yaml`: the typed client's `patch_*` sends a strategic merge even when it is
given a field manager, so that a field dropped from a manifest would stay in the object. Objects are plain dicts.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import kubernetes.client
import kubernetes.config
import msgspec
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError

from strata_operator.errors import NotReadyError

FIELD_MANAGER = "strata-operator"
APPLY = "application/apply-patch+yaml"
REQUEST_SECONDS = 30.0
THREADS = 16  # of a wire
WIRES = 3  # beside each other: the lease's, the watches' lists, the controller's
PAGE = 500  # objects in an answer to a list

Object = dict[str, Any]


class AlreadyExistsError(NotReadyError):
    """The object exists: someone else created it. Look again."""


class StaleError(NotReadyError):
    """The object is gone, or is another one of the same name. Look again."""


class RefusedError(NotReadyError):
    """The API server answers, but not this request: what it holds, an admission webhook or the account's rights forbid it."""


class ServerError(NotReadyError):
    """The API server answers that it, or what it asks, has failed: a write may have been done all the same."""


class ForbiddenError(RefusedError):
    """The account's rights do not reach so far, or an admission controller forbids it."""


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


@dataclass(frozen=True, slots=True)
class Listed:
    """Objects, and the version of the cluster that they were read at."""

    things: list[Object]
    version: int


@dataclass(frozen=True, slots=True)
class Request:
    """As it goes to the API server."""

    method: str  # GET, POST, ...
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: Object | None = None
    content_type: str = ""


class Wire(Protocol):
    """Carries requests to one API server and its answers back."""

    async def send(self, request: Request, seconds: Callable[[], float]) -> tuple[int, Any]:
        """The answer's code and body. Whatever is raised means that nobody answered: the request may have been done.

        `seconds` is asked last, right before the request goes out: so long it may take. What it raises keeps the request back.
        """
        ...

    def beside(self) -> "Wire":
        """One more to the same server, which never waits for this one."""
        ...


class HttpWire:
    """Over the official client, each request in a thread: those that hang (an admission webhook that is away takes its whole
    time-out) hold up none that go another wire.
    """

    def __init__(self, client: kubernetes.client.ApiClient) -> None:
        self._api = client
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="kube")
        self._client = DynamicClient(client, discoverer=lambda *_: None)

    def beside(self) -> "HttpWire":
        return HttpWire(self._api)

    async def send(self, request: Request, seconds: Callable[[], float]) -> tuple[int, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._send, request, seconds)

    def _send(self, request: Request, seconds: Callable[[], float]) -> tuple[int, Any]:
        more: Object = {"query_params": list(request.query)}
        more |= {"body": request.body} if request.body is not None else {}
        more |= {"content_type": request.content_type} if request.content_type else {}
        whole = max(1, int(seconds()))  # older clients take no fractions
        try:
            answer = self._client.request(request.method, request.path, serialize=False, _request_timeout=whole, **more)
        except DynamicApiError as error:
            if not error.status:  # no answer of the server's, but the client's own trouble with TLS
                raise
            return int(error.status), {"message": _why(error)}
        return int(answer.status), msgspec.json.decode(answer.data)


class Kube:
    """One API server. Raises NotReadyError where it does not answer or refuses.

    Behind a fence, every write asks it last: between a decision and its request a lease may have ended.
    """

    def __init__(self, wire: Wire, fence: Fence | None = None) -> None:
        self._wire = wire
        self._fence = fence or _NoFence()
        self.written: Callable[[Kind, Object], None] = lambda _kind, _thing: None  # told what became of each object

    def behind(self, fence: Fence) -> "Kube":
        """The same server for whoever may only write while `fence` says so; held up by no request of this one."""
        return Kube(self._wire.beside(), fence)

    async def pages(self, kind: Kind, namespace: str = "", labels: str = "") -> AsyncIterator[Listed]:
        """All objects as they were at one moment, some at a time: those of a large cluster together take a gigabyte."""
        query = [("limit", str(PAGE))] + ([("labelSelector", labels)] if labels else [])
        more = ""
        while True:
            token = [("continue", more)] if more else []
            answer = await self._call("GET", kind.path(namespace), query=tuple(query + token))
            meta = answer.get("metadata") or {}
            yield Listed(answer.get("items") or [], int(meta.get("resourceVersion") or 0))
            more = meta.get("continue") or ""
            if not more:
                return

    async def list(self, kind: Kind, namespace: str = "", labels: str = "") -> list[Object]:
        return [thing async for page in self.pages(kind, namespace, labels) for thing in page.things]

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        try:
            return await self._call("GET", kind.path(namespace, name))
        except StaleError:
            return None

    async def create(self, kind: Kind, manifest: Object) -> Object:
        """Raises AlreadyExistsError."""
        path = kind.path(manifest["metadata"].get("namespace", ""))
        return self._told(kind, await self._call("POST", path, body=manifest))

    async def replace(self, kind: Kind, manifest: Object) -> Object:
        """With the resource version it was read at. Raises AlreadyExistsError (another version) and StaleError (gone)."""
        meta = manifest["metadata"]
        path = kind.path(meta.get("namespace", ""), meta["name"])
        return self._told(kind, await self._call("PUT", path, body=manifest))

    async def apply(self, manifest: Object, subresource: str = "", *, force: bool = True) -> Object:
        """Server-side apply as the one owner of the fields in `manifest`; fields it no longer holds disappear.

        Without `force`, fields that others have set to something else are a conflict: AlreadyExistsError.
        With a resource version in its metadata only that version is changed: raises AlreadyExistsError for another one.
        """
        meta = manifest["metadata"]
        path = kind_of(manifest).path(meta.get("namespace", ""), meta["name"], subresource)
        query = (("fieldManager", FIELD_MANAGER), ("force", str(force).lower()))
        answer = await self._call("PATCH", path, query=query, body=manifest, content_type=APPLY)
        return self._told(kind_of(manifest), answer)

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str = "", grace_seconds: int | None = None
    ) -> None:
        """Gone already is as good. `uid`: only that object, not another of its name. `grace_seconds`: None: the object's own; 0: none."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            await self._call("DELETE", kind.path(namespace, name), body=options)
        except (StaleError, AlreadyExistsError):
            return

    def _told(self, kind: Kind, answer: Object) -> Object:
        self.written(kind, answer)
        return answer

    async def _call(self, method: str, path: str, **more: Any) -> Object:
        request = Request(method, path, **more)

        def seconds() -> float:
            return REQUEST_SECONDS if method == "GET" else min(REQUEST_SECONDS, self._fence.seconds_left())

        try:
            code, answer = await self._wire.send(request, seconds)
        except NotReadyError:
            raise  # the fence's
        except Exception as error:  # the client's, without importing what it is made of
            raise NotReadyError(f"{method} {path}: no answer from the API server: {error}") from error
        if code >= _REFUSALS:
            raise refusal(code, f"{method} {path}", str(answer.get("message") or "it gives no reason"))
        return dict(answer)


_REFUSALS = 400  # HTTP's codes from here on


def refusal(code: int, what: str, why: str) -> NotReadyError:
    """What an answer means for whoever asked: the one table of it."""
    if code == HTTPStatus.CONFLICT:
        return AlreadyExistsError(f"{what}: {why}")
    if code == HTTPStatus.NOT_FOUND:
        return StaleError(f"{what}: {why}")
    kind: type[NotReadyError] = RefusedError
    if code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        kind = ServerError
    elif code == HTTPStatus.FORBIDDEN:
        kind = ForbiddenError
    return kind(f"the API server answers {code} to {what}: {why}")


def connect() -> Kube:
    """Raises NotReadyError."""
    return Kube(HttpWire(kubernetes.client.ApiClient(configured())))


def configured() -> kubernetes.client.Configuration:
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
    # A connection that comes back to a full pool is closed, and the next request begins with a handshake of TLS.
    configuration.connection_pool_maxsize = WIRES * THREADS
    return configuration


def _why(error: DynamicApiError) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
