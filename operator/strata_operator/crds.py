"""The CustomResourceDefinition, generated from the API types: `python -m strata_operator.crds` writes it.

Called by `strata crds`, by whoever changes the API types, and by the test that keeps the files current. The same text lies in
`crds/` for people and in the chart, because Helm reads nothing outside a chart. Knows nothing of what the fields mean.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from strata_operator.api import GROUP, KIND, PLURAL, VERSION, LLMDeployment

FILE_NAME = f"{GROUP}_{PLURAL}.yaml"
PLACES = (Path("crds") / FILE_NAME, Path("helm/strata/files") / FILE_NAME)
_HEADER = "# Generated from operator/strata_operator/api by `python -m strata_operator.crds`; edit the types instead.\n"

_COLUMNS = (
    ("Model", "string", ".spec.model.uri", 0),
    ("Phase", "string", ".status.phase", 0),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Stages", "string", ".status.stagesReady", 0),
    ("GPUs", "string", ".status.devices", 0),
    ("Tokens/s", "number", ".status.plan.predicted.tokensPerSecond", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("URL", "string", ".status.url", 1),
    ("Gateways", "string", ".status.gatewaysReady", 1),
)
_KEPT = (
    "type",
    "description",
    "default",
    "enum",
    "format",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "pattern",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-validations",
)


def crd() -> dict[str, Any]:
    """The definition as a Kubernetes object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["llmd"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                    "schema": {"openAPIV3Schema": structural_schema()},
                    "subresources": {"status": {}},
                }
            ],
        },
    }


def crd_yaml() -> str:
    """The definition as the text of its file."""
    return _HEADER + yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Without anchors: every part is written out where it stands."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's signature
        return True


def structural_schema() -> dict[str, Any]:
    """The JSON schema of an LLMDeployment in the form that Kubernetes asks for: no references, no unions, no nulls."""
    document = LLMDeployment.model_json_schema(by_alias=True, mode="validation")
    schema = _structural(document, document["$defs"])
    schema["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
    }
    schema["properties"]["status"] = _without_defaults(schema["properties"]["status"])
    schema["required"] = ["spec"]
    return schema


def _column(name: str, kind: str, path: str, priority: int) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}


def _structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    schema = _resolved(schema, definitions)
    if "anyOf" in schema:
        return _int_or_string(schema)
    made = {key: schema[key] for key in _KEPT if key in schema}
    if "const" in schema:
        made["enum"] = [schema["const"]]
    if made.get("type") == "integer":
        made["format"] = "int64"
    if "exclusiveMinimum" in schema:
        made |= {"minimum": schema["exclusiveMinimum"], "exclusiveMinimum": True}
    if "enum" in made and "type" not in made:
        made["type"] = "integer" if isinstance(made["enum"][0], int) else "string"
    if "items" in schema:
        made["items"] = _structural(schema["items"], definitions)
    if made.get("type") == "object":
        made |= _object_parts(schema, definitions)
    if "default" in made:
        made = _with_least_default(made)
    return made


def _object_parts(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Fields of an object, values of a map, or anything at all where Kubernetes' own types are passed on."""
    if "properties" in schema:
        fields = {name: _structural(field, definitions) for name, field in schema["properties"].items()}
        required = {"required": schema["required"]} if "required" in schema else {}
        open_ = (
            {"x-kubernetes-preserve-unknown-fields": True} if schema.get("x-kubernetes-preserve-unknown-fields") else {}
        )
        return {"properties": fields, **required, **open_}
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        return {"additionalProperties": _structural(values, definitions)}
    return {"x-kubernetes-preserve-unknown-fields": True}


def _resolved(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Follow references; `T | None` becomes T, which the API server takes as absent or T."""
    beside = {key: value for key, value in schema.items() if key not in {"$ref", "anyOf", "allOf"}}
    if beside.get("default", ...) is None:
        del beside["default"]
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[-1]]
        return _resolved({**target, **beside}, definitions)
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    if len(options) == 1:
        return _resolved({**options[0], **beside}, definitions)
    return {**beside, **({"anyOf": options} if options else {})}


def _int_or_string(schema: dict[str, Any]) -> dict[str, Any]:
    """The one union of the API: a quantity."""
    numbers, text = schema["anyOf"]
    assert (numbers["type"], text["type"]) == ("integer", "string"), schema
    return {"x-kubernetes-int-or-string": True, "maxLength": text["maxLength"], "pattern": text["pattern"]}


def _with_least_default(schema: dict[str, Any]) -> dict[str, Any]:
    """A default without what is empty and what fields default to by themselves: the stored object says nothing twice."""
    rest = {key: value for key, value in schema.items() if key != "default"}
    fields, default = schema.get("properties"), schema["default"]
    if fields is None or not isinstance(default, dict):
        return rest if default in ([], {}) else schema
    said = {name: _effective_default(field) for name, field in fields.items()}
    least = {name: value for name, value in _without_empty(default).items() if value != said[name]}
    has_defaults_below = any("default" in field for field in fields.values())
    return {**rest, "default": least} if least or has_defaults_below else rest


def _effective_default(schema: dict[str, Any]) -> Any:
    """What the API server fills in for an absent field, its own fields' defaults included."""
    default = schema.get("default")
    if not isinstance(default, dict):
        return default
    below = {name: _effective_default(field) for name, field in schema.get("properties", {}).items()}
    return _without_empty({**below, **default})


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _without_empty(item) for key, item in value.items()}
    return {key: item for key, item in inner.items() if item not in (None, {}, [])}


def _without_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Status is written whole by the operator: the API server fills nothing in."""
    made = {key: value for key, value in schema.items() if key != "default"}
    for key in ("items", "additionalProperties"):
        if key in made:
            made[key] = _without_defaults(made[key])
    if "properties" in made:
        made["properties"] = {name: _without_defaults(field) for name, field in made["properties"].items()}
    return made


def write(root: Path) -> list[Path]:
    """Write the definition to its places below the repository's root."""
    paths = [root / place for place in PLACES]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(crd_yaml(), encoding="utf-8")
    return paths


if __name__ == "__main__":
    for path in write(Path(sys.argv[1] if len(sys.argv) > 1 else ".")):
        sys.stdout.write(f"{path}\n")
