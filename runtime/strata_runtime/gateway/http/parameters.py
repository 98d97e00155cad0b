"""Request bodies of the OpenAI interface: what is taken, what is refused by name.

Called by `prompts`. Three kinds of fields: those of the models below are consumed; `HARMLESS` ones change nothing about
an answer by their own definition and are accepted; `UNSUPPORTED` ones are accepted only with the value that means "not
used". Everything else is unknown. Nothing is silently ignored: a client that asks for something gets it or an error.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from strata_planner.contract.frames import MOST_LOGPROBS
from strata_runtime.gateway.errors import InvalidRequestError

HARMLESS = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
})  # fmt: skip

# What each of these may be; null always counts as not given.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

MOST_STOP_STRINGS = 16
MOST_CHOICES = 128

_StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_TokenId = Annotated[int, Field(ge=0)]
_Prompt = str | list[str] | list[_TokenId] | list[list[_TokenId]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StreamOptions(_Body):
    """`include_obfuscation` pads chunks against traffic analysis; there is no padding here."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationBody(_Body):
    """What completions and chat share. `top_k`, `ignore_eos` and `stop_token_ids` are vLLM's extensions."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)  # 0 and -1: all
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stop: _StopString | Annotated[list[_StopString], Field(max_length=MOST_STOP_STRINGS)] = []
    stop_token_ids: list[_TokenId] = []
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: _Prompt
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)


class TextPart(_Body):
    """The one kind of content part that is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn. The newer role `developer` is what templates know as `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, message: Any) -> Any:
        """Clients send an answer of ours back with its empty fields (refusal, tool_calls, annotations)."""
        if not isinstance(message, dict):
            return message
        return {name: value for name, value in message.items() if value is not None and value != []}

    def for_template(self) -> dict[str, Any]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. `max_completion_tokens` is the newer name of `max_tokens`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)


B = TypeVar("B", bound=GenerationBody)


def parse_body(data: bytes, kind: type[B]) -> B:
    """Decode and check a body. Raises InvalidRequestError that names the parameter."""
    fields = _supported(_decode(data))
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _explained(error) from error
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options is only for stream=true: set it, or leave stream_options out", param="stream_options"
        )
    if isinstance(body, ChatBody):
        _check_chat(body)
    elif isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "echo together with logprobs is not supported (prompts have no log probabilities): leave one of them out",
            param="echo",
        )
    return body


def _decode(data: bytes) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}; send a JSON object") from error
    if not isinstance(content, dict):
        raise InvalidRequestError(f"the body is a JSON {type(content).__name__}: send a JSON object")
    return content


def _supported(content: dict[str, Any]) -> dict[str, Any]:
    """Without what is null, harmless or unused; refuses what is unsupported."""
    fields = {}
    for name, value in content.items():
        if value is None or name in HARMLESS:
            continue
        if name not in UNSUPPORTED:
            fields[name] = value
        elif value not in UNSUPPORTED[name]:
            allowed = " or ".join(json.dumps(neutral) for neutral in UNSUPPORTED[name])
            fix = f"leave it out, or send {allowed}" if allowed else "leave it out"
            raise InvalidRequestError(
                f"{name}={_shown(value)} is not supported by this server: {fix}",
                param=name,
                code="unsupported_parameter",
            )
    return fields


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            f"top_logprobs={body.top_logprobs} needs logprobs=true: set it, or leave top_logprobs out",
            param="top_logprobs",
        )
    if None not in {body.max_tokens, body.max_completion_tokens} and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequestError(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} contradict each "
            "other: send one of them",
            param="max_tokens",
        )


def _explained(error: ValidationError) -> InvalidRequestError:
    """The first problem; of a union's alternatives the one that came furthest: past the type, then deepest."""
    problem = max(
        error.errors(include_url=False),
        key=lambda problem: (not problem["type"].endswith("_type"), len(problem["loc"])),
    )
    path = [str(part) for part in problem["loc"] if not _is_alternative(str(part))]
    param = ".".join(path)
    if problem["type"] == "missing":
        return InvalidRequestError(f"{param} is missing: it is required", param=param, code="missing_parameter")
    if problem["type"] == "extra_forbidden":
        return InvalidRequestError(
            f"{param} is not a parameter of this server: check its spelling or leave it out",
            param=param,
            code="unknown_parameter",
        )
    if path[0] == "prompt" and problem["type"].endswith("_type"):
        rule = "send a string, a list of strings, a list of token ids, or a list of such lists"
        return InvalidRequestError(f"prompt is not valid: {rule}", param="prompt")
    rule = problem["msg"][:1].lower() + problem["msg"][1:]
    return InvalidRequestError(f"{param}={_shown(problem['input'])} is not valid: {rule}", param=param)


def _is_alternative(part: str) -> bool:
    """Pydantic names the members of a union in an error's path: `str`, `list[str]`, `constrained-str`, ..."""
    return part in {"str", "int", "constrained-str"} or part.startswith(("list[", "function-", "constrained-"))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
