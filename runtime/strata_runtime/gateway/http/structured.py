"""What an answer must look like: from the fields of a body to one grammar. Called by `prompts`; pure.

OpenAI's `response_format` and vLLM's `structured_outputs` say the same in two ways: a body has one of them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from strata_planner.contract.frames import MOST_GRAMMAR_BYTES, Grammar, GrammarKind
from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.bodies import MOST_SHOWN
from strata_runtime.gateway.text.reasoning import ReasoningFormat
from strata_runtime.structured.schemas import MOST_WHITESPACE, unsupported

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must look like, and the parameter that says so."""

    kind: GrammarKind
    text: str
    param: str

    def behind_thoughts(self, reasoning: ReasoningFormat, *, is_thinking: bool) -> "Form":
        """The same behind thoughts, which look as they like. `is_thinking`: the prompt ends within one."""
        content = self.as_format()
        thought = {
            "type": "tag",
            "begin": "" if is_thinking else reasoning.begin,
            "content": {"type": "any_text"},
            "end": reasoning.end,
        }
        optional = thought if is_thinking else {"type": "optional", "content": thought}
        elements = [optional, {"type": "regex", "pattern": r"\s{0,2}"}, content]
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
        return Form("structural_tag", json.dumps(tag, ensure_ascii=False), self.param)

    def as_format(self) -> dict[str, Any]:
        """As a part of a structural tag."""
        match self.kind:
            case "structural_tag":
                inner: dict[str, Any] = json.loads(self.text)["format"]
                return inner
            case "json_schema":
                schema = json.loads(self.text)
                return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_WHITESPACE}
            case "regex":
                return {"type": "regex", "pattern": self.text}
            case "ebnf":
                return {"type": "grammar", "grammar": self.text}
        raise InvalidRequestError(
            f"{self.param}: beside tools, and for a model that thinks first, no grammar in Lark's notation is taken: write it in EBNF",
            param=self.param,
        )

    def grammar(self, ends: Sequence[int]) -> Grammar:
        """`ends`: tokens that end the model's answers. Raises InvalidRequestError where it has none."""
        if not ends:
            raise InvalidRequestError(
                f"{self.param} needs an answer that ends by itself, and nothing ends this one: leave ignore_eos out, or serve a "
                "model whose generation_config.json names its end-of-text token",
                param=self.param,
            )
        return Grammar(self.kind, self.text, tuple(ends))


def form_of(response_format: Raw | None, structured_outputs: Raw | None) -> Form | None:
    """Raises InvalidRequestError that names the parameter."""
    given = [_of_format(response_format), _of_outputs(structured_outputs)]
    wanted = [form for form in given if form is not None]
    if len(wanted) > 1:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what the answer looks like: send one of them",
            param="structured_outputs",
        )
    return wanted[0] if wanted else None


def calls_form(calls: dict[str, Any], otherwise: Form | None) -> Form:
    """Calls of tools, as a part of a structural tag; or else what the answer looks like without."""
    part = calls if otherwise is None else {"type": "or", "elements": [calls, otherwise.as_format()]}
    return _structural_tag({"type": "structural_tag", "format": part}, "tools")


def form(kind: GrammarKind, text: str, param: str) -> Form:
    """One of a bearable length."""
    if len(text) > MOST_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"{param} has {len(text)} characters; {MOST_GRAMMAR_BYTES} at most are taken here: send a shorter one",
            param=param,
        )
    return Form(kind, text, param)


def _of_format(raw: Raw | None) -> Form | None:
    if raw is None:
        return None
    fields = _object(raw, "response_format")
    kind = fields.pop("type", None)
    if kind not in _FORMATS:
        raise _not_valid("response_format.type", kind, f"the types are {', '.join(map(repr, _FORMATS))}")
    if kind == "structural_tag":
        return _given_tag({"type": kind, **fields}, "response_format")
    known = {"json_schema"} if kind == "json_schema" else set[str]()
    _only(fields, known, "response_format")
    if kind == "json_schema":
        return _of_json_schema(fields)
    return form("json_schema", _ANY_OBJECT, "response_format") if kind == "json_object" else None


