"""The gateway in front of real slots: a client's text is what transformers generates, with and without a fault."""

import asyncio
from pathlib import Path

import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from strata_planner.contract.control import Leader, SetRoute
from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from strata_runtime.model.random_model import make_random_model
from tests.runtime.gateway.harness import Harness, a_gateway
from tests.runtime.gateway.models import write_model_folder
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness

SLOTS = ("s0", "s1")
PROMPT = "hello world"
ANSWER = 110
MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Random weights in float32, with the tests' tokenizer."""
    folder = make_random_model(
        tmp_path_factory.mktemp("random-llama"),
        "llama",
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return write_model_folder(folder, config=False)


@pytest.fixture(scope="module")
def expected(model: Path, tokenizer: Tokenizer) -> str:
    prompt = tokenizer.encode(PROMPT)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).generate(
        torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return tokenizer.decode(whole[0, len(prompt) :].tolist())


def serve(pipeline: PipelineHarness, gateway: Harness, model: Path) -> None:
    """One epoch as a controller makes it: slots first, then the route."""
    pipeline.serve(even_plan(model, SLOTS, max_model_len=MAX_MODEL_LEN))
    leader = Leader(0, SLOTS[0], f"tcp://127.0.0.1:{pipeline.slots[SLOTS[0]].address.request_port}", 1.0)
    gateway.dispatcher.set_route(SetRoute(pipeline.epoch, pipeline.key, (leader,), MAX_MODEL_LEN))


@pytest.mark.parametrize("lost", [None, *SLOTS])
async def test_a_stream_is_what_transformers_generates(model: Path, expected: str, lost: str | None) -> None:
    with PipelineHarness(SLOTS) as pipeline:
        async with (
            a_gateway(load_tokenizer(model)) as gateway,
            gateway.serving() as url,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            serve(pipeline, gateway, model)
            stream = await client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=ANSWER, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            text = (await anext(stream)).choices[0].text
            if lost is not None:
                await asyncio.to_thread(pipeline.restart, lost)
                serve(pipeline, gateway, model)
            text += "".join([chunk.choices[0].text async for chunk in stream])
            assert text == expected
            assert await gateway.metric("strata_replays_total") == (lost is not None)
