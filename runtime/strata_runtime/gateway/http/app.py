"""The HTTP routes of the gateway. Thin: bodies are read by `bodies` and `prompts`, answers written by `answers`.

Made by `__main__` and by tests; every error leaves in OpenAI's shape.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from strata_runtime.gateway.errors import ApiError, BodyTooLargeError, MediaTypeError, NotFoundError
from strata_runtime.gateway.http.answers import Answer
from strata_runtime.gateway.http.api_keys import ApiKeys
from strata_runtime.gateway.http.bodies import parse_body
from strata_runtime.gateway.http.held_bytes import HeldBytes
from strata_runtime.gateway.http.parameters import ChatBody, CompletionBody
from strata_runtime.gateway.http.prompts import Bounds, Prepared, prepare_chat, prepare_completion
from strata_runtime.gateway.http.shapes import ChatShape, CompletionShape, Envelope, Json, Shape
from strata_runtime.gateway.metrics import Metrics
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.tokenizer import Tokenizer

T = TypeVar("T")
Read = Callable[[bytes, Bounds], tuple[Prepared, Shape]]

READERS = 4
MOST_SHOWN = 80  # characters of what a client wrote that an error repeats


class ClientGoneError(Exception):
    """The client has closed its connection: there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the routes need."""

    model_name: str
    tokenizer: Tokenizer
    dispatcher: Dispatcher
    metrics: Metrics
    api_keys: ApiKeys
    limits: Limits


class EventStream(StreamingResponse):
    """Server-sent events that end their source when the client goes away, not when the garbage collector comes."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


def create_app(gateway: Gateway) -> FastAPI:
    """The ASGI application. The dispatcher lives on the event loop that serves it."""
    app = FastAPI(title="Strata gateway", openapi_url=None)
    _handle_errors(app)
    _add_status_routes(app, gateway)
    _add_model_routes(app, gateway)
    _add_generation_routes(app, gateway)
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        retry = error.retry_after_seconds
        headers = None if retry is None else {"Retry-After": str(retry)}
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = (
            f"{request.method[:MOST_SHOWN]} {request.url.path[:MOST_SHOWN]}: {error.detail.lower()}; "
            "see docs/openai-api.md for what is served"
        )
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody reads it; nginx's number for access logs


def _add_status_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    async def health() -> Response:
        load = gateway.dispatcher.load()
        if load.leaders_connected:
            leaders = {"leaders_connected": load.leaders_connected, "leaders_missing": load.leaders_missing}
            return JSONResponse({"status": "ok", "epoch": load.epoch, **leaders})
        reason = "no controller has set a route yet" if load.epoch == 0 else f"no leader answers in epoch {load.epoch}"
        return JSONResponse({"status": "unavailable", "reason": reason}, HTTPStatus.SERVICE_UNAVAILABLE)

    @app.get("/metrics")
    async def metrics() -> Response:
        page = gateway.metrics.render(gateway.dispatcher.load())
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    created = int(time.time())

    def describe() -> Json:
        limit = gateway.dispatcher.max_tokens() or None  # unknown without a route
        model = {"id": gateway.model_name, "object": "model", "created": created, "owned_by": "strata"}
        return {**model, "max_model_len": limit}

    @app.get("/v1/models")
    async def models(request: Request) -> Json:
        gateway.api_keys.check(request.headers.get("authorization"))
        return {"object": "list", "data": [describe()]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Json:
        gateway.api_keys.check(request.headers.get("authorization"))
        _check_model(gateway, name)
        return describe()


def _add_generation_routes(app: FastAPI, gateway: Gateway) -> None:
    # Reading a body and tokenizing it may take a while: few threads, so that many large bodies wait instead of adding up.
    readers = ThreadPoolExecutor(READERS, "gateway reader")
    held = HeldBytes()

    def read_completion(data: bytes, bounds: Bounds) -> tuple[Prepared, Shape]:
        body = parse_body(data, CompletionBody)
        _check_model(gateway, body.model)
        prepared = prepare_completion(body, gateway.tokenizer, bounds)
        return prepared, CompletionShape(prepared, gateway.tokenizer, logprobs=body.logprobs is not None)

    def read_chat(data: bytes, bounds: Bounds) -> tuple[Prepared, Shape]:
        body = parse_body(data, ChatBody)
        _check_model(gateway, body.model)
        return prepare_chat(body, gateway.tokenizer, bounds), ChatShape(gateway.tokenizer, logprobs=body.logprobs)

    async def take(request: Request, read: Read) -> tuple[Prepared, Shape]:
        with held.share(gateway.limits.held_body_bytes(gateway.dispatcher.max_tokens())) as hold:
            data = await _body(request, gateway, hold)
            bounds = Bounds(_limit(gateway), gateway.limits.max_requests)
            return await asyncio.get_running_loop().run_in_executor(readers, read, data, bounds)

    async def answer(request: Request, read: Read) -> Response:
        prepared, shape = await take(request, read)
        return await _respond(request, gateway, prepared, shape)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, read_completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, read_chat)


