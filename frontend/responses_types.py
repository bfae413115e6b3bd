"""The bodies of POST /v1/responses: what is asked, what is answered, and the chat it stands for.

Nothing is stored, so whatever refers to an earlier response is refused by name, like every tool
but functions. Called by `responses_route.py`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cearx.frontend.errors import invalid, not_supported, shown
from cearx.frontend.openai_types import (
    INT64_MAX,
    MAX_MESSAGES,
    MAX_TOOLS,
    OpenAIPenalty,
    PositiveInt,
    ReasoningEffort,
    RepetitionPenalty,
    StopString,
    ToolName,
    UnitInterval,
)
from cearx.frontend.responses_input import chat_messages

LOGPROBS = "message.output_text.logprobs"
PASSED = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "cache_salt",
    "priority",
    "request_id",
    "parallel_tool_calls",
    "chat_template_kwargs",
)
"""Fields that mean the same in a chat request."""


class FunctionTool(msgspec.Struct, kw_only=True):
    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    """There are no summaries: the whole thought is in the item's content."""


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """One tool by name, or a choice among some of the tools."""

    type: Literal["function", "allowed_tools"]
    name: ToolName | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] = []


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = (
        None
    )
    """The first is asked for by clients that store nothing; a thought is sent in plain text."""
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    """Most likely tokens beside each; more than 0 only with `message.output_text.logprobs`."""

    # Extensions, as in the chat route.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: UnitInterval | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: OpenAIPenalty | None = None
    frequency_penalty: OpenAIPenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None

    # Nothing is stored and nothing runs in the background.
    store: bool | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    context_management: None = None
    truncation: Literal["disabled"] | None = None

    # Hints for OpenAI's own fleet; they change nothing in an answer.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Response(msgspec.Struct, kw_only=True):
    """The answer, and the state of it that some events of a stream carry."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    presence_penalty: float
    frequency_penalty: float
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: dict[str, Any] | None = None
    user: str | None


def chat_fields(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of a `ChatCompletionRequest` that say the same; raises ApiError (400)."""
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise not_supported(name, f"{name} is not supported: it must be false, got true")
    messages = chat_messages(request.input)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    tools, choice = _tools(request)
    fields: dict[str, Any] = {name: getattr(request, name) for name in PASSED}
    return fields | {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        **_logprobs(request),
        "response_format": _response_format(request.text),
        "tools": [_chat_tool(tool) for tool in tools],
        "tool_choice": choice,
    }


def _logprobs(request: ResponsesRequest) -> dict[str, Any]:
    top = request.top_logprobs or 0
    if LOGPROBS in (request.include or []):
        return {"logprobs": True, "top_logprobs": top}
    if top:
        raise invalid("top_logprobs", f"top_logprobs needs {LOGPROBS!r} in include, got {top}")
    return {}


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    kind = text.format.type
    if kind != "json_schema":
        return {"type": kind}
    if text.format.schema is None:
        name = "text.format.schema"
        raise invalid(name, f"{name} is required", "missing_required_parameter")
    return {"type": kind, "json_schema": {"schema": text.format.schema}}


def _tools(request: ResponsesRequest) -> tuple[list[FunctionTool], str | dict[str, Any] | None]:
    """The tools that may be called, and the chat's choice among them."""
    tools = request.tools or []
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        if tool.type != "function":
            message = f"Tools of type {shown(tool.type)} ({at}) are not supported, only functions"
            raise not_supported(f"{at}.type", message)
        if tool.name is None:
            raise invalid(f"{at}.name", f"{at}.name is required", "missing_required_parameter")
    choice = request.tool_choice
    if not isinstance(choice, ToolChoice):
        return tools, choice
    if choice.type == "function":
        return tools, {"type": "function", "function": {"name": choice.name or ""}}
    names = {tool.name for tool in tools}
    for index, allowed in enumerate(choice.tools):
        at = f"tool_choice.tools[{index}]"
        if allowed.get("type") != "function" or allowed.get("name") not in names:
            raise invalid(at, f"{at} must be one of the functions in tools, got {shown(allowed)}")
    kept = {allowed["name"] for allowed in choice.tools}
    if not kept:
        raise invalid("tool_choice.tools", "tool_choice.tools must name a tool, got none")
    return [tool for tool in tools if tool.name in kept], choice.mode


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {**function, "strict": tool.strict}}
