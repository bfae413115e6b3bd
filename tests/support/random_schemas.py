"""JSON schemas of the kinds that users send, from a seed: nested, enums, patterns, references."""

import random
from typing import Any

WORDS = ["name", "age", "city", "tags", "items", "price", "id", "kind", "note", "größe"]
PATTERNS = [
    "^[A-Z]{2}[0-9]{3}$",
    "^(red|green|blue)$",
    "^[a-z]{1,9}@[a-z]{1,9}\\.org$",
    "^\\d{4}-\\d{2}$",
]


def random_schema(seed: int) -> dict[str, Any]:
    """An object with a few properties; every size is bounded, so that every answer ends."""
    chance = random.Random(seed)
    definitions: dict[str, Any] = {}
    schema = _object(chance, 2, definitions)
    if definitions:
        schema["$defs"] = definitions
    return schema


def _object(chance: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(chance, depth - 1, definitions) for name in names},
        "required": chance.sample(names, chance.randint(0, len(names))),
        "additionalProperties": False,
    }
    if chance.random() < 0.2:  # a map: any names, values of one kind
        schema = {"type": "object", "additionalProperties": _leaf(chance)}
    return schema


def _value(chance: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    if depth <= 0:
        return _leaf(chance)
    kind = chance.choice(["leaf", "object", "array", "ref", "any_of"])
    if kind == "object":
        return _object(chance, depth, definitions)
    if kind == "array":
        least = chance.randint(0, 2)
        items = _value(chance, depth - 1, definitions)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
    if kind == "ref":
        name = f"Shared{len(definitions)}"
        definitions[name] = {}
        definitions[name] = _object(chance, depth - 1, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if kind == "any_of":
        return {"anyOf": [_leaf(chance), _object(chance, depth - 1, definitions)]}
    return _leaf(chance)


def _leaf(chance: random.Random) -> dict[str, Any]:
    low = chance.randint(-50, 50)
    return chance.choice(
        [
            {"type": "string", "maxLength": chance.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": chance.choice(PATTERNS)},
            {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 900)},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": chance.sample(["a", "bb", 3, None, True, "ü", 4.5], chance.randint(1, 4))},
            {"const": chance.choice(["fixed", 7, False])},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            {"type": "string", "format": "date"},
        ]
    )
