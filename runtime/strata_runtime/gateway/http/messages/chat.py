"""From a body of the Messages interface to the chat that it means. Called by `app`, off its event loop; pure."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Raw

from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.bodies import quoted, read, shown
from strata_runtime.gateway.http.messages.parameters import (
    Block,
    CountBody,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    Tool,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from strata_runtime.gateway.http.parameters import ChatBody
from strata_runtime.gateway.http.prompts import Bounds, Prepared, prepare_chat
from strata_runtime.gateway.http.tokenization import TokenizeBody, tokens_of
from strata_runtime.gateway.http.turns import (
    Turns,
    encoded,
    function_tool,
    named_choice,
    naming,
    schema_format,
    with_form_named,
)
from strata_runtime.gateway.text.tokenizer import Tokenizer

GLUE = "\n"  # between blocks of text, which are paragraphs of their own
FAILED = "Error: "  # what results of calls that failed begin with: templates have no other place to say so
_NAMES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
# Variables of chat templates that turn thoughts on and off, each with what a template has that reads it.
_SWITCHES = {
    "enable_thinking": "enable_thinking",  # Qwen3, GLM
    "thinking": "thinking is defined",  # DeepSeek V3.1
}
_ROLES = {TextBlock: ("user", "assistant", "system"), ToolResultBlock: ("user",)}  # the others are the assistant's


@dataclass(frozen=True, slots=True)
class _Chat:
    """What prompts are made of, in a chat's terms."""

    messages: Raw
    tools: Raw | None
    tool_choice: Raw | None
    is_parallel: bool
    continues: bool
    variables: dict[str, Any]


def prepare_messages(body: MessagesBody, tokenizer: Tokenizer, bounds: Bounds) -> tuple[Prepared, bool]:
    """The request, and whether it may have fewer tokens than it asks for: as many as are left behind its prompt."""
    chat = _chat(body, tokenizer)
    form = body.output_config.format
    wanted = ChatBody(
        model=body.model,
        messages=chat.messages,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel_tool_calls=chat.is_parallel,
        continue_final_message=chat.continues,
        chat_template_kwargs=chat.variables,
        reasoning_effort=body.output_config.effort,
        response_format=None if form is None else schema_format("answer", form.schema),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        stream=body.stream,
    )
    with naming(_NAMES):
        prepared = prepare_chat(wanted, tokenizer, bounds)
    (request,) = prepared.requests
    limited = replace(request, max_tokens=min(request.max_tokens, body.max_tokens))
    prepared = replace(prepared, requests=(limited,))
    return with_form_named(prepared, _NAMES), body.max_tokens > request.max_tokens


def count_tokens(body: CountBody, tokenizer: Tokenizer, max_tokens: int) -> bytes:
    """The answer as JSON. `max_tokens`: what a pipeline takes, 0 where nobody knows. Raises InvalidRequestError beyond its bound."""
    chat = _chat(body, tokenizer)
    effort = body.output_config.effort
    counted = TokenizeBody(
        messages=chat.messages,
        tools=chat.tools,
        continue_final_message=chat.continues,
        chat_template_kwargs=chat.variables | ({} if effort is None else {"reasoning_effort": effort}),
    )
    return msgspec.json.encode({"input_tokens": len(tokens_of(counted, tokenizer, max_tokens))})


def _chat(body: CountBody, tokenizer: Tokenizer) -> _Chat:
    turns = Turns()
    if body.system:
        turns.add("system", _text(body.system))
    for index, turn in enumerate(body.messages):
        _add(turns, turn, f"messages.{index}")
    if not body.messages:
        raise InvalidRequestError("messages=[] has no message: send at least 1", param="messages")
    if turns.ends_with_calls:
        raise InvalidRequestError(
            "messages end with a tool_use block: send its tool_result behind it",
            param=f"messages.{len(body.messages) - 1}",
        )
    tools, (choice, is_parallel) = _tools(body.tools), _tool_choice(body)
    return _Chat(
        messages=turns.encoded(),
        tools=None if isinstance(body.tool_choice, ToolChoiceNone) else tools,
        tool_choice=choice,
        is_parallel=is_parallel,
        continues=turns.ends_with_text,
        variables=_variables(body, tokenizer),
    )


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else GLUE.join(block.text for block in content)


