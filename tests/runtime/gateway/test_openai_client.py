"""The official openai client, unchanged, against the gateway's real process."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader, route_to
from tests.runtime.gateway.harness import a_leader, endless, scripted
from tests.runtime.gateway.test_control import KEY, Controller

FOX = "the quick brown fox jumps"
API_KEY = "a key of this deployment"


@dataclass
class Running:
    """A gateway process with a fake leader in the test's loop."""

    process: Process
    leader: FakeLeader
    url: str
    control_port: int

    def client(self, api_key: str = API_KEY) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)


async def start(*flags: str) -> Process:
    environment = os.environ | {"STRATA_CONTROL_KEY": KEY}
    module = ("-W", "error", "-m", "strata_runtime.gateway")
    return await asyncio.create_subprocess_exec(sys.executable, *module, *flags, env=environment, stderr=PIPE)


async def ports_of(process: Process) -> tuple[str, int]:
    """The URL and the control port, as its log tells them."""
    assert process.stderr is not None
    async for line in process.stderr:
        told = re.search(r"(http://[\d.:]+), control port (\d+)", line.decode())
        if told:
            return told[1], int(told[2])
    raise AssertionError("the gateway ended before it served")


@contextlib.asynccontextmanager
async def a_running_gateway(model_folder: Path, keys: Path, tokenizer: Tokenizer) -> AsyncIterator[Running]:
    process = await start(
        *("--port", "0", "--control-port", "0", "--served-model-name", "tiny"),
        *("--model-uri", model_folder.as_uri(), "--api-keys-file", str(keys), "--drain-seconds", "0.1"),
    )
    try:
        url, control_port = await ports_of(process)
        async with a_leader(endless(tokenizer)) as leader:
            with contextlib.closing(Controller(control_port)) as controller:
                status = await controller.ask(route_to(leader))
                while status.leaders_connected == 0:
                    status = await controller.ask(route_to(leader))
            yield Running(process, leader, url, control_port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    model_folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    """One process for all tests here: the last one ends it."""
    keys = tmp_path_factory.mktemp("gateway") / "keys"
    keys.write_text(f"another key\n\n{API_KEY}\n")
    async with a_running_gateway(model_folder, keys, tokenizer) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_everything_a_client_asks(running: Running, tokenizer: Tokenizer) -> None:
    async with running.client() as client:
        await check_completions(client, running.leader, tokenizer)
        await check_chat(client, running.leader, tokenizer)
        await check_errors(client)
        assert [model.id async for model in await client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "strata"
    async with running.client("a wrong key") as stranger:
        with pytest.raises(openai.AuthenticationError, match="not one of this deployment's keys"):
            await stranger.completions.create(model="tiny", prompt="hello")


async def check_completions(client: openai.AsyncOpenAI, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    leader.model = scripted(tokenizer, FOX)
    whole = await client.completions.create(model="tiny", prompt="hello", max_tokens=100, logprobs=1)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (FOX, "stop")
    assert "".join(whole.choices[0].logprobs.tokens) == FOX
    stream = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == FOX
    assert chunks[-1].usage == whole.usage


async def check_chat(client: openai.AsyncOpenAI, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    leader.model = scripted(tokenizer, FOX)
    messages = [{"role": "user", "content": "hello"}]
    whole = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content == FOX
    assert "".join(token.token for token in whole.choices[0].logprobs.content) == FOX
    async with client.chat.completions.stream(model="tiny", messages=messages) as stream:
        final = await stream.get_final_completion()
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (FOX, "stop")
    again = await client.chat.completions.create(model="tiny", messages=[*messages, whole.choices[0].message])
    assert again.choices[0].message.content == FOX


async def check_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4' does not exist"):
        await client.completions.create(model="gpt-4", prompt="hello")
    with pytest.raises(openai.BadRequestError, match='suffix="x" is not supported') as refused:
        await client.completions.create(model="tiny", prompt="hello", suffix="x")
    assert (refused.value.param, refused.value.code) == ("suffix", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="takes at most 512"):
        await client.completions.create(model="tiny", prompt="hello", max_tokens=1000)


@pytest.mark.asyncio(loop_scope="module")
async def test_sigterm_ends_it_in_mid_stream(running: Running) -> None:
    running.leader.allow(5)
    async with running.client() as client:
        stream = await client.completions.create(model="tiny", prompt="hello", max_tokens=50, stream=True)
        await anext(stream)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
    assert await asyncio.wait_for(running.process.wait(), 10) == 0
    await running.leader.until(lambda: running.leader.aborts)


@pytest.mark.slow  # a process
async def test_a_port_in_use(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        second = await start(
            *("--port", port, "--control-port", "0", "--served-model-name", "tiny", "--model-uri", str(model_folder))
        )
        _, said = await second.communicate()
    assert second.returncode == 2
    assert f"--port {port}: cannot listen at 127.0.0.1:{port}" in said.decode()
    assert "free port" in said.decode()
