"""The base of the API types, and rules that the API server and Python check alike.

Used by the spec and status types; the CRD generator reads the rules. Knows nothing of what the fields mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel


@dataclass(frozen=True)
class Rule:
    """What a schema cannot say: once for the API server (CEL over the object as it is stored), once for Python.

    `path` names the offending field below the type that carries the rule; the message has the rule and the fix. `cel` is
    empty where the schema says it already, `holds` is left out where Python's types do.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] = lambda _: True
    path: str = ""

    def to_validation(self) -> dict[str, str]:
        """As an entry of `x-kubernetes-validations`."""
        where = {"fieldPath": f".{self.path}"} if self.path else {}
        return {"rule": self.cel, "message": self.message, **where}


class RuleError(ValueError):
    """Rules of one type are broken; the loader turns each into a sentence with its path."""

    def __init__(self, broken: tuple[Rule, ...]) -> None:
        self.broken = broken
        super().__init__("; ".join(rule.message for rule in broken))


def _add_rules(schema: dict[str, Any], model: type[Any]) -> None:
    validations = [rule.to_validation() for rule in model.rules if rule.cel]
    if validations:
        schema["x-kubernetes-validations"] = validations


class ApiType(BaseModel):
    """Strict and frozen; camelCase outside, snake_case in code. Every field is consumed, so unknown ones are refused."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        json_schema_extra=_add_rules,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        broken = tuple(rule for rule in self.rules if not rule.holds(self))
        if broken:
            raise RuleError(broken)
        return self


Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""The name of a Kubernetes object."""

Text = Annotated[str, Field(max_length=1024)]
"""Free text, bounded so that the rules' cost and the object's size are."""

LabelMap = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)]
"""Label keys and values."""

Quantity = (
    int | Annotated[str, Field(max_length=32, pattern=r"^[0-9]+([.][0-9]*)?([eE][0-9]+|[numkMGTPE]|[KMGTPE]i)?$")]
)
"""A Kubernetes quantity: 2, 500m, 4Gi."""

RawObject = dict[str, Any]
"""A part of a pod as Kubernetes defines it: passed on whole and checked by the API server when the pod is applied."""