def _add(turns: Turns, turn: Turn, param: str) -> None:
    """The parts of a message; those of further messages of the same role belong to the same turn."""
    blocks: list[Block] = [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content
    for index, block in enumerate(blocks):
        if turn.role not in _ROLES.get(type(block), ("assistant",)):
            kind = block.__struct_config__.tag
            raise InvalidRequestError(
                f"{param}.content.{index}.type={kind!r} is not valid in a message of role {turn.role!r}: thoughts and calls are "
                "the assistant's, results of calls the user's",
                param=f"{param}.content.{index}.type",
            )
        match block:
            case TextBlock(text=text) if turn.role == "assistant":
                turns.say(text)
            case TextBlock(text=text):
                turns.add(turn.role, text, glue=GLUE)
            case ThinkingBlock(thinking=thinking):
                turns.think(thinking)
            case ToolUseBlock():
                turns.call(block.id, block.name, _input(block.input, f"{param}.content.{index}.input"))
            case ToolResultBlock():
                told = _text(block.content or "")
                turns.result(block.tool_use_id, FAILED + told if block.is_error else told)


def _input(raw: Raw, param: str) -> str:
    read(raw, dict[str, Raw], param)
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{param} is not valid JSON: {error}; send text as UTF-8", param=param) from error


def _tools(tools: list[Raw]) -> Raw | None:
    """As a chat has them; the types tell which of them are the client's own."""
    given = []
    for index, raw in enumerate(tools):
        param = f"tools.{index}"
        kind = read(raw, dict[str, Raw], param).get("type", _CUSTOM)
        if bytes(kind) not in {b'"custom"', b"null"}:
            raise InvalidRequestError(
                f"{param}.type={shown(kind)} is not supported by this server, which has no tools of its own: send tools with an "
                "input_schema, and call them yourself",
                param=f"{param}.type",
                code="unsupported_tool",
            )
        tool = read(raw, Tool, param)
        read(tool.input_schema, dict[str, Raw], f"{param}.input_schema")
        given.append(function_tool(tool.name, tool.description, tool.input_schema, tool.strict))
    return encoded(given) if given else None


_CUSTOM = Raw(b'"custom"')


def _tool_choice(body: CountBody) -> tuple[Raw | None, bool]:
    """As a chat has it, and whether several calls may come at once."""
    choice = body.tool_choice
    match choice:
        case None | ToolChoiceNone():
            return None, True
        case ToolChoiceAuto():
            wanted: Any = "auto"
        case ToolChoiceAny():
            wanted = "required"
        case ToolChoiceTool(name=name):
            wanted = named_choice(name)
    if not body.tools:
        raise InvalidRequestError("tool_choice needs tools: send some, or leave it out", param="tool_choice")
    return encoded(wanted), not choice.disable_parallel_tool_use


def _variables(body: CountBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """What turns thoughts on or off, where that is asked for and does not go without saying."""
    wanted = isinstance(body.thinking, ThinkingEnabled)
    if not wanted and not isinstance(body.thinking, ThinkingDisabled):
        return {}
    for variable, mark in _SWITCHES.items():
        if tokenizer.reads(mark):
            return {variable: wanted}
    if wanted == (tokenizer.reasoning_format is not None):
        return {}
    kind = "enabled" if wanted else "disabled"
    why = "does not think aloud" if wanted else "always thinks"
    raise InvalidRequestError(
        f"thinking.type={quoted(kind)} is not supported by this model, which {why}: leave thinking out",
        param="thinking.type",
        code="unsupported_parameter",
    )
