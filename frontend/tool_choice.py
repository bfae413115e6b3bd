"""What a chat request says about tools: whom the template shows, how the answer is read.

Owns the rules between tools, tool_choice and what the server can do, and the schema that an answer
follows which must be a call. Called by `chat_route.py`.
"""

from typing import Any

import msgspec

from cearx.frontend.errors import ApiError, invalid, not_supported
from cearx.frontend.openai_types import ChatCompletionRequest, NamedTool, Tool
from cearx.frontend.output_parser import OutputRules
from cearx.frontend.server_state import ServerState
from cearx.frontend.tool_parsers import ListParser, NamedParser

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
CALLS = 'Answer with a JSON list of calls: [{"name": ..., "parameters": {...}}]'
ARGUMENTS = "Answer with a JSON object: the parameters of the call."
DEFINITIONS = ("$defs", "definitions")


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    shown: list[dict[str, Any]] | None = None
    """Tools for the template; None when there are none or none may be called."""
    rules: OutputRules
    schema: dict[str, Any] | None = None
    """What the answer must follow, when a call is forced."""
    note: str | None = None
    """What the first message begins with, where the template does not tell the model of tools that
    it is forced to call."""


def plan_tools(state: ServerState, request: ChatCompletionRequest) -> ToolPlan:
    """Raises ApiError (400)."""
    choice, tools = request.tool_choice, request.tools or []
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "tool_choice needs tools, got none")
    if not tools or choice == "none":
        return ToolPlan(rules=OutputRules(splits_reasoning=state.splits_reasoning))
    shown = [msgspec.to_builtins(tool) for tool in tools]
    is_parallel = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        name = choice.function.name
        tool = next((tool for tool in tools if tool.function.name == name), None)
        if tool is None:
            message = f"tool_choice names {name}, which is not among the tools"
            raise invalid("tool_choice", message)
        rules = OutputRules(make_tool_parser=lambda: NamedParser(name), is_named=True)
        note = None if _template_tells(state) else _note([tool], ARGUMENTS)
        return ToolPlan(shown=shown, rules=rules, schema=_parameters(tool), note=note)
    if choice == "required":
        rules = OutputRules(make_tool_parser=ListParser, is_parallel=is_parallel)
        note = None if _template_tells(state) else _note(tools, CALLS)
        schema = _calls_schema(tools, is_parallel)
        return ToolPlan(shown=shown, rules=rules, schema=schema, note=note)
    if not state.config.enable_auto_tool_choice or state.make_tool_parser is None:
        raise _no_parser(state)
    rules = OutputRules(
        splits_reasoning=state.splits_reasoning,
        make_tool_parser=state.make_tool_parser,
        is_parallel=is_parallel,
    )
    return ToolPlan(shown=shown, rules=rules)


def _template_tells(state: ServerState) -> bool:
    return state.chat_template is not None and state.chat_template.knows_tools


def _note(tools: list[Tool], how: str) -> str:
    """Indented, for a small model reads that best."""
    compact = msgspec.json.encode([tool.function for tool in tools])
    described = msgspec.json.format(compact, indent=2).decode()
    return f"You can call these functions:\n{described}\n{how}\n\n"


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or NO_PARAMETERS


def _calls_schema(tools: list[Tool], is_parallel: bool) -> dict[str, Any]:
    """A list of calls, at least one; references keep their meaning at the top of the schema."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for index, tool in enumerate(tools):
        parameters = dict(_parameters(tool))
        for kind in DEFINITIONS:
            for name, schema in parameters.pop(kind, {}).items():
                if definitions.setdefault(kind, {}).setdefault(name, schema) != schema:
                    param = f"tools[{index}].function.parameters.{kind}"
                    raise invalid(
                        param, f"{param}.{name} differs from the definition in another tool"
                    )
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "parameters": parameters,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    limit = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, **definitions}


def _no_parser(state: ServerState) -> ApiError:
    if not state.config.enable_auto_tool_choice:
        message = "tool_choice auto is switched off on this server (--no-enable-auto-tool-choice)"
    else:
        message = (
            "Nothing is known of how this model writes tool calls: start the server with "
            "--tool-call-parser, or set tool_choice to none"
        )
    return not_supported("tool_choice", message)
