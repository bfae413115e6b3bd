"""What a request says about the form of its answer, as one grammar in llguidance's own language.

Owns the fields of OpenAI and vLLM that constrain an output, in every spelling, and the rule that
there is at most one. Never compiles: `grammar_checker.py` does. Called by both routes.
"""

from collections.abc import Callable
from typing import Any

import llguidance
import msgspec

from cearx.core.grammar import MAX_GRAMMAR_BYTES
from cearx.frontend.closed_schema import close_objects
from cearx.frontend.errors import ApiError, invalid, not_supported, shown
from cearx.frontend.openai_types import GenerationRequest

MAX_CHOICE_STRINGS = 4096
WHITESPACE = r"(\n {0,40}| )?"
"""Between the parts of JSON: a line feed with an indent, a space, or nothing. Unbounded, small
models write white space until max_tokens."""
ANY_OBJECT = {"type": "object"}


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar, and the field that the client is told of when it is wrong."""

    param: str
    grammar: str


def json_constraint(param: str, schema: Any, whitespace: str | None = WHITESPACE) -> Constraint:
    """JSON that satisfies a schema (an object, a boolean, or either as text); None: no white space.

    Raises ApiError (400).
    """
    try:
        if isinstance(schema, str):
            schema = msgspec.json.decode(schema)
        schema = msgspec.json.decode(msgspec.json.encode(schema))  # ours to change
        close_objects(schema)
        text = msgspec.json.encode(schema).decode()
    except (msgspec.DecodeError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(param, f"{param} is no JSON schema: {problem}") from None
    if not isinstance(schema, dict | bool):
        raise invalid(param, f"{param} must be a JSON schema, got {shown(schema)}", "invalid_type")
    return _built(
        param,
        lambda: llguidance.LLMatcher.grammar_from_json_schema(
            text,
            {"whitespace_flexible": whitespace is not None, "whitespace_pattern": whitespace},
        ),
    )


def regex_constraint(param: str, regex: Any) -> Constraint:
    r"""A text that a regular expression matches as a whole; raises ApiError (400).

    `\d` is a digit from 0 to 9, not one of Unicode's hundreds.
    """
    _check_text(param, regex)

    def build() -> str:
        pattern = llguidance.regex_to_lark(regex, use_ascii="d")
        return llguidance.LLMatcher.grammar_from_lark(f"start: /{pattern}/")

    return _built(param, build)


def choice_constraint(param: str, choices: Any) -> Constraint:
    """One of some texts; raises ApiError (400)."""
    if not isinstance(choices, list) or not choices:
        raise invalid(param, f"{param} must be a list of texts, got {shown(choices)}")
    if len(choices) > MAX_CHOICE_STRINGS:
        raise invalid(param, f"{param} may hold {MAX_CHOICE_STRINGS} texts, got {len(choices)}")
    for index, choice in enumerate(choices):
        _check_text(f"{param}[{index}]", choice)
    text = msgspec.json.encode(choices).decode()
    return _built(param, lambda: str(llguidance.grammar_from("choice", text)))


def grammar_constraint(param: str, grammar: Any) -> Constraint:
    """A context-free grammar in Lark's notation or in GBNF (with `::=`); raises ApiError (400)."""
    _check_text(param, grammar)
    return _built(param, lambda: str(llguidance.grammar_from("grammar", grammar)))


def _check_text(param: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise invalid(param, f"{param} must be a text, got {shown(value)}", "invalid_type")


def _built(param: str, build: Callable[[], str]) -> Constraint:
    try:
        grammar = build()
    except Exception as error:  # the library's converters raise what they like
        problem = next(iter(str(error).splitlines()), "")[:200]
        raise invalid(param, f"{param} cannot be used: {shown(problem)}") from None
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(
            param, f"The grammar of {param} may have {MAX_GRAMMAR_BYTES} bytes, it has {size}"
        )
    return Constraint(param=param, grammar=grammar)


def is_constrained(request: GenerationRequest) -> bool:
    """Whether `constraint_of`, which may take a while, has anything to look at."""
    names = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in KINDS))
    return any(getattr(request, name) is not None for name in names)


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """The one constraint that a request asks for; raises ApiError (400), also for two."""
    found = [
        *_response_format(request.response_format),
        *_structured_outputs(request.structured_outputs),
        *_legacy(request),
    ]
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found[:2])
        raise invalid(found[1].param, f"An answer can follow one constraint only, got {names}")
    if not found:
        return None
    return found[0]


def check_conflicts(constraint: Constraint, request: GenerationRequest) -> None:
    """Raises ApiError (400) for what an answer with a grammar cannot do besides."""
    if request.ignore_eos:
        raise _conflict(constraint, "ignore_eos: an answer ends with its grammar")
    if request.allowed_token_ids is not None:
        raise _conflict(constraint, "allowed_token_ids")
    if request.bad_words:
        raise _conflict(constraint, "bad_words")


def _conflict(constraint: Constraint, other: str) -> ApiError:
    return invalid(constraint.param, f"{constraint.param} cannot be combined with {other}")


def _response_format(value: dict[str, Any] | None) -> list[Constraint]:
    if value is None:
        return []
    kind = value.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [json_constraint("response_format", ANY_OBJECT)]
    if kind != "json_schema":
        message = (
            f"Invalid value {shown(kind)} for response_format.type: "
            "expected one of text, json_object, json_schema"
        )
        raise invalid("response_format.type", message)
    inner = value.get("json_schema")
    param = "response_format.json_schema"
    if not isinstance(inner, dict):
        raise invalid(param, f"{param} must be an object, got {shown(inner)}", "invalid_type")
    schema = inner.get("schema", inner.get("json_schema"))  # vLLM's spelling
    if schema is None:
        param += ".schema"
        raise invalid(param, f"{param} is required", "missing_required_parameter")
    return [json_constraint(f"{param}.schema", schema)]


KINDS: dict[str, Callable[[str, Any], Constraint]] = {
    "json": json_constraint,
    "regex": regex_constraint,
    "choice": choice_constraint,
    "grammar": grammar_constraint,
}


def _structured_outputs(value: dict[str, Any] | None) -> list[Constraint]:
    if value is None:
        return []
    given = {name: item for name, item in value.items() if item not in (None, False)}
    whitespace: str | None = given.pop("whitespace_pattern", WHITESPACE)
    if given.pop("disable_any_whitespace", False):
        whitespace = None
    found: list[Constraint] = []
    for name, item in given.items():
        param = f"structured_outputs.{name}"
        if name == "json":
            found.append(json_constraint(param, item, whitespace))
        elif name == "json_object":
            found.append(json_constraint(param, ANY_OBJECT, whitespace))
        elif name in KINDS:
            found.append(KINDS[name](param, item))
        else:
            only = ", ".join((*KINDS, "json_object", "whitespace_pattern"))
            message = f"{param[:80]} is not supported: structured_outputs may hold one of {only}"
            raise not_supported(param[:80], message)
    if not found:
        message = "structured_outputs needs one of " + ", ".join((*KINDS, "json_object"))
        raise invalid("structured_outputs", message)
    return found


def _legacy(request: GenerationRequest) -> list[Constraint]:
    """The names of vLLM before structured_outputs."""
    return [
        build(f"guided_{name}", getattr(request, f"guided_{name}"))
        for name, build in KINDS.items()
        if getattr(request, f"guided_{name}") is not None
    ]
