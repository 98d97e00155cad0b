"""An API server in a few lines: keeps objects by path, remembers requests, answers what the operator's verbs need.

It knows conflicts of creation and of resource versions, uid preconditions, label selectors and how much an object may hold; it
merges nothing: an apply replaces the object's content, as the real one does for a sole owner of all fields.
"""

import base64
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from strata_operator.render.records import stamp

Object = dict[str, Any]

MOST_BYTES = 1 << 20  # of what a ConfigMap or a Secret holds


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    content_type: str
    body: Any


class FakeApi:
    """`objects`: path -> object. `requests`: everything that was asked, in order."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.requests: list[Request] = []
        self.refuse: Callable[[Request], tuple[int, str] | None] = lambda _: None  # an answer instead of what is asked
        self._versions = itertools.count(1)
        self._newest = 0
        self.now: Callable[[], datetime] = lambda: datetime.now(UTC)
        self._lock = threading.Lock()
        self.url = ""

    def put(self, path: str, thing: Object) -> None:
        """As if it had been there before."""
        self.objects[path] = self._kept(thing)

    def wrote(self, method: str, part: str) -> list[Request]:
        return [request for request in self.requests if request.method == method and part in request.path]

    def answer(self, request: Request) -> tuple[int, Object]:
        self.requests.append(request)
        refused = self.refuse(request)
        if refused is not None:
            return refused[0], _refusal(*refused)
        if _held_bytes(request.body) > MOST_BYTES:
            return 422, _refusal(422, f"data: Too long: must have at most {MOST_BYTES} bytes")
        with self._lock:
            handle = {
                "GET": self._get,
                "POST": self._create,
                "PUT": self._replace,
                "PATCH": self._apply,
                "DELETE": self._delete,
            }[request.method]
            return handle(request)

    def _get(self, request: Request) -> tuple[int, Object]:
        if request.path in self.objects:
            return 200, self.objects[request.path]
        parts = request.path.split("/")
        if "namespaces" in parts and len(parts) == (7 if parts[1] == "api" else 8):
            return 404, _refusal(404, "not found")
        wanted = dict(
            term.split("=") if "=" in term else (term, None)
            for term in request.query.get("labelSelector", [""])[0].split(",")
            if term
        )
        found = [
            thing for path, thing in self.objects.items() if _is_in(path, request.path) and _has_labels(thing, wanted)
        ]
        first = int(request.query.get("continue", ["0"])[0])
        end = first + int(request.query.get("limit", [str(len(found))])[0])
        meta = {"resourceVersion": str(self._newest), "continue": str(end) if end < len(found) else ""}
        return 200, {"kind": "List", "metadata": meta, "items": found[first:end]}

    def _create(self, request: Request) -> tuple[int, Object]:
        path = f"{request.path}/{request.body['metadata']['name']}"
        if path in self.objects:
            return 409, _refusal(409, "already exists")
        self.objects[path] = self._kept(request.body)
        return 201, self.objects[path]

    def _replace(self, request: Request) -> tuple[int, Object]:
        there = self.objects.get(request.path)
        if there is None:
            return 404, _refusal(404, "not found")
        if request.body["metadata"].get("resourceVersion") != there["metadata"]["resourceVersion"]:
            return 409, _refusal(409, "the object has been modified")
        self.objects[request.path] = self._kept(request.body)
        return 200, self.objects[request.path]

    def _apply(self, request: Request) -> tuple[int, Object]:
        path = request.path.removesuffix("/status")
        there = self.objects.get(path, {})
        version = request.body["metadata"].get("resourceVersion")
        if version and version != there.get("metadata", {}).get("resourceVersion"):
            return 409, _refusal(409, "the object has been modified")
        if path != request.path:
            thing = {**(there or request.body), "status": request.body["status"]}
        else:
            thing = {
                **_status(there),
                **request.body,
                "metadata": {**there.get("metadata", {}), **request.body["metadata"]},
            }
        self.objects[path] = self._kept(thing)
        return 200, self.objects[path]

    def _delete(self, request: Request) -> tuple[int, Object]:
        there = self.objects.get(request.path)
        uid = ((request.body or {}).get("preconditions") or {}).get("uid")
        if there is None:
            return 404, _refusal(404, "not found")
        if uid and there["metadata"]["uid"] != uid:
            return 409, _refusal(409, "the uid in the precondition does not match")
        return 200, self.objects.pop(request.path)

    def _kept(self, thing: Object) -> Object:
        number = self._newest = next(self._versions)
        own = {"uid": f"uid-{number}", "creationTimestamp": stamp(self.now()), **thing["metadata"]}
        return {**_with_encoded_data(thing), "metadata": {**own, "resourceVersion": str(number)}}


@contextmanager
def serving(api: FakeApi) -> Iterator[FakeApi]:
    """Listens on a port of its own, whose address is its `url` from now on."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = (
            True  # as the real one: else the body waits 40 ms for the acknowledgement of the headers
        )

        def _handle(self) -> None:
            place = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(
                self.command,
                place.path,
                parse_qs(place.query),
                self.headers.get("Content-Type", ""),
                json.loads(body) if body else None,
            )
            code, answer = api.answer(request)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle  # noqa: N815  names that http.server asks for

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        api.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _is_in(path: str, collection: str) -> bool:
    """`/api/v1/namespaces/ns/pods/x` is in `/api/v1/pods` and in `/api/v1/namespaces/ns/pods`."""
    folder, _, _ = path.rpartition("/")
    group, _, plural = collection.rpartition("/")
    return folder == collection or (
        "namespaces" not in collection and folder.startswith(f"{group}/") and folder.endswith(f"/{plural}")
    )


def _status(thing: Object) -> Object:
    return {"status": thing["status"]} if "status" in thing else {}


def _has_labels(thing: Object, wanted: dict[str, str | None]) -> bool:
    labels = thing["metadata"].get("labels") or {}
    return all(name in labels and value in {None, labels[name]} for name, value in wanted.items())


def _with_encoded_data(thing: Object) -> Object:
    """Secrets are written as text and read as base64."""
    if "stringData" not in thing:
        return thing
    data = {name: base64.b64encode(text.encode()).decode() for name, text in thing["stringData"].items()}
    return {**{name: part for name, part in thing.items() if name != "stringData"}, "data": data}


def _held_bytes(thing: Object | None) -> int:
    """ConfigMaps and Secrets alone have such fields."""
    texts = [text for field in ("data", "stringData") for text in ((thing or {}).get(field) or {}).values()]
    return sum(len(text.encode()) for text in texts)


def _refusal(code: int, message: str) -> Object:
    return {"kind": "Status", "code": code, "message": message}
