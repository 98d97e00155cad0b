"""The gateway in front of real slots: a client's text is what transformers generates, with and without a fault."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from strata_planner.contract.control import Leader, SetRoute
from strata_planner.contract.frames import FrameHeader
from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from strata_runtime.model.random_model import make_random_model
from strata_runtime.stage.executor import Answered, Passed, StageExecutor
from tests.laws import swept
from tests.runtime.gateway.harness import Harness, TrialsHere, a_gateway
from tests.runtime.gateway.models import write_model_folder
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness

SLOTS = ("s0", "s1")
PROMPT = "hello world"
POISON = 13  # a prompt that begins with it fails its steps
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
    route(pipeline, gateway)


def route(pipeline: PipelineHarness, gateway: Harness) -> None:
    leader = Leader(0, SLOTS[0], f"tcp://127.0.0.1:{pipeline.slots[SLOTS[0]].address.request_port}", 1.0)
    gateway.dispatcher.set_route(SetRoute(pipeline.epoch, pipeline.key, (leader,), MAX_MODEL_LEN))


@pytest.mark.parametrize("lost", swept([None, *SLOTS], [SLOTS[0]]))
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


async def test_a_prompts_own_tokens_have_the_models_log_probabilities(model: Path, tokenizer: Tokenizer) -> None:
    """Of more tokens than a step has rows for, over two stages: as `echo` tells them, whole and streamed, and as vLLM does."""
    prompt = tokenizer.encode("hello world, this is a test of tokens " * 3)
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([prompt])).logits[0]
    logs = logits.detach().log_softmax(dim=-1)
    expected = [float(logs[place, token]) for place, token in enumerate(prompt[1:])]
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    with PipelineHarness(SLOTS) as pipeline:
        async with a_gateway(load_tokenizer(model)) as gateway:
            serve(pipeline, gateway, model)
            await gateway.until(lambda: gateway.dispatcher.status().leaders_connected)
            [whole] = (await gateway.complete(**asked, echo=True, logprobs=1)).json()["choices"]
            told = whole["logprobs"]
            first, *others, _ = told["token_logprobs"]
            assert (first, others) == (None, pytest.approx(expected, abs=1e-4))
            assert "".join(told["tokens"]) == whole["text"]
            assert told["top_logprobs"][0] is None
            assert {len(top) for top in told["top_logprobs"][1:]} <= {1, 2}
            lines = (await gateway.complete(**asked, echo=True, logprobs=1, stream=True)).text.splitlines()
            chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
            assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
            for name, values in told.items():
                assert [each for chunk in chunks for each in chunk["logprobs"][name]] == values
            [again] = (await gateway.complete(**asked, prompt_logprobs=2)).json()["choices"]
            assert again["prompt_logprobs"][0] is None
            for place, (token, each) in enumerate(zip(prompt[1:], again["prompt_logprobs"][1:], strict=True)):
                order = logs[place].argsort(descending=True).tolist()
                assert each[str(token)]["rank"] == order.index(token) + 1
                assert set(map(int, each)) == {token, *order[:2]}
            chat = (await gateway.chat(prompt_logprobs=0, max_tokens=1)).json()
            assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


THREE = ("s0", "s1", "s2")
FORM = r'\{"colours": \["red"(, "green"|, "blue"|, "red"){8}\]\}'
RULED = {"structured_outputs": {"regex": FORM}, "repetition_penalty": 1.1, "logit_bias": {"5": 2}}


@pytest.mark.slow  # test_recovery.py has what is replayed, stage/test_sampler.py forms and rules however a text is cut
@pytest.mark.parametrize("lost", swept(THREE, [THREE[2]]))
async def test_an_answer_keeps_its_form_and_its_rules_when_a_stage_is_lost(model: Path, lost: str) -> None:
    """It is the one that it would have been: grammar and penalties follow from the tokens so far, wherever they were drawn."""
    plan = even_plan(model, THREE, max_model_len=MAX_MODEL_LEN)
    tokenizer = load_tokenizer(model)
    with PipelineHarness(THREE) as pipeline:
        async with (
            a_gateway(tokenizer, trials=TrialsHere(tokenizer)) as gateway,
            gateway.serving() as url,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            pipeline.serve(plan)
            route(pipeline, gateway)
            await gateway.until(lambda: gateway.dispatcher.status().leaders_connected)
            asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": ANSWER, "seed": 11, "extra_body": RULED}
            whole = (await client.completions.create(**asked)).choices[0]
            assert whole.finish_reason == "stop"
            assert len(json.loads(whole.text)["colours"]) == 9
            stream = await client.completions.create(**asked, stream=True)
            text = "".join([(await anext(stream)).choices[0].text for _ in range(20)])
            assert whole.text.startswith(text)
            await asyncio.to_thread(pipeline.restart, lost)
            pipeline.serve(plan)
            route(pipeline, gateway)
            text += "".join([chunk.choices[0].text async for chunk in stream])
            assert text == whole.text
            assert await gateway.metric("strata_replays_total") == 1


@pytest.fixture(params=[pytest.param(0, marks=pytest.mark.slow), 1], ids=["first stage", "last stage"])
def failing_stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A stage that fails at every sequence whose prompt begins with the poisonous token."""
    run = StageExecutor.run
    poisonous: set[int] = set()

    def poisoned(
        self: StageExecutor, header: FrameHeader, inputs: torch.Tensor, received: Sequence[torch.Tensor] = ()
    ) -> Passed | Answered | None:
        if self.role.stage == 0:
            if header.step == 0:
                poisonous.clear()  # a new epoch numbers its sequences anew
            ends = torch.tensor([segment.length for segment in header.segments]).cumsum(0).tolist()
            for segment, end in zip(header.segments, ends, strict=True):
                if segment.start == 0 and inputs[end - segment.length] == POISON:
                    poisonous.add(segment.sequence)
        if self.role.stage == request.param and poisonous & {segment.sequence for segment in header.segments}:
            raise IndexError("index out of range in self")
        return run(self, header, inputs, received)

    monkeypatch.setattr(StageExecutor, "run", poisoned)
    return int(request.param)


async def test_a_request_that_fails_its_steps_ends_and_the_others_go_on(model: Path, failing_stage: int) -> None:
    prompts = [[5, 6], [7], [POISON, 8], [9, 10, 11]]
    with PipelineHarness(SLOTS) as pipeline:
        async with a_gateway(load_tokenizer(model)) as gateway:
            serve(pipeline, gateway, model)
            await gateway.until(lambda: gateway.dispatcher.status().leaders_connected)
            asked = [asyncio.create_task(gateway.complete(prompt=prompt, max_tokens=20)) for prompt in prompts]
            for _ in range(3):
                failing = pipeline.slots[SLOTS[failing_stage]]
                status = await asyncio.to_thread(failing.until, lambda status: status.failure)
                assert "index out of range in self" in status.failure
                await gateway.until(lambda: not gateway.dispatcher.status().leaders_connected)  # it has heard why
                await asyncio.to_thread(pipeline.serve, even_plan(model, SLOTS, max_model_len=MAX_MODEL_LEN))
                route(pipeline, gateway)
            answers = [await task for task in asked]
            assert [answer.status_code for answer in answers] == [200, 200, 500, 200]
            message = answers[2].json()["error"]["message"]
            assert (
                f"failed 3 times at this request, the last time in stage {failing_stage}: index out of range" in message
            )
            assert pipeline.epoch == 4
