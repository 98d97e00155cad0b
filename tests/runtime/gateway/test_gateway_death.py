"""Two gateway processes in front of real slots, one killed in mid-stream: the client goes on at the other, with the very same text."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
import zmq
from transformers import AutoModelForCausalLM

from strata_planner.contract.control import GetStatus, Leader, SetRoute, encode
from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from strata_runtime.model.random_model import make_random_model
from strata_runtime.wire.transport import Keys, connect
from tests.runtime.gateway.models import write_model_folder
from tests.runtime.gateway.test_kept_answers import KEY, Stream, without_names
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness, free_ports

SLOTS = ("s0", "s1")
SECRET = "control secret of the gateways"
ANSWER, MAX_MODEL_LEN = 100, 128
ASKED = {"model": "tiny", "prompt": "hello world", "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
FAULT = pytest.mark.parametrize("with_leader", [False, True], ids=["the gateway", "the gateway and its leader"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    folder = make_random_model(
        tmp_path_factory.mktemp("random-llama"), "llama", vocab_size=tokenizer.vocabulary_size,
        num_key_value_heads=2, max_position_embeddings=256, **sizes,
    )  # fmt: skip
    return write_model_folder(folder, config=False)


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.encode("hello world")
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).generate(
        torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return tokenizer.decode(whole[0, len(prompt) :].tolist())


@dataclass
class Process:
    """A gateway as the operator starts it."""

    child: asyncio.subprocess.Process
    http: httpx.AsyncClient
    control: str

    async def is_told(self, message: SetRoute | GetStatus) -> dict[str, int]:
        """Its status after that."""
        context = zmq.Context()
        try:
            link = connect(context.socket(zmq.DEALER), self.control, Keys.of(SECRET))
            link.send(encode(message))
            answered = await asyncio.to_thread(link.poll, 60_000)
            assert answered, "the gateway is silent"
            return dict(json.loads(link.recv()))
        finally:
            context.destroy(linger=0)

    async def serves(self, route: SetRoute) -> None:
        await self.is_told(route)
        async with asyncio.timeout(60):
            while (await self.is_told(GetStatus()))["leadersConnected"] < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def knows_the_other(self) -> None:
        """As its log says."""
        assert self.child.stderr is not None
        async with asyncio.timeout(60):
            while b"keeps what this one keeps" not in await self.child.stderr.readline():
                pass


@contextlib.asynccontextmanager
async def two_gateways(model: Path) -> AsyncIterator[tuple[Process, Process]]:
    ports = free_ports(6)
    async with contextlib.AsyncExitStack() as held:
        processes = []
        for http, control, journal in (ports[:3], ports[3:]):
            flags = [
                "--port", str(http), "--control-port", str(control), "--journal-port", str(journal), "--served-model-name", "tiny",
                "--peers", f"127.0.0.1:{ports[2]},127.0.0.1:{ports[5]}", "--model-uri", f"file://{model}",
            ]  # fmt: skip
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "strata_runtime.gateway", *flags, stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "STRATA_CONTROL_KEY": SECRET},
            )  # fmt: skip
            held.push_async_callback(_ended, child)
            client = await held.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}", timeout=60))
            processes.append(Process(child, client, f"tcp://127.0.0.1:{control}"))
        one, other = processes
        await asyncio.gather(one.knows_the_other(), other.knows_the_other())
        yield one, other


async def _ended(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    await child.wait()


def route(pipeline: PipelineHarness, model: Path) -> SetRoute:
    pipeline.serve(even_plan(model, SLOTS, max_model_len=MAX_MODEL_LEN))
    leader = Leader(0, SLOTS[0], f"tcp://127.0.0.1:{pipeline.slots[SLOTS[0]].address.request_port}", 1.0)
    return SetRoute(pipeline.epoch, pipeline.key, (leader,), MAX_MODEL_LEN)


@pytest.mark.slow  # two processes; test_twins.py has two gateways in one, test_kept_answers.py what is kept
@FAULT
async def test_a_stream_survives(model: Path, expected: str, *, with_leader: bool) -> None:
    async with two_gateways(model) as (one, other):
        with PipelineHarness(SLOTS) as pipeline:  # last: its ports are free until they are listened at
            first = await asyncio.to_thread(route, pipeline, model)
            await asyncio.gather(one.serves(first), other.serves(first))
            headers = {"Idempotency-Key": KEY}
            events: list[str] = []
            last = ""
            with contextlib.suppress(httpx.TransportError):
                async with Stream(one.http, "/v1/completions", ASKED, headers) as stream:
                    for count in range(2 * ANSWER):
                        events.append(await stream.next())
                        last = stream.last_id
                        if count == 10:
                            one.child.send_signal(signal.SIGKILL)
            assert "[DONE]" not in events[-1], "it was killed in mid-stream"
            if with_leader:
                await asyncio.to_thread(pipeline.restart, SLOTS[0])
                await other.serves(await asyncio.to_thread(route, pipeline, model))
            async with Stream(other.http, "/v1/completions", ASKED, {**headers, "Last-Event-ID": last}) as stream:
                events += await stream.rest()
            chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
            assert events[-1] == "data: [DONE]"
            assert len({chunk["id"] for chunk in chunks}) == 1
            again = await other.http.post("/v1/completions", json={**ASKED, "stream": True}, headers=headers)
            told = [part.partition("\n")[2] for part in again.text.split("\n\n") if part]
            assert without_names(told) == without_names(events)
