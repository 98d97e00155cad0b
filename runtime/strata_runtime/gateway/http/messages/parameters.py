"""Request bodies of the Messages interface: what is taken, what is refused by name. Read by `bodies`; translated by `chat`.

Whatever is not here is refused: blocks with images, documents or results of Anthropic's own tools are no type that is known.
"""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.bodies import parse_body
from strata_runtime.gateway.http.parameters import MOST_STOP_STRINGS, MOST_TOKENS, Others, StopString, ToolName

OTHERS = Others(
    harmless=frozenset({"cache_control", "metadata", "service_tier"}),
    unsupported={
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_format": (),
        "speed": ("standard",),
    },
)

_NAME_RULE = "the blocks here are text, tool_use, tool_result and thinking"
_Nothing = Annotated[list[None], Meta(max_length=0)] | None
_Effort = Annotated[str, Meta(max_length=64)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of which every field is known."""


class CacheControl(_Strict, frozen=True):
    """Prefixes are found here without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(_Strict, frozen=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: _Nothing = None


class ThinkingBlock(_Strict, frozen=True, tag_field="type", tag="thinking"):
    """Thoughts here have no signature to be checked."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(_Strict, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw
    cache_control: CacheControl | None = None
    caller: None = None
    toolset_name: None = None


class ToolResultBlock(_Strict, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class Turn(_Strict, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(_Strict, frozen=True):
    """One of the client's own. `eager_input_streaming`: as all input is streamed here."""

    name: ToolName
    input_schema: Raw
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    input_examples: _Nothing = None


class ToolChoiceAuto(_Strict, frozen=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool = False


class ToolChoiceAny(_Strict, frozen=True, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool = False


class ToolChoiceTool(_Strict, frozen=True, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool = False


class ToolChoiceNone(_Strict, frozen=True, tag_field="type", tag="none"):
    pass


class ThinkingEnabled(_Strict, frozen=True, tag_field="type", tag="enabled"):
    """`budget_tokens` is a target by its own definition; thoughts and answer together have `max_tokens`."""

    budget_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    display: Literal["summarized"] | None = None


class ThinkingAdaptive(_Strict, frozen=True, tag_field="type", tag="adaptive"):
    """As the model's template has it."""

    display: Literal["summarized"] | None = None


class ThinkingDisabled(_Strict, frozen=True, tag_field="type", tag="disabled"):
    pass


class JsonFormat(_Strict, frozen=True):
    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(_Strict, frozen=True):
    effort: _Effort | None = None
    format: JsonFormat | None = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: what a prompt is made of. `tools` are told apart by their types first."""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] = ""
    tools: list[Raw] = []
    tool_choice: ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig = msgspec.field(default_factory=OutputConfig)


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    stop_sequences: Annotated[list[StopString], Meta(max_length=MOST_STOP_STRINGS)] = []
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0


B = TypeVar("B", bound=CountBody)


def read_messages(data: bytes) -> MessagesBody:
    """Raises InvalidRequestError that names the parameter."""
    return _read(data, MessagesBody)


def read_count(data: bytes) -> CountBody:
    return _read(data, CountBody)


def _read(data: bytes, kind: type[B]) -> B:
    try:
        return parse_body(data, kind, OTHERS)
    except InvalidRequestError as error:
        if error.param is None or not (error.param.startswith("messages.") and error.param.endswith(".type")):
            raise
        raise InvalidRequestError(f"{error}; {_NAME_RULE}", param=error.param, code=error.code) from error
