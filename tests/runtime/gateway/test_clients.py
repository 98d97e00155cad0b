"""Client packages that people build on, unchanged, against a gateway behind real HTTP: langchain-openai and litellm.

They are the extra `clients`: litellm holds back openai and huggingface-hub, so no other environment has it.
"""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader, route_to
from tests.runtime.gateway.harness import MODEL_NAME, a_gateway, a_leader, scripted
from tests.runtime.gateway.models import write_model_folder
from training.tokenizer import CHAT_TEMPLATE

# Said before they are imported: nothing here leaves this machine.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "LITELLM_MODE": "PRODUCTION"}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),  # one gateway for all: the process that tries grammars starts once
    pytest.mark.filterwarnings(
        "ignore:.*ReadOnly.*:UserWarning",  # litellm's types
        "ignore:Accessing the 'model_:DeprecationWarning",  # litellm's chunks
        "ignore:Pydantic serializer warnings:UserWarning",  # openai's parsed answers in langchain's streams
    ),
]

FOX = "the quick brown fox"
MOST_TOKENS = 4096
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Model:
    """What the deployment's model says, and what it was asked."""

    def __init__(self, leader: FakeLeader, tokenizer: Tokenizer, url: str) -> None:
        self._leader = leader
        self._tokenizer = tokenizer
        self.url = f"{url}/v1"

    def says(self, text: str) -> None:
        self._leader.model = scripted(self._tokenizer, text)

    @property
    def prompt(self) -> str:
        """Of the latest request."""
        return self._tokenizer.decode(self._leader.submits[-1].prompt, special_tokens=True)

    @property
    def grammar(self) -> Any:
        """That the latest answer was held to."""
        rules = self._leader.submits[-1].sampling.rules
        return None if rules is None else rules.grammar


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"), chat_template=CHAT_TEMPLATE)
    tokenizer = load_tokenizer(folder)
    async with a_leader(scripted(tokenizer, FOX), max_tokens=MOST_TOKENS) as leader, a_gateway(tokenizer) as harness:
        harness.dispatcher.set_route(route_to(leader, max_model_len=MOST_TOKENS))
        await harness.until(lambda: harness.dispatcher.status().leaders_connected)
        async with harness.serving() as url:
            yield Model(leader, tokenizer, url)


