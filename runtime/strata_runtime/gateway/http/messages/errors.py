"""Errors in the shape of the Messages interface. Used by `app` for its paths, and in the midst of a stream. Pure."""

from http import HTTPStatus
from typing import Any

PATH = "/v1/messages"
_KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def is_messages(path: str) -> bool:
    """Whether this is one of the interface's paths."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_body(status: int, message: str) -> dict[str, Any]:
    """The kinds are named by their statuses; all others are errors of the request."""
    kind = _KINDS.get(HTTPStatus(status), "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
