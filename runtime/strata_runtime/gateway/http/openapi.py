"""The description of the interface at /openapi.json: paths as they are routed, bodies as `bodies` reads them.

Called by `app`. The routes take requests as they come, so FastAPI knows their paths alone; what bodies may have is told
by the structs that read them.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from strata_runtime.gateway.http.conversation import ROLES
from strata_runtime.gateway.http.messages.errors import is_messages
from strata_runtime.gateway.http.messages.parameters import CountBody, MessagesBody
from strata_runtime.gateway.http.parameters import HARMLESS, UNSUPPORTED, ChatBody, CompletionBody
from strata_runtime.gateway.http.responses.parameters import ResponsesBody
from strata_runtime.gateway.http.tokenization import DetokenizeBody, TokenizeBody

Json = dict[str, Any]

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_OPEN = frozenset({"/health", "/metrics", "/ping", "/version"})  # no key is asked for
_TEXT: Json = {"type": "string"}
_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": _TEXT},
                    },
                },
            ]
        },
        "name": _TEXT,
    },
}
_PROMPTS: Json = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _TOKENS, {"type": "array", "items": _TOKENS}]}
_MESSAGES: Json = {"type": "array", "minItems": 1, "items": _MESSAGE}
_OBJECT: Json = {"type": "object"}
_OBJECTS: Json = {"type": "array", "items": _OBJECT}
_RAW: dict[str, Json] = {  # fields that structs keep as they came
    "CompletionBody.prompt": _PROMPTS,
    "ChatBody.messages": _MESSAGES,
    "TokenizeBody.prompt": _TEXT,
    "TokenizeBody.messages": _MESSAGES,
    "DetokenizeBody.tokens": _TOKENS,
    "MessagesBody.tools": _OBJECTS,
    "CountBody.tools": _OBJECTS,
    "ToolUseBlock.input": _OBJECT,
    "JsonFormat.schema": _OBJECT,
    "ResponsesBody.input": {"anyOf": [_TEXT, _OBJECTS | {"minItems": 1}]},
    "ResponsesBody.tools": _OBJECTS,
    "TextFormat.schema": {"type": ["object", "null"]},
}
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR: Json = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "properties": {"type": _TEXT, "message": _TEXT}},
    },
}
_ABOUT = (
    "OpenAI's interface, with some of vLLM's parameters and paths; answers have OpenAI's shapes. /v1/responses and, in "
    "Anthropic's shapes, /v1/messages have parameters of their own. Of the others, taken without effect "
    f"are {', '.join(sorted(HARMLESS))}. Refused unless unused are {', '.join(sorted(UNSUPPORTED))}. Any other field is "
    "refused."
)


def describe(app: FastAPI, version: str) -> Json:
    """The OpenAPI document of an application's routes."""
    document = get_openapi(title=app.title, version=version, description=_ABOUT, routes=app.routes)
    references, schemas = msgspec.json.schema_components(_BODIES.values(), ref_template="#/components/schemas/{name}")
    for name, schema in schemas.items():
        schema.pop("description", None)  # written for those who read the source
        for field, told in schema["properties"].items():
            raw = _RAW.get(f"{name}.{field}")
            if raw is not None:
                told.clear()
                told.update(raw)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own: errors are told in OpenAI's shape
            error = _place("MessagesError" if is_messages(path) else "Error")
            operation["responses"]["default"] = {"description": "an error", "content": _json({"$ref": error})}
            if path not in _OPEN:
                operation["security"] = [{"key": []}, {"x-api-key": []}]
    for path, reference in zip(_BODIES, references, strict=True):
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": _json(reference)}
    document["components"] = {
        "schemas": {**schemas, "Error": _ERROR, "MessagesError": _MESSAGES_ERROR},
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }
    return document


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _place(name: str) -> str:
    return f"#/components/schemas/{name}"