class TestLangchain:
    @pytest.fixture
    def chat(self, model: Model) -> Any:
        package = pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")
        return package.ChatOpenAI(
            base_url=model.url, api_key="none", model=MODEL_NAME, max_retries=0, stream_usage=True
        )

    @pytest.fixture
    def tool(self) -> Any:
        tools = pytest.importorskip("langchain_core.tools")

        @tools.tool
        def add(a: int, b: int) -> int:
            """The sum of two numbers."""
            return a + b

        return add

    @pytest.fixture
    def sums(self) -> Any:
        pydantic = pytest.importorskip("pydantic")
        return pydantic.create_model("Sum", a=(int, ...), b=(int, ...), why=(str | None, None), __doc__="Two numbers.")

    async def test_an_answer(self, model: Model, chat: Any) -> None:
        model.says(FOX)
        answer = await chat.ainvoke([("system", "Be brief."), ("user", "hello")])
        assert (answer.content, answer.response_metadata["finish_reason"]) == (FOX, "stop")
        assert answer.usage_metadata["output_tokens"] > 0

    async def test_a_stream(self, model: Model, chat: Any) -> None:
        model.says(FOX)
        chunks = [chunk async for chunk in chat.astream("hello", stop=["fox"], seed=1, logprobs=True, top_logprobs=2)]
        assert "".join(chunk.content for chunk in chunks) == FOX.removesuffix("fox")
        assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1

    async def test_a_tool_and_back(self, model: Model, chat: Any, tool: Any) -> None:
        messages = pytest.importorskip("langchain_core.messages")
        with_tools = chat.bind_tools([tool])
        question = messages.HumanMessage("What is 1 + 2?")
        model.says(f"I shall add.\n{CALL}\n{CALL}")
        answer = await with_tools.ainvoke([question])
        assert answer.content == "I shall add.\n"
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})] * 2
        results = [await tool.ainvoke(call) for call in answer.tool_calls]
        model.says("It is 3.")
        assert (await with_tools.ainvoke([question, answer, *results])).content == "It is 3."
        assert "<tool_response>\n3\n</tool_response>" in model.prompt
        assert '"arguments": {"a": 1, "b": 2}' in model.prompt

    async def test_a_streamed_call(self, model: Model, chat: Any, tool: Any) -> None:
        model.says(CALL)
        chunks = [chunk async for chunk in chat.bind_tools([tool]).astream("What is 1 + 2?")]
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("add", {"a": 1, "b": 2})]
        assert model.grammar is None

    @pytest.mark.parametrize("choice", ["any", "add", True])
    async def test_a_call_that_must_come(self, model: Model, chat: Any, tool: Any, choice: Any) -> None:
        model.says(CALL)
        answer = await chat.bind_tools([tool], tool_choice=choice, strict=True).ainvoke("What is 1 + 2?")
        assert answer.tool_calls[0]["args"] == {"a": 1, "b": 2}
        assert model.grammar.kind == "structural_tag"

    async def test_no_call_wanted(self, model: Model, chat: Any, tool: Any) -> None:
        model.says(CALL)
        answer = await chat.bind_tools([tool], tool_choice="none").ainvoke("What is 1 + 2?")
        assert (answer.content, answer.tool_calls) == (CALL, [])

    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    @pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
    async def test_structured_output(self, model: Model, chat: Any, sums: Any, method: str, *, streams: bool) -> None:
        value = json.dumps({"a": 1, "b": 2, "why": None})
        model.says(CALL.replace('"add"', '"Sum"') if method == "function_calling" else value)
        structured = chat.with_structured_output(sums, method=method)
        if streams:
            answer = [part async for part in structured.astream("hello")][-1]
        else:
            answer = await structured.ainvoke("hello")
        assert (answer.a, answer.b, answer.why) == (1, 2, None)
        assert model.grammar is not None

    async def test_a_schema_as_a_dictionary(self, model: Model, chat: Any) -> None:
        model.says('{"a": 1}')
        schema = {"title": "One", "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        structured = chat.with_structured_output(schema, method="json_schema", strict=True, include_raw=True)
        assert (await structured.ainvoke("hello"))["parsed"] == {"a": 1}

    async def test_a_mistake(self, chat: Any) -> None:
        with pytest.raises(Exception, match="temperature") as refused:
            await chat.ainvoke("hello", temperature=3)
        assert refused.value.status_code == 400


class TestLitellm:
    @pytest.fixture
    def ask(self, model: Model) -> Any:
        litellm = pytest.importorskip("litellm", reason="the extra `clients` is not installed")
        litellm.suppress_debug_info = True

        async def ask(*messages: dict[str, Any], **parameters: Any) -> Any:
            said = list(messages) or [{"role": "user", "content": "hello"}]
            where = {"api_base": model.url, "api_key": "none", "max_retries": 0}
            return await litellm.acompletion(model=f"openai/{MODEL_NAME}", messages=said, **where, **parameters)

        return ask

    async def test_an_answer(self, model: Model, ask: Any) -> None:
        model.says(FOX)
        answer = await ask(temperature=0.5, top_p=0.9, seed=1, max_tokens=50, top_k=5)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (FOX, "stop")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    async def test_a_stream(self, model: Model, ask: Any) -> None:
        model.says(FOX)
        chunks = [chunk async for chunk in await ask(stream=True, stream_options={"include_usage": True})]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == FOX
        assert [chunk.usage.completion_tokens > 0 for chunk in chunks if getattr(chunk, "usage", None)] == [True]

    async def test_a_tool_and_back(self, model: Model, ask: Any) -> None:
        question = {"role": "user", "content": "What is 1 + 2?"}
        model.says(CALL)
        answer = (await ask(question, tools=[ADD], tool_choice="auto")).choices[0]
        (call,) = answer.message.tool_calls
        assert (answer.finish_reason, call.function.name) == ("tool_calls", "add")
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        model.says("It is 3.")
        result = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "3"}
        answer = await ask(question, answer.message, result, tools=[ADD])
        assert answer.choices[0].message.content == "It is 3."
        assert "<tool_response>\n3\n</tool_response>" in model.prompt

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
    async def test_a_streamed_call_that_must_come(self, model: Model, ask: Any, choice: Any) -> None:
        litellm = pytest.importorskip("litellm")
        model.says(CALL)
        chunks = [chunk async for chunk in await ask(tools=[ADD], tool_choice=choice, stream=True)]
        (choice,) = litellm.stream_chunk_builder(chunks).choices
        assert choice.finish_reason == "tool_calls"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
        assert model.grammar is not None

    async def test_an_answer_of_a_form(self, model: Model, ask: Any) -> None:
        pydantic = pytest.importorskip("pydantic")
        model.says('{"a": 1}')
        one = pydantic.create_model("One", a=(int, ...))
        answer = await ask(response_format=one)
        assert one.model_validate_json(answer.choices[0].message.content).a == 1
        assert model.grammar.kind == "json_schema"
        await ask(response_format={"type": "json_object"})
        assert model.grammar.text == '{"type":"object"}'

    async def test_a_mistake(self, ask: Any) -> None:
        litellm = pytest.importorskip("litellm")
        with pytest.raises(litellm.BadRequestError, match="temperature"):
            await ask(temperature=3)
