"""From a YAML file or a Kubernetes object to an LLMDeployment; what is wrong is said as path, value, rule and fix.

Called by the command line for files and by the watchers for objects. Reads no file itself.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from strata_operator.api.base import RuleError
from strata_operator.api.spec import LLMDeployment
from strata_operator.api.status import read_status
from strata_operator.errors import InvalidInputError
from strata_planner.question.reading import StrictLoader, only_yaml_errors, shown, suggestion


def read_text(path: Path) -> str:
    """A file that a person named. Raises InvalidInputError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(str(path), [f"{error.strerror}; name a file that can be read"]) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(str(path), [f"not UTF-8 text ({error.reason}); save it as UTF-8 YAML"]) from error


def load_deployment(text: str, source: str = "deployment") -> LLMDeployment:
    """The one LLMDeployment in a YAML (or JSON) text, exactly the object that `kubectl apply` takes.

    Raises InvalidInputError with every problem found; `source` names the text in its message.
    """
    try:
        with only_yaml_errors():
            documents = [document for document in yaml.load_all(text, Loader=StrictLoader) if document is not None]
    except yaml.YAMLError as error:
        raise InvalidInputError(source, [f"not valid YAML: {error}"]) from error
    if len(documents) != 1:
        raise InvalidInputError(
            source,
            [f"holds {len(documents)} objects where one LLMDeployment is expected; give one file per deployment"],
        )
    return deployment_from_object(documents[0], source)


def deployment_from_object(data: Any, source: str = "deployment") -> LLMDeployment:
    """The same from what YAML or the Kubernetes API has already decoded. Raises InvalidInputError."""
    if not isinstance(data, Mapping):
        raise InvalidInputError(
            source, [f"is {shown(data)} where an object is expected; start with apiVersion, kind, metadata and spec"]
        )
    try:
        known = _without_nulls(data)
        text = json.dumps({**known, "status": read_status(known["status"])} if "status" in known else known)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(source, [f"holds a value that JSON cannot carry: {error}"]) from error
    try:
        return LLMDeployment.model_validate_json(text, by_alias=True, by_name=False)
    except ValidationError as error:
        problems = [
            sentence
            for detail in error.errors(include_url=False)
            if not _is_echo(dict(detail))
            for sentence in _sentences(dict(detail), data)
        ]
        raise InvalidInputError(source, problems) from error


def _without_nulls(data: Any) -> Any:
    """The API server drops fields that are null before it fills in defaults; so do we."""
    if isinstance(data, Mapping):
        return {key: _without_nulls(value) for key, value in data.items() if value is not None}
    if isinstance(data, list):
        return [_without_nulls(item) for item in data]
    return data


def _sentences(detail: dict[str, Any], data: Any) -> list[str]:
    """One problem that pydantic found, in our words. A broken rule stands for several."""
    where = _field_path(detail["loc"], data)
    path = _shown_path(where)
    kind = detail["type"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, RuleError):
        return [_broken_rule(where, rule.path, rule.message, data) for rule in cause.broken]
    if kind == "extra_forbidden":
        return [f"{path}: no such field; {_suggestion(where)}"]
    if kind == "missing":
        return [f"{path}: is required; add it{_meaning(where)}"]
    if kind == "literal_error":
        return [f"{path}: {shown(detail['input'])} is not one of {detail['ctx']['expected']}; use one of them"]
    message = re.sub(r"^(Input|String|Tuple|Dictionary) ", "", detail["msg"]).replace(" after validation, not 0", "")
    return [f"{path}: {shown(detail['input'])}: {message}{_meaning(where)}"]


def _is_echo(detail: dict[str, Any]) -> bool:
    """A list is not too short because its items, wrong ones that are named already, were left out."""
    return bool(detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"])


def _broken_rule(where: list[Any], below: str, message: str, data: Any) -> str:
    place = [*where, below] if below else where
    value = _value_at(data, place)
    return f"{_shown_path(place)}: {'' if value is None else f'{shown(value)}: '}{message}"


def _field_path(location: tuple[int | str, ...], data: Any) -> list[Any]:
    """The location without the members of unions, which pydantic adds and no user wrote."""
    path: list[Any] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        parent = _value_at(data, path)
        known = isinstance(parent, Mapping) and (part in parent or (last and _is_field(path, part)))
        if known or (isinstance(parent, list) and isinstance(part, int)):
            path.append(part)
    return path


def _is_field(path: list[Any], name: int | str) -> bool:
    owner = _type_at(path)
    return owner is not None and name in _field_names(owner)


def _value_at(data: Any, path: list[Any]) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _type_at(path: list[Any]) -> type[BaseModel] | None:
    """The API type whose fields may stand at a path."""
    current: type[BaseModel] | None = LLMDeployment
    for part in path:
        if isinstance(part, int):
            continue
        fields = {} if current is None else {info.alias or name: info for name, info in current.model_fields.items()}
        info = fields.get(part)
        current = None if info is None else _model_in(info.annotation)
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The API type inside `T | None`, `tuple[T, ...]` or `Annotated[T, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Union, UnionType, tuple} or hasattr(annotation, "__metadata__"):
        found = (_model_in(argument) for argument in get_args(annotation))
        return next((model for model in found if model is not None), None)
    return None


def _field_names(model: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()]


def _suggestion(where: list[Any]) -> str:
    owner = _type_at(where[:-1])
    names = [] if owner is None else _field_names(owner)
    above = f"{_shown_path(where[:-1])}." if len(where) > 1 else ""
    return suggestion(str(where[-1]), names, above)


def _meaning(where: list[Any]) -> str:
    """The field's own description, which says what to write."""
    owner = _type_at(where[:-1]) if where else None
    if owner is None:
        return ""
    descriptions = {info.alias or name: info.description for name, info in owner.model_fields.items()}
    description = descriptions.get(str(where[-1]))
    return f" ({description.rstrip('.')})" if description else ""


def _shown_path(where: list[Any]) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".") or "the object"
