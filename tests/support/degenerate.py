"""Grammars that are too deep, too large or too ambiguous, each a function of a number.

The number makes a grammar new without changing its cost.
"""

from collections.abc import Callable
from typing import Any

Fields = Callable[[int], dict[str, Any]]


def reference_chain(number: int) -> dict[str, Any]:
    """Deeper than a stack."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(7000)}
    return {"guided_json": {"$defs": chain | {"d7000": {"const": number}}, "$ref": "#/$defs/d0"}}


def rule_chain(number: int) -> dict[str, Any]:
    """Deeper than a stack."""
    rules = "\n".join(f"a{i}: a{i + 1}" for i in range(14_000))
    return {"guided_grammar": f'start: a0\n{rules}\na14000: "x{number}"'}


def parentheses(number: int) -> dict[str, Any]:
    """Deeper than a parser takes."""
    return {"guided_grammar": "start: " + "(" * 100_000 + f'"a{number}"' + ")" * 100_000}


def many_branches(number: int) -> dict[str, Any]:
    """Too much work for one token."""
    branches = [
        {"type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(i)}}
        for i in range(100)
    ]
    return {"guided_json": {"anyOf": branches, "title": str(number)}}


def repetitions(number: int) -> dict[str, Any]:
    """A product of counters."""
    return {"guided_regex": "(.{0,300}x){0,300}" * 3 + str(number)}


def alternatives(number: int) -> dict[str, Any]:
    """An automaton with many states."""
    return {"guided_regex": "(a|b|ab)*" * 500 + f"c{number}"}


def intersection(number: int) -> dict[str, Any]:
    """A product of automata."""
    patterns = [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcdefgh"]
    return {"guided_json": {"allOf": patterns, "title": str(number)}}


def large_multiple(number: int) -> dict[str, Any]:
    """An automaton with a state for every remainder."""
    return {"guided_json": {"type": "integer", "multipleOf": 99_991 + 2 * number}}


def many_patterns(number: int) -> dict[str, Any]:
    """A large schema with a pattern for every property."""
    properties = {
        f"k{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}x$"} for i in range(900)
    }
    return {"guided_json": {"type": "object", "properties": properties, "title": str(number)}}


DEGENERATE: dict[str, Fields] = {
    function.__name__: function
    for function in (
        reference_chain,
        rule_chain,
        parentheses,
        many_branches,
        repetitions,
        alternatives,
        intersection,
        large_multiple,
        many_patterns,
    )
}
