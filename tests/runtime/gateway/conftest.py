"""Fixtures of the gateway's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.gateway.chats import THOUGHTS, TOOLS, Chatting, chatting
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness, a_gateway, a_leader, endless
from tests.runtime.gateway.models import write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(model_folder)


@pytest.fixture
async def leader(tokenizer: Tokenizer) -> AsyncIterator[FakeLeader]:
    """Answers without an end of its own; tests give it another `model` before they ask."""
    async with a_leader(endless(tokenizer)) as one:
        yield one


@pytest.fixture
async def gateway(tokenizer: Tokenizer, leader: FakeLeader) -> AsyncIterator[Harness]:
    """A gateway that is connected to `leader`."""
    async with a_gateway(tokenizer) as harness:
        await harness.connect(leader)
        yield harness


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(tokenizer: Tokenizer) -> AsyncIterator[Harness]:
    """The same once for all tests of a file that only ask it what it refuses: `@pytest.mark.asyncio(loop_scope="module")`."""
    async with a_leader(endless(tokenizer)) as leader, a_gateway(tokenizer) as harness:
        await harness.connect(leader)
        yield harness


@pytest.fixture(scope="session")
def tools_model(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that calls tools."""
    return load_tokenizer(write_model_folder(tmp_path_factory.mktemp("tools"), chat_template=TOOLS))


@pytest.fixture(scope="session")
def thoughts_model(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that thinks as well."""
    return load_tokenizer(write_model_folder(tmp_path_factory.mktemp("thoughts"), chat_template=THOUGHTS))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(tools_model: Tokenizer) -> AsyncIterator[Chatting]:
    async with chatting(tools_model) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(thoughts_model: Tokenizer) -> AsyncIterator[Chatting]:
    async with chatting(thoughts_model) as one:
        yield one
