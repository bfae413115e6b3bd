"""JSON schemas whose objects have the listed properties and no others, as clients expect them.

JSON Schema allows any property that is not listed, and a small model writes such ones without end.
Owns which objects can be closed without a change of what is required of them; what says something
about further properties itself stays as it is. Called by `structured_output.py`.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords with schemas by name."""
LISTED = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE = ("items", "additionalProperties", "contains")
COMBINING = ("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf")
UNSAFE = ("not", "if", "dependentSchemas", "unevaluatedProperties")
OWN_WORDS = ("additionalProperties", "patternProperties", "minProperties")
"""With these an object speaks of further properties."""


def close_objects(schema: Any) -> None:
    """In place. A schema that puts parts of one object together is left as it is.

    There a part must let the properties of the others pass.
    """
    schemas = list(_schemas(schema))
    if any(_combines(found) for found in schemas):
        return
    for found in schemas:
        properties = found.get("properties")
        if not isinstance(properties, dict) or any(word in found for word in OWN_WORDS):
            continue
        required = found.get("required", [])
        if isinstance(required, list) and all(name in properties for name in required):
            found["additionalProperties"] = False


def _schemas(schema: Any) -> Iterator[Schema]:
    """The schema and those within it."""
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        if not isinstance(found, dict):
            continue
        yield found
        for word in NAMED:
            by_name = found.get(word)
            waiting += by_name.values() if isinstance(by_name, dict) else []
        for word in (*LISTED, *SINGLE):
            inner = found.get(word)
            waiting += inner if isinstance(inner, list) else [inner]


def _combines(schema: Schema) -> bool:
    if any(word in schema for word in UNSAFE):
        return True
    parts = [word for word in COMBINING if word in schema]
    all_of = schema.get("allOf")
    if len(parts) > 1 or (isinstance(all_of, list) and len(all_of) > 1):
        return True
    return bool(parts) and any(word in schema for word in ("properties", "required", *OWN_WORDS))
