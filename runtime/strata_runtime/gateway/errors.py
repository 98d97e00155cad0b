"""What can go wrong in the gateway, named by what the caller should do next.

    InputError (strata_runtime.errors)
    └── StartError                  the process cannot start: fix the flag, file or port named (exit code 2)
    RuntimeFaultError (strata_runtime.errors)
    └── ApiError                    answered to the client in OpenAI's shape
        ├── InvalidRequestError     400  fix the request
        ├── UnauthorizedError       401  send a valid key
        ├── NotFoundError           404  ask for what exists
        ├── ConflictError           409  send it again
        ├── GoneError               410  send it as another request
        ├── BodyTooLargeError       413  send less
        ├── MediaTypeError          415  say that the body is JSON
        ├── ReusedKeyError          422  send it under another key
        ├── TooManyRequestsError    429  send again later
        ├── RequestFailedError      500  report it
        ├── UnavailableError        503  send again after `retry_after_seconds`
        └── DeadlineError           504  allow more time, or ask for less

Raised everywhere in this package; turned into responses by `app`, into an exit code by `__main__`.
"""

from http import HTTPStatus
from typing import Any, ClassVar

from strata_runtime.errors import InputError, RuntimeFaultError


class StartError(InputError):
    """The message says which flag, file or port, and what to do about it."""


class ApiError(RuntimeFaultError):
    """An error that a client sees. The message carries the value, the rule and the fix."""

    status: ClassVar[HTTPStatus]
    kind: ClassVar[str] = "invalid_request_error"
    retry_after_seconds: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    status = HTTPStatus.BAD_REQUEST


class UnauthorizedError(ApiError):
    status = HTTPStatus.UNAUTHORIZED


class NotFoundError(ApiError):
    status = HTTPStatus.NOT_FOUND


class ConflictError(ApiError):
    status = HTTPStatus.CONFLICT
    retry_after_seconds = 1


class GoneError(ApiError):
    status = HTTPStatus.GONE


class ReusedKeyError(ApiError):
    status = HTTPStatus.UNPROCESSABLE_ENTITY


class BodyTooLargeError(ApiError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class MediaTypeError(ApiError):
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


class TooManyRequestsError(ApiError):
    status = HTTPStatus.TOO_MANY_REQUESTS
    kind = "rate_limit_error"
    retry_after_seconds = 1


class RequestFailedError(ApiError):
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "server_error"


class UnavailableError(ApiError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "server_error"
    retry_after_seconds = 2


class DeadlineError(ApiError):
    status = HTTPStatus.GATEWAY_TIMEOUT
    kind = "server_error"
