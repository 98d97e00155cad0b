"""The HTTP routes of the gateway. Thin: bodies are read by `bodies` and `prompts`, answers written by `answers`.

Made by `__main__` and by tests; every error leaves in the shape of its interface.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from strata_runtime.gateway.errors import ApiError, InvalidRequestError, NotFoundError
from strata_runtime.gateway.http.answers import Answer
from strata_runtime.gateway.http.api_keys import ApiKeys
from strata_runtime.gateway.http.asked import POSITION_HEADER, Again, Asked, Once, wish_of
from strata_runtime.gateway.http.bodies import MOST_SHOWN, parse_body
from strata_runtime.gateway.http.body_reader import BodyReader, ClientGoneError
from strata_runtime.gateway.http.chunks import Chunks
from strata_runtime.gateway.http.dialect import Dialect, Json
from strata_runtime.gateway.http.messages.answers import MessageDialect
from strata_runtime.gateway.http.messages.chat import count_tokens, prepare_messages
from strata_runtime.gateway.http.messages.errors import error_body, is_messages
from strata_runtime.gateway.http.messages.parameters import read_count, read_messages
from strata_runtime.gateway.http.openapi import describe
from strata_runtime.gateway.http.parameters import ChatBody, CompletionBody
from strata_runtime.gateway.http.prompts import Bounds, Prepared, prepare_chat, prepare_completion
from strata_runtime.gateway.http.responses.answers import ResponseDialect
from strata_runtime.gateway.http.responses.chat import prepare_response
from strata_runtime.gateway.http.responses.parameters import read_response
from strata_runtime.gateway.http.shapes import ChatShape, CompletionShape, Shape
from strata_runtime.gateway.http.tokenization import DetokenizeBody, TokenizeBody, detokenize, tokenize
from strata_runtime.gateway.http.unserved import unserved
from strata_runtime.gateway.keeping.birth import Birth
from strata_runtime.gateway.keeping.keeper import Keeper
from strata_runtime.gateway.metrics import Metrics
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.settings import Limits, Pages
from strata_runtime.gateway.text.tokenizer import Tokenizer
from strata_runtime.gateway.trials import GrammarTrials

T = TypeVar("T")
Read = Callable[[bytes, Bounds], tuple[Prepared, Shape]]
ReadFully = Callable[[bytes, Bounds], tuple[Prepared, Dialect]]
Told = Callable[[bytes, int], bytes]

PACKAGE = "strata-llm"
METHODS = ("GET", "POST")  # of all routes


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the routes need."""

    model_name: str
    tokenizer: Tokenizer
    dispatcher: Dispatcher
    metrics: Metrics
    api_keys: ApiKeys
    limits: Limits
    trials: GrammarTrials
    pages: Pages
    keeper: Keeper


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


