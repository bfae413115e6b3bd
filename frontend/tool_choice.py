"""What a chat request says about tools: whom the template shows, how the answer is read.

Owns the rules between tools, tool_choice and what the server can do. Called by `chat_route.py`.
"""

from typing import Any

import msgspec

from cearx.frontend.errors import ApiError, invalid, not_supported
from cearx.frontend.openai_types import ChatCompletionRequest, NamedTool
from cearx.frontend.output_parser import OutputRules
from cearx.frontend.server_state import ServerState


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    shown: list[dict[str, Any]] | None
    """Tools for the template; None when there are none or none may be called."""
    rules: OutputRules


def plan_tools(state: ServerState, request: ChatCompletionRequest) -> ToolPlan:
    """Raises ApiError (400)."""
    choice, tools = request.tool_choice, request.tools or []
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "tool_choice needs tools, got none")
    if isinstance(choice, NamedTool):
        names = [tool.function.name for tool in tools]
        if choice.function.name not in names:
            message = f"tool_choice names {choice.function.name}, which is not among the tools"
            raise invalid("tool_choice", message)
    if not tools or choice == "none":
        return ToolPlan(shown=None, rules=OutputRules(splits_reasoning=state.splits_reasoning))
    if choice == "required" or isinstance(choice, NamedTool):
        raise not_supported(
            "tool_choice", "tool_choice is not supported by this server but for auto and none"
        )
    if not state.config.enable_auto_tool_choice or state.make_tool_parser is None:
        raise _no_parser(state)
    return ToolPlan(
        shown=[msgspec.to_builtins(tool) for tool in tools],
        rules=OutputRules(
            splits_reasoning=state.splits_reasoning,
            make_tool_parser=state.make_tool_parser,
            is_parallel=request.parallel_tool_calls is not False,
        ),
    )


def _no_parser(state: ServerState) -> ApiError:
    if not state.config.enable_auto_tool_choice:
        message = "tool_choice auto is switched off on this server (--no-enable-auto-tool-choice)"
    else:
        message = (
            "Nothing is known of how this model writes tool calls: start the server with "
            "--tool-call-parser, or set tool_choice to none"
        )
    return not_supported("tool_choice", message)
