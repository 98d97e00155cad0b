"""From the bytes of a request to its body, its prompts and its messages, within bounds. Called by `prompts` and `app`.

Nothing is built before it is counted, and the first error ends the reading: a body of a megabyte costs a few megabytes
and some milliseconds whatever is in it. The fields are taken apart as raw JSON first, then each is read as its own type.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.parameters import (
    OPENAI,
    ChatBody,
    GenerationBody,
    Others,
    TokenId,
)

T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)

MOST_SHOWN = 80  # characters of a value that an error repeats
_PROMPT_RULE = "send a string, a list of strings, a list of token ids, or a list of such lists"


def parse_body(data: bytes, kind: type[B], others: Others = OPENAI) -> B:
    """Decode and check a body; prompts and messages stay as they came. Raises InvalidRequestError that names the parameter."""
    given = _supported(_taken_apart(data, kind, others), others)
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.name in given:
            values[field.name] = read(given[field.name], field.type, field.name)
        elif field.required:
            raise missing(field.name)
    body = kind(**values)
    if isinstance(body, GenerationBody):
        _check(body)
    return body


def separate(prompt: Raw) -> list[Raw]:
    """The prompts of a request as they came: the first element tells one list of ids from several prompts."""
    text = bytes(prompt)
    first = text[1:].lstrip()[:1]
    if text[:1] == b"[" and first == b"]":
        raise InvalidRequestError("prompt=[] has no prompt: send a string or token ids", param="prompt")
    if text[:1] == b"[" and first in {b'"', b"["}:
        return read(prompt, list[Raw], "prompt")
    return [prompt]


def read_prompt(raw: Raw, param: str, most_tokens: int) -> str | list[int]:
    """Text or token ids."""
    text = bytes(raw)
    if text[:1] == b'"':
        return read(raw, str, param)
    if text[:1] != b"[":
        raise InvalidRequestError(f"{param}={shown(raw)} is not valid: {_PROMPT_RULE}", param=param)
    count = text.count(b",") + 1  # exact for a list of numbers, and anything else is refused anyway
    if count > most_tokens:
        raise InvalidRequestError(
            f"{param} has {count} tokens, this deployment takes at most {most_tokens} for prompt and answer: shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    return read(raw, list[TokenId], param)


def read_tokens(raw: Raw, param: str, most_tokens: int) -> list[int]:
    """Token ids that nothing is generated from."""
    text = bytes(raw)
    if text[:1] != b"[":
        raise InvalidRequestError(f"{param}={shown(raw)} is not valid: send a list of token ids", param=param)
    count = text.count(b",") + 1
    if count > most_tokens:
        raise InvalidRequestError(
            f"{param} has {count} tokens, the most at once is {most_tokens}: send them in parts", param=param
        )
    return read(raw, list[TokenId], param)


def _taken_apart(data: bytes, kind: type[msgspec.Struct], others: Others) -> dict[str, Raw]:
    try:
        fields = msgspec.json.decode(data, type=_fields_of(kind, others))
    except msgspec.ValidationError as error:
        words = str(error).split("`")
        if "unknown field" in words[0]:
            name = shown(words[1].encode())
            raise InvalidRequestError(
                f"{name} is not a parameter of this server: check its spelling or leave it out",
                param=name,
                code="unknown_parameter",
            ) from error
        found = words[3] if len(words) > 3 else "value"  # a number out of range is told without its kind
        raise InvalidRequestError(f"the body is a JSON {found}: send a JSON object") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}; send a JSON object") from error
    given = ((name, getattr(fields, name)) for name in fields.__struct_fields__)
    return {name: raw for name, raw in given if raw is not msgspec.UNSET}


def _supported(given: dict[str, Raw], others: Others) -> dict[str, Raw]:
    """Without what is null, harmless or unused; refuses what is unsupported."""
    fields = {}
    for name, raw in given.items():
        if name in others.harmless or bytes(raw) == b"null":
            continue
        if name not in others.unsupported:
            fields[name] = raw
        elif not _is_unused(raw, others.unsupported[name]):
            allowed = " or ".join(json.dumps(neutral) for neutral in others.unsupported[name])
            fix = f"leave it out, or send {allowed}" if allowed else "leave it out"
            raise InvalidRequestError(
                f"{name}={shown(raw)} is not supported by this server: {fix}",
                param=name,
                code="unsupported_parameter",
            )
    return fields


def _is_unused(raw: Raw, neutral: tuple[Any, ...]) -> bool:
    if len(bytes(raw)) > MOST_SHOWN:  # longer than any value that means "not used"
        return False
    try:
        return msgspec.json.decode(raw) in neutral
    except ValueError:
        return False


def _check(body: GenerationBody) -> None:
    """What no field can tell alone."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options is only for stream=true: set it, or leave stream_options out", param="stream_options"
        )
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise InvalidRequestError(
            "stream_options.include_obfuscation=true is not supported by this server: leave it out, or send false",
            param="stream_options.include_obfuscation",
        )
    for name in ("max_tokens", "max_completion_tokens"):
        most = getattr(body, name, None)
        if most is not None and body.min_tokens > most:
            raise InvalidRequestError(
                f"min_tokens={body.min_tokens} is more than {name}={most}: send at most as many", param="min_tokens"
            )
    if isinstance(body, ChatBody):
        _check_chat(body)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError(
            "prompt_logprobs is only told in answers that are not streamed: leave one of them out",
            param="prompt_logprobs",
        )


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            f"top_logprobs={body.top_logprobs} needs logprobs=true: set it, or leave top_logprobs out",
            param="top_logprobs",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message=true goes on with the last message, add_generation_prompt=true begins another: send one of them",
            param="continue_final_message",
        )
    if None not in {body.max_tokens, body.max_completion_tokens} and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequestError(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} contradict each "
            "other: send one of them",
            param="max_tokens",
        )


