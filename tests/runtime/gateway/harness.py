"""A whole gateway on the test's own event loop, with fake leaders behind it.

Most tests speak ASGI to it; those about streams and connections use a real uvicorn server on a free port.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from strata_planner.contract.frames import Grammar
from strata_runtime.gateway.http.api_keys import ApiKeys
from strata_runtime.gateway.http.app import Gateway, create_app
from strata_runtime.gateway.http.connections import BoundedServer, server_config
from strata_runtime.gateway.keeping.keeper import Keeper
from strata_runtime.gateway.metrics import Metrics
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.settings import Limits, Pages
from strata_runtime.gateway.text.tokenizer import Tokenizer
from strata_runtime.gateway.trials import GrammarTrials
from strata_runtime.structured.compiler import Compiler
from strata_runtime.structured.trial import Answer, problem_of
from tests.runtime.gateway.fake_leader import FakeLeader, Model, route_to

MODEL_NAME = "tiny"


class TrialsHere(GrammarTrials):
    """Tries grammars in the test's process: one of their own imports torch and transformers first."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._compiler = Compiler(tokenizer.folder, tokenizer.rows)

    async def _asked(self, grammar: Grammar) -> Answer:
        return Answer(problem_of(self._compiler, grammar))


def scripted(tokenizer: Tokenizer, text: str) -> Model:
    """Answers everything with this text and the end-of-text token."""
    tokens = [*tokenizer.encode(text), tokenizer.stop_tokens[0]]
    return lambda prompt, index: tokens[index]


def endless(tokenizer: Tokenizer) -> Model:
    """Never ends by itself; a function of prompt and position, so that a replay can be told from a fresh start."""
    return lambda prompt, index: 2 + (sum(prompt) + 31 * index) % (tokenizer.vocabulary_size - 2)


@dataclass
class Harness:
    """`http` speaks ASGI; `url` is there inside `serving`."""

    gateway: Gateway
    http: httpx.AsyncClient

    @property
    def dispatcher(self) -> Dispatcher:
        return self.gateway.dispatcher

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for the gateway's state to change so."""
        async with asyncio.timeout(10):
            while not condition():
                self.dispatcher.changed.clear()
                await self.dispatcher.changed.wait()

    async def connect(self, *leaders: FakeLeader) -> None:
        self.dispatcher.set_route(route_to(*leaders))
        await self.until(lambda: self.dispatcher.status().leaders_connected == len(leaders))

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "hello", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await self.http.post("/v1/chat/completions", json={"model": MODEL_NAME, "messages": messages, **body})

    async def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The same gateway behind real HTTP; yields its URL."""
        listener = socket.create_server(("127.0.0.1", 0))
        config = server_config(self.http._transport.app, self.gateway.limits)
        server = BoundedServer(config)
        task = asyncio.create_task(server._serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def a_gateway(
    tokenizer: Tokenizer,
    *,
    limits: Limits | None = None,
    api_keys: ApiKeys | None = None,
    pages: Pages | None = None,
    trials: GrammarTrials | None = None,
) -> AsyncIterator[Harness]:
    limits = limits or Limits()
    metrics = Metrics(MODEL_NAME)
    dispatcher = Dispatcher(limits, metrics)
    trials = trials or GrammarTrials(tokenizer)
    keys = api_keys or ApiKeys()
    keeper = Keeper(dispatcher, limits, b"positions")
    gateway = Gateway(MODEL_NAME, tokenizer, dispatcher, metrics, keys, limits, trials, pages or Pages(), keeper)
    transport = httpx.ASGITransport(create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        try:
            yield Harness(gateway, http)
        finally:
            await keeper.close()
            await dispatcher.close()
            await trials.close()


@contextlib.asynccontextmanager
async def a_leader(model: Model, **fields: Any) -> AsyncIterator[FakeLeader]:
    leader = FakeLeader(model, **fields)
    await leader.start()
    try:
        yield leader
    finally:
        await leader.stop()