def create_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application. The dispatcher lives on the event loop that serves it."""
    release = version(PACKAGE)
    app = FastAPI(title="Strata gateway", openapi_url="/openapi.json" if gateway.pages.docs else None, redoc_url=None)
    app.openapi = cache(lambda: describe(app, release))  # type: ignore[method-assign]  # FastAPI's own way
    _handle_errors(app)
    _add_status_routes(app, gateway, release)
    _add_model_routes(app, gateway)
    reader = BodyReader(gateway.api_keys, gateway.limits, gateway.dispatcher)
    _add_generation_routes(app, gateway, reader)
    _add_other_interfaces(app, gateway, reader)
    _add_token_routes(app, gateway, reader)
    return _for_pages(app, gateway.pages)


def _for_pages(app: ASGIApp, pages: Pages) -> ASGIApp:
    """Around all else, so that pages may read every error. No credentials: keys come in a header, not as cookies do."""
    if not pages.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=pages.allowed_origins,
        allow_methods=METHODS,
        allow_headers=("*",),  # OpenAI's clients send a dozen of their own
        expose_headers=("Retry-After",),
    )


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        retry = error.retry_after_seconds
        headers = None if retry is None else {"Retry-After": str(retry)}
        body = error_body(error.status, str(error)) if is_messages(request.url.path) else error.body()
        return JSONResponse(body, error.status, headers)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        method, path = request.method[:MOST_SHOWN], request.url.path[:MOST_SHOWN]
        known = unserved(method, path) if error.status_code == HTTPStatus.NOT_FOUND else None
        if known is not None:
            return JSONResponse(known.body(), known.status)
        message = f"{method} {path}: {error.detail.lower()}; see docs/openai-api.md for what is served"
        body: Json = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        if is_messages(request.url.path):
            body = error_body(error.status_code, message)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody reads it; nginx's number for access logs


def _add_status_routes(app: FastAPI, gateway: Gateway, release: str) -> None:
    def state() -> tuple[Json, HTTPStatus]:
        load = gateway.dispatcher.load()
        if load.leaders_connected:
            leaders = {"leaders_connected": load.leaders_connected, "leaders_missing": load.leaders_missing}
            return {"status": "ok", "epoch": load.epoch, **leaders}, HTTPStatus.OK
        reason = "no controller has set a route yet" if load.epoch == 0 else f"no leader answers in epoch {load.epoch}"
        return {"status": "unavailable", "reason": reason}, HTTPStatus.SERVICE_UNAVAILABLE

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse(*state())

    @app.get("/ping")
    @app.post("/ping")  # SageMaker's, as vLLM has it
    async def ping() -> Response:
        body, status = state()
        return Response() if status == HTTPStatus.OK else JSONResponse(body, status)

    @app.get("/version")
    async def tell_version() -> Json:
        return {"version": release}

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
        gateway.api_keys.check_headers(request.headers)
        return {"object": "list", "data": [describe()]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Json:
        gateway.api_keys.check_headers(request.headers)
        _check_model(gateway, name)
        return describe()


def _add_generation_routes(app: FastAPI, gateway: Gateway, reader: BodyReader) -> None:
    def read_completion(data: bytes, bounds: Bounds) -> tuple[Prepared, Shape]:
        body = parse_body(data, CompletionBody)
        _check_model(gateway, body.model)
        prepared = prepare_completion(body, gateway.tokenizer, bounds)
        return prepared, CompletionShape(prepared, gateway.tokenizer, logprobs=body.logprobs is not None)

    def read_chat(data: bytes, bounds: Bounds) -> tuple[Prepared, Shape]:
        body = parse_body(data, ChatBody)
        _check_model(gateway, body.model)
        prepared = prepare_chat(body, gateway.tokenizer, bounds)
        return prepared, ChatShape(prepared, gateway.tokenizer, logprobs=body.logprobs)

    async def answer(request: Request, read: Read) -> Response:
        asked, birth, (prepared, shape) = await _take(request, gateway, reader, read)
        dialect = Chunks(prepared, shape, gateway.model_name, f"strata-epoch-{birth.epoch}")
        return await _respond(request, gateway, asked, prepared, dialect)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, read_completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, read_chat)


def _add_other_interfaces(app: FastAPI, gateway: Gateway, reader: BodyReader) -> None:
    """To the same chats."""

    def read_message(data: bytes, bounds: Bounds) -> tuple[Prepared, Dialect]:
        body = read_messages(data)
        _check_model(gateway, body.model)
        prepared, fills_context = prepare_messages(body, gateway.tokenizer, bounds)
        return prepared, MessageDialect(prepared, gateway.model_name, fills_context=fills_context)

    def read_responses(data: bytes, bounds: Bounds) -> tuple[Prepared, Dialect]:
        body = read_response(data)
        _check_model(gateway, body.model)
        prepared, said_again = prepare_response(body, gateway.tokenizer, bounds)
        return prepared, ResponseDialect(prepared, gateway.tokenizer, gateway.model_name, said_again)

    async def answer(request: Request, read: ReadFully) -> Response:
        asked, _, (prepared, dialect) = await _take(request, gateway, reader, read)
        return await _respond(request, gateway, asked, prepared, dialect)

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await answer(request, read_message)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await answer(request, read_responses)


def _add_token_routes(app: FastAPI, gateway: Gateway, reader: BodyReader) -> None:
    """They need no leader: only what it would take is told where one is known."""

    def read_text(data: bytes, max_tokens: int) -> bytes:
        body = parse_body(data, TokenizeBody)
        _check_model(gateway, body.model)
        return tokenize(body, gateway.tokenizer, max_tokens)

    def read_tokens(data: bytes, max_tokens: int) -> bytes:
        body = parse_body(data, DetokenizeBody)
        _check_model(gateway, body.model)
        return detokenize(body, gateway.tokenizer, max_tokens)

    def read_prompt(data: bytes, max_tokens: int) -> bytes:
        body = read_count(data)
        _check_model(gateway, body.model)
        return count_tokens(body, gateway.tokenizer, max_tokens)

    async def answer(request: Request, told: Told) -> Response:
        async with reader.body(request) as data:
            content = await reader.run(told, data, gateway.dispatcher.max_tokens())
        return Response(content, media_type="application/json")

    @app.post("/tokenize")
    async def tokens_of(request: Request) -> Response:
        return await answer(request, read_text)

    @app.post("/detokenize")
    async def text_of(request: Request) -> Response:
        return await answer(request, read_tokens)

    @app.post("/v1/messages/count_tokens")
    async def tokens_of_messages(request: Request) -> Response:
        return await answer(request, read_prompt)


def _check_model(gateway: Gateway, name: str | None) -> None:
    """None: whatever is served."""
    if name is not None and name != gateway.model_name:
        raise NotFoundError(
            f"model {name[:MOST_SHOWN]!r} does not exist here: this deployment serves {gateway.model_name!r}",
            param="model",
            code="model_not_found",
        )


def _limit(gateway: Gateway) -> int:
    """Most tokens of prompt and answer. Without a route nothing can be checked against it: 503 comes first."""
    gateway.dispatcher.check_open()
    return gateway.dispatcher.max_tokens()


async def _take(
    request: Request, gateway: Gateway, reader: BodyReader, read: Callable[[bytes, Bounds], T]
) -> tuple[Asked, Birth, T]:
    """What a body comes to, and how its answer is asked for."""
    async with reader.body(request) as data:
        limit = _limit(gateway)
        asked, birth = _asked(request, gateway, data)
        return asked, birth, await reader.run(read, data, Bounds(limit, gateway.limits.max_requests, birth))


def _asked(request: Request, gateway: Gateway, data: bytes) -> tuple[Asked, Birth]:
    wish = wish_of(request.headers, request.url.path, data, gateway.api_keys.tenant(request.headers))
    if wish is None:
        return Once(gateway.dispatcher), Birth.new(gateway.dispatcher.status().epoch)
    birth = gateway.keeper.birth(wish)
    return Again(gateway.keeper, wish, birth), birth


async def _respond(request: Request, gateway: Gateway, asked: Asked, prepared: Prepared, dialect: Dialect) -> Response:
    if asked.events_seen and not prepared.body.stream:
        raise InvalidRequestError(
            f"{POSITION_HEADER} is of a stream, and stream=false asks for none", param=POSITION_HEADER
        )
    answer = Answer(asked, gateway.tokenizer, prepared, dialect)
    streams = False
    try:
        await _unless_gone(request, _check_form(gateway, prepared))
        await _unless_gone(request, answer.start())
        if prepared.body.stream:
            streams = True
            return EventStream(answer.events(), answer.close)
        return Response(await _unless_gone(request, answer.whole()), media_type="application/json")
    finally:
        if not streams:
            answer.close()


async def _check_form(gateway: Gateway, prepared: Prepared) -> None:
    """A grammar that would take a pipeline's time or memory, or is none, never gets there."""
    rules = prepared.requests[0].sampling.rules
    if prepared.form is None or rules is None or rules.grammar is None:
        return
    problem = await gateway.trials.problem(rules.grammar)
    if problem is not None:
        raise InvalidRequestError(
            f"no answer can be held to {prepared.form.param}: {problem}", param=prepared.form.param
        )


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