async def _body(request: Request, gateway: Gateway, hold: Callable[[int], None]) -> bytes:
    """Key, then kind, then size; what says that it is too large is not read at all."""
    gateway.api_keys.check(request.headers.get("authorization"))
    _check_media_type(request.headers.get("content-type", ""))
    limit = gateway.limits.body_bytes(gateway.dispatcher.max_tokens())
    announced = request.headers.get("content-length", "0")  # digits, h11 sees to that
    fits = len(announced) < 16 and int(announced) <= limit
    data = await _read(request, limit, hold) if fits else None
    if data is not None:
        return data
    raise BodyTooLargeError(
        f"the body has more than {limit} bytes, the most this server reads (--max-body-bytes): send less"
    )


async def _read(request: Request, limit: int, hold: Callable[[int], None]) -> bytes | None:
    """The body; None as soon as it is longer than `limit`. Each chunk is told to `hold` before it is kept."""
    data = bytearray()
    try:
        async with aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                if len(data) + len(chunk) > limit:
                    return None
                hold(len(chunk))
                data += chunk
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return bytes(data)


def _check_media_type(given: str) -> None:
    """A page of any site may post text and forms to a server of its visitor's machine; JSON it may not without being allowed to."""
    if given.partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeError(
            f"Content-Type={given[:MOST_SHOWN]!r} is not JSON's: send `Content-Type: application/json`"
        )


def _check_model(gateway: Gateway, name: str) -> None:
    if name != gateway.model_name:
        raise NotFoundError(
            f"model {name[:MOST_SHOWN]!r} does not exist here: this deployment serves {gateway.model_name!r}",
            param="model",
            code="model_not_found",
        )


def _limit(gateway: Gateway) -> int:
    """Most tokens of prompt and answer. Without a route nothing can be checked against it: 503 comes first."""
    gateway.dispatcher.check_open()
    return gateway.dispatcher.max_tokens()


async def _respond(request: Request, gateway: Gateway, prepared: Prepared, shape: Shape) -> Response:
    envelope = Envelope(prepared, gateway.model_name, f"strata-epoch-{gateway.dispatcher.status().epoch}")
    answer = Answer(gateway.dispatcher, gateway.tokenizer, envelope, shape)
    streams = False
    try:
        await _unless_gone(request, answer.start())
        if prepared.body.stream:
            streams = True
            return EventStream(answer.events(), answer.close)
        return Response(await _unless_gone(request, answer.whole()), media_type="application/json")
    finally:
        if not streams:
            answer.close()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; raises ClientGoneError, and cancels it, when the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # after the body, the next message is the disconnect
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await _cancel(task)
        await _cancel(gone)


async def _cancel(task: "asyncio.Future[Any]") -> None:
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