def fields_of(raw: Raw, param: str) -> dict[str, Raw]:
    """Of an object, those that say something: clients send an answer of ours back with its empty fields."""
    fields = read(raw, dict[str, Raw], param)
    return {name: value for name, value in fields.items() if bytes(value) not in {b"null", b"[]"}}


def check_role(role: str, roles: Sequence[str], param: str) -> None:
    """`param`: of the message."""
    if role not in roles:
        rule = f"the roles are {', '.join(map(repr, roles))}"
        raise InvalidRequestError(f"{param}.role={quoted(role)} is not valid: {rule}", param=f"{param}.role")


def read(raw: Raw, kind: type[T], param: str) -> T:
    """One value as its type. Raises InvalidRequestError with its path."""
    if kind in {Raw, Raw | None}:
        return raw  # type: ignore[return-value]
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at `$")
        path = param + place.rstrip("`").replace("[...]", "").replace("[", ".").replace("]", "")
        if "missing required field" in rule:
            raise missing(f"{path}.{rule.split('`')[1]}") from error
        if "unknown field" in rule:
            raise unknown(f"{path}.{rule.split('`')[1]}") from error
        if param.startswith("prompt"):
            rule = f"{rule}; {_PROMPT_RULE}"
        rule = rule[:1].lower() + rule[1:]
        raise InvalidRequestError(f"{path} is not valid: {rule} ({param}={shown(raw)})", param=path) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is not valid JSON: {error}; send text as UTF-8", param=param) from error


def missing(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is missing: it is required", param=param, code="missing_parameter")


def unknown(param: str) -> InvalidRequestError:
    param = shown(param.encode())
    return InvalidRequestError(
        f"{param} is not a parameter of this server: check its spelling or leave it out",
        param=param,
        code="unknown_parameter",
    )


def shown(raw: bytes | Raw) -> str:
    text = bytes(raw)[: MOST_SHOWN + 1].decode("utf-8", "replace")
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def quoted(text: str) -> str:
    return shown(json.dumps(text[:MOST_SHOWN], ensure_ascii=False).encode())


@cache
def _fields_of(kind: type[msgspec.Struct], others: Others) -> type[msgspec.Struct]:
    """The same names with values as they came; others are refused at once."""
    names = {*kind.__struct_fields__, *others.harmless, *others.unsupported}
    return msgspec.defstruct(
        f"{kind.__name__}Fields",
        [(name, Raw | msgspec.UnsetType, msgspec.UNSET) for name in sorted(names)],
        forbid_unknown_fields=True,
    )
