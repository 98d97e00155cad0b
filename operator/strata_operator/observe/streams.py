"""Watches as they come over the network: the lines of an answer that does not end. Called by `watches`; knows no kind of object.

Asynchronous and beside the official client, whose watches would hold a thread each: it lends its address, certificates and token.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Protocol

import aiohttp
import kubernetes.client

from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import refusal

CONNECT_SECONDS = 30.0
IDLE_SECONDS = 90.0  # the API server sends a bookmark every minute: who is silent for longer is gone


class Streams(Protocol):
    """Opens watches at one API server."""

    def lines(self, path: str, query: dict[str, str], connected: Callable[[], None]) -> AsyncGenerator[bytes]:
        """Whole lines until the server ends the answer; `connected` is called once it has begun. Raises NotReadyError, of the kind of a refusal where it is one."""
        ...

    async def close(self) -> None: ...


class HttpStreams:
    """Over aiohttp, to the server that a client of Kubernetes is configured for."""

    def __init__(self, configuration: kubernetes.client.Configuration, idle_seconds: float = IDLE_SECONDS) -> None:
        self._configuration = configuration
        self._idle_seconds = idle_seconds
        self._session: aiohttp.ClientSession | None = None

    async def lines(self, path: str, query: dict[str, str], connected: Callable[[], None]) -> AsyncGenerator[bytes]:
        what = f"GET {path}?watch"
        try:
            async with self._opened().get(
                self._configuration.host + path,
                params=query,
                headers=self._credentials(),
                ssl=tls_of(self._configuration),
            ) as answer:
                if answer.status != HTTPStatus.OK:
                    raise refusal(answer.status, what, (await answer.text())[:500] or "it gives no reason")
                connected()
                rest = b""
                async for data in answer.content.iter_any():
                    *whole, rest = (rest + data).split(b"\n")
                    for line in whole:
                        yield line
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NotReadyError(f"{what}: the watch broke: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(0)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._idle_seconds)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def _credentials(self) -> dict[str, str]:
        """Asked for every connection: the token of a pod's service account is replaced within the hour."""
        settings = self._configuration.auth_settings().values()
        return {str(each["key"]): str(each["value"]) for each in settings if each["in"] == "header" and each["value"]}


def tls_of(configuration: kubernetes.client.Configuration) -> ssl.SSLContext | bool:
    """As aiohttp takes it."""
    if not configuration.host.startswith("https"):
        return True
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context
