"""The CustomResourceDefinition: current, structural, bounded, and saying the same as the Python types."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_operator import crds
from strata_operator.api import deployment_from_object
from tests.operator.builders import a_deployment

ROOT = Path(__file__).parents[3]
SCHEMA = crds.structural_schema()


def parts(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its path."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from parts(field, f"{path}.{name}")
    for below in ("items", "additionalProperties"):
        if below in schema:
            yield from parts(schema[below], f"{path}[]")


@pytest.mark.parametrize("place", crds.PLACES, ids=str)
def test_the_file_is_current(place: Path) -> None:
    assert (ROOT / place).read_text(encoding="utf-8") == crds.crd_yaml(), "run python -m strata_operator.crds"


def test_writing_gives_the_files(tmp_path: Path) -> None:
    assert [path.relative_to(tmp_path) for path in crds.write(tmp_path)] == list(crds.PLACES)


def test_every_part_is_structural() -> None:
    for path, schema in parts(SCHEMA):
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path
        assert not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf", "nullable", "title", "uniqueItems"}, path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def test_texts_lists_and_maps_of_the_spec_are_bounded_so_that_rules_have_a_cost() -> None:
    for path, schema in parts(SCHEMA["properties"]["spec"]):
        kind = schema.get("type")
        if kind == "string" and "enum" not in schema:
            assert "maxLength" in schema, path
        if kind == "array":
            assert "maxItems" in schema, path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path


def test_every_field_of_the_spec_has_a_description_or_is_explained_by_its_fields() -> None:
    for path, schema in parts(SCHEMA["properties"]["spec"]):
        if path.count(".") <= 2 and not path.endswith("]"):
            assert "description" in schema or "properties" in schema, path


def test_rules_carry_messages_that_name_a_fix() -> None:
    rules = [rule for _, schema in parts(SCHEMA) for rule in schema.get("x-kubernetes-validations", [])]
    assert len(rules) >= 8
    assert all(rule["rule"] and len(rule["message"]) > 20 for rule in rules)


def test_the_defaults_of_the_schema_are_those_of_the_types() -> None:
    given = a_deployment().to_object()
    filled = {**given, "spec": with_defaults(SCHEMA["properties"]["spec"], given["spec"])}
    assert deployment_from_object(filled) == deployment_from_object(given)
    assert filled["spec"]["workload"]["promptTokens"] == 512
    assert filled["spec"]["gateway"]["service"] == {"type": "ClusterIP"}


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """What the API server stores: absent fields with a default are filled in, top down."""
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties", {})
    absent = {name: field["default"] for name, field in fields.items() if "default" in field and name not in value}
    return {name: with_defaults(fields.get(name, {}), below) for name, below in (value | absent).items()}


def test_columns_are_those_of_the_documentation() -> None:
    version = crds.crd()["spec"]["versions"][0]
    columns = [(column["name"].upper(), column.get("priority", 0)) for column in version["additionalPrinterColumns"]]
    shown = ["MODEL", "PHASE", "READY", "STAGES", "GPUS", "TOKENS/S", "AGE"]
    assert columns == [*((name, 0) for name in shown), ("URL", 1), ("GATEWAYS", 1)]
    assert version["subresources"] == {"status": {}}
    assert crds.crd()["spec"]["names"]["shortNames"] == ["llmd"]
