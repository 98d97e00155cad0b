"""Takes in the bodies of requests: key, kind and size first, then the bytes, then work on them off the event loop.

Used by `app`. Reading a body and tokenizing it may take a while: few threads do it, so that many large bodies wait
instead of adding up.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar, TypeVarTuple

from fastapi import Request
from starlette.requests import ClientDisconnect

from strata_runtime.gateway.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError
from strata_runtime.gateway.http.api_keys import ApiKeys
from strata_runtime.gateway.http.bodies import MOST_SHOWN
from strata_runtime.gateway.http.held_bytes import HeldBytes
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.settings import Limits

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

READERS = 4


class ClientGoneError(Exception):
    """The client has closed its connection: there is nobody to answer."""


class BodyReader:
    """One for all routes: what they read together is bounded."""

    def __init__(self, api_keys: ApiKeys, limits: Limits, dispatcher: Dispatcher) -> None:
        self._api_keys = api_keys
        self._limits = limits
        self._dispatcher = dispatcher  # tells how many tokens a prompt may have
        self._threads = ThreadPoolExecutor(READERS, "gateway reader")
        self._held = HeldBytes()

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """A request's body, counted among all that are held until the block ends. Raises ApiError, ClientGoneError."""
        with self._held.share(self._limits.held_body_bytes(self._dispatcher.max_tokens())) as hold:
            yield await self._checked(request, hold)

    async def run(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Work on a body, on one of the threads."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except RecursionError as error:  # what can be read may still be too deep to be written, or looked at
            raise InvalidRequestError("the body has JSON that is nested too deeply: send a flatter one") from error

    async def _checked(self, request: Request, hold: Callable[[int], None]) -> bytes:
        """Key, then kind, then size; what says that it is too large is not read at all."""
        self._api_keys.check_headers(request.headers)
        _check_media_type(request.headers.get("content-type", ""))
        limit = self._limits.body_bytes(self._dispatcher.max_tokens())
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
    """A page of any site may post text and forms to a server of its visitor's machine; JSON only where it is allowed to."""
    if given.partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeError(
            f"Content-Type={given[:MOST_SHOWN]!r} is not JSON's: send `Content-Type: application/json`"
        )
