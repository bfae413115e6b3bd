"""Objects get the properties that are listed, and others only if the schema speaks of others."""

from typing import Any

import jsonschema
import msgspec
import pytest
from random_schemas import random_schema

from cearx.frontend.closed_schema import close_objects

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**A, "additionalProperties": False}


def closed(schema: Any) -> Any:
    copy = msgspec.json.decode(msgspec.json.encode(schema))
    close_objects(copy)
    return copy


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}}),
        ({"allOf": [A]}, {"allOf": [CLOSED]}),
        (
            {"properties": {"properties": A}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
    ],
)
def test_closed(schema: Any, expected: Any) -> None:
    """Wherever an object is described by one schema alone."""
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "minProperties": 2},
        {**A, "required": ["a", "b"]},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {**A, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {**A, "$ref": "#/$defs/B", "$defs": {"B": {"properties": {"b": {}}}}},
        {**A, "not": {"required": ["a"]}},
        {"const": A},
        {"enum": [A], "properties": 3, "items": "x"},
    ],
    ids=lambda v: str(v)[:40],
)
def test_left_open(schema: Any) -> None:
    """What allows or needs other properties, or is made of parts, is as it was."""
    assert closed(schema) == schema


def test_every_closed_value_is_valid_for_the_schema_as_it_was() -> None:
    """Closing takes values away and adds none: a value with one more property is refused."""
    for seed in range(50):
        schema = random_schema(seed)
        schema.pop("additionalProperties", None)
        if "properties" not in schema:
            continue
        strict = closed(schema)
        assert jsonschema.Draft202012Validator(schema).is_valid({"unlisted": 1}) == (
            not schema["required"]
        )
        assert not jsonschema.Draft202012Validator(strict).is_valid({"unlisted": 1})