def _of_json_schema(fields: dict[str, Any]) -> Form:
    """`{"name": ..., "schema": ..., "strict": ...}`: kept to the letter whether or not it says strict."""
    param = "response_format.json_schema"
    described = fields.get("json_schema")
    if not isinstance(described, dict):
        raise _not_valid(param, described, "send an object with `name` and `schema`")
    _only(described, {"name", "description", "schema", "strict"}, param)
    if described.get("schema") is None:
        raise _not_valid(f"{param}.schema", None, "send the JSON schema of the answer")
    return schema_form(described["schema"], f"{param}.schema")


def _of_outputs(raw: Raw | None) -> Form | None:
    param = "structured_outputs"
    given = {} if raw is None else _object(raw, param)
    fields = {name: value for name, value in given.items() if value is not None and value is not False}
    _only(fields, set(_OUTPUTS), param)
    if not fields:
        return None
    if len(fields) > 1:
        raise _not_valid(param, sorted(fields), "an answer looks like one of these: send one")
    ((kind, value),) = fields.items()
    param = f"{param}.{kind}"
    if kind == "json_object":
        return form("json_schema", _ANY_OBJECT, param)
    if kind == "choice":
        return _choice(value, param)
    if kind in {"json", "structural_tag"}:
        parsed = _parsed(value, param) if isinstance(value, str) else value
        return schema_form(parsed, param) if kind == "json" else _given_tag(parsed, param)
    if not isinstance(value, str) or not value:
        raise _not_valid(param, value, "send it as a string")
    notation: GrammarKind = "ebnf" if "::=" in value else "lark"  # the two that xgrammar reads
    return form("regex" if kind == "regex" else notation, value, param)


def schema_form(schema: Any, param: str) -> Form:
    """Of a JSON schema all of which can be kept."""
    if not isinstance(schema, dict | bool):
        raise _not_valid(param, schema, "a JSON schema is an object")
    _check_schema(schema, param)
    return form("json_schema", json.dumps(schema, ensure_ascii=False), param)


def _check_schema(schema: Any, param: str) -> None:
    if (part := unsupported(schema)) is not None:
        raise InvalidRequestError(
            f"{param} has {part.removeprefix('schema.')[:MOST_SHOWN]}, which the answers of this server cannot be held to: leave it out",
            param=param,
            code="unsupported_schema",
        )


def _choice(value: Any, param: str) -> Form:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise _not_valid(param, value, "send a list of at least one text, none of them empty")
    texts = [{"type": "const_string", "value": each} for each in dict.fromkeys(value)]
    return _structural_tag({"type": "structural_tag", "format": {"type": "or", "elements": texts}}, param)


def _given_tag(tag: Any, param: str) -> Form:
    """Of a client's own, all of whose schemas can be kept."""
    made = _structural_tag(tag, param)
    if "format" not in tag:
        raise _not_valid(param, tag, "it must have a format field, as https://xgrammar.mlc.ai/docs has it")
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and part.get("type") == "json_schema":
            _check_schema(part.get("json_schema"), param)
        elif isinstance(part, dict | list):
            waiting.extend(part.values() if isinstance(part, dict) else part)
    return made


def _structural_tag(tag: Any, param: str) -> Form:
    if not isinstance(tag, dict):
        raise _not_valid(param, tag, "a structural tag is an object")
    return form("structural_tag", json.dumps(tag, ensure_ascii=False), param)


def _object(raw: Raw, param: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_valid(param, bytes(raw)[:MOST_SHOWN].decode("utf-8", "replace"), "send an object") from error


def _parsed(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_valid(param, text, f"it is not valid JSON ({error})") from error


def _only(fields: dict[str, Any], known: set[str], param: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not None:
            path = f"{param}.{name}"[: 2 * MOST_SHOWN]
            rule = f"it has {', '.join(sorted(known))}" if known else "it has nothing beside its type"
            raise InvalidRequestError(
                f"{path} is not a parameter of this server: {rule}", param=path, code="unknown_parameter"
            )


def _not_valid(param: str, value: Any, rule: str) -> InvalidRequestError:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= MOST_SHOWN else shown[: MOST_SHOWN - 3] + "..."
    return InvalidRequestError(f"{param}={shown} is not valid: {rule}", param=param)
