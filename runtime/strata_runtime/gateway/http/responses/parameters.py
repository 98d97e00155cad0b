"""Request bodies of the Responses interface: what is taken, what is refused by name. Read by `bodies`; translated by `chat`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from strata_planner.contract.frames import MOST_LOGPROBS
from strata_runtime.gateway.http.bodies import parse_body
from strata_runtime.gateway.http.parameters import MOST_TOKENS, Others, ToolName

# Nothing is stored here, whatever `store` says: answers say `"store": false`.
OTHERS = Others(
    harmless=frozenset({
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
        "user",
    }),
    unsupported={
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
    },
)  # fmt: skip

# Thoughts come as they are, so that they can be sent back: there is nothing to encrypt.
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
MOST_METADATA = 16
NULL = Raw(b"null")


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of which every field is known."""


class FunctionTool(_Strict, frozen=True):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Raw = msgspec.field(default_factory=lambda: NULL)
    strict: bool | None = None


class TextFormat(_Strict, frozen=True):
    """`name`, `description` and `strict` change nothing: every schema is kept to the letter."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: Raw = msgspec.field(default_factory=lambda: NULL)
    description: str | None = None
    strict: bool | None = None


class TextConfig(_Strict, frozen=True):
    format: TextFormat = msgspec.field(default_factory=TextFormat)
    verbosity: None = None


class ReasoningConfig(_Strict, frozen=True):
    """Thoughts come as they are: there is no summary of them."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    summary: None = None
    generate_summary: None = None


class EventOptions(_Strict, frozen=True):
    """Padding against traffic analysis; there is none here."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses. `tools` are told apart by their types first, and so are the items of `input`."""

    model: str
    input: Raw
    instructions: str = ""
    max_output_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    tools: list[Raw] = []
    tool_choice: Raw | None = None
    parallel_tool_calls: bool = True
    text: TextConfig = msgspec.field(default_factory=TextConfig)
    reasoning: ReasoningConfig = ReasoningConfig()
    include: Annotated[list[Includable], Meta(max_length=16)] = []
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] = 0
    truncation: Literal["disabled"] = "disabled"
    metadata: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MOST_METADATA)
    ] = {}  # told again in the answer
    stream: bool = False
    stream_options: EventOptions = EventOptions()

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs > 0 or "message.output_text.logprobs" in self.include


def read_response(data: bytes) -> ResponsesBody:
    """Raises InvalidRequestError that names the parameter."""
    return parse_body(data, ResponsesBody, OTHERS)
