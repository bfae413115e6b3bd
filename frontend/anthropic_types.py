"""The bodies of POST /v1/messages and its count_tokens, and what they mean as a chat request.

Anthropic's blocks become messages of the chat API, so that templates, tools and limits are the
same. What is known and not built is refused by name. Called by `anthropic_route.py`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cearx.frontend.errors import invalid, not_supported, shown
from cearx.frontend.openai_types import (
    MAX_MESSAGES,
    MAX_TOOLS,
    PositiveInt,
    ReasoningEffort,
    UnitInterval,
)

Block = dict[str, Any]


class Thinking(msgspec.Struct, kw_only=True):
    """Told to the chat template, as `enable_thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    """Accepted; how long the model thinks is its own affair, within max_tokens."""
    display: Literal["summarized"] | None = None
    """Thoughts are told as they are."""


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What the prompt is made of."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted; every prompt is cached."""


class CountTokensAnswer(msgspec.Struct, kw_only=True):
    input_tokens: int


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: PositiveInt
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: UnitInterval | None = None
    top_p: UnitInterval | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    metadata: dict[str, Any] | None = None
    """Accepted, as the next two; they change nothing in an answer."""
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: Literal["standard"] | None = None
    container: None = None


def chat_fields(request: MessagesRequest) -> dict[str, Any]:
    """The fields of a `ChatCompletionRequest` that say the same; raises ApiError (400)."""
    return prompt_fields(request) | {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    }


def prompt_fields(request: CountTokensRequest) -> dict[str, Any]:
    """Those that the prompt is made of; raises ApiError (400)."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text("system", request.system)})
    for index, message in enumerate(request.messages):
        messages += _messages(f"messages[{index}]", message)
    choice = request.tool_choice or {}
    return {
        "model": request.model,
        "messages": messages,
        "tools": [_tool(f"tools[{i}]", tool) for i, tool in enumerate(request.tools or [])],
        "tool_choice": _tool_choice(choice) if request.tool_choice else None,
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
        **_output(request),
    }


def _output(request: CountTokensRequest) -> dict[str, Any]:
    thinking, config = request.thinking, request.output_config or OutputConfig()
    fields: dict[str, Any] = {"reasoning_effort": config.effort}
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking.type != "disabled"}
    if config.format is not None:
        schema = {"schema": config.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _messages(at: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers of tools are messages of their own in chat, before what the user says besides."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise invalid(f"{at}.role", f"{at}.role must be user or assistant, got {shown(role)}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(f"{at}.content", f"{at}.content must be a text or blocks")
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        where = f"{at}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_string(f"{where}.text", block.get("text")))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_string(f"{where}.thinking", block.get("thinking")))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(where, block))
        elif kind == "tool_result" and role == "user":
            results.append(_result(where, block))
        else:
            message_of = f"A block of type {shown(kind)} is not supported from the {role} ({where})"
            raise not_supported(f"{where}.type", message_of)
    own: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return [*results, own] if texts or calls or not results else results


def _call(at: str, block: Block) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    name = _string(f"{at}.name", block.get("name"))
    function = {"name": name, "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(at: str, block: Block) -> dict[str, Any]:
    content = block.get("content") or ""
    call_id = _string(f"{at}.tool_use_id", block.get("tool_use_id"))
    return {"role": "tool", "tool_call_id": call_id, "content": _text(f"{at}.content", content)}


def _text(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(at, f"{at} must be a text or blocks of text, got {shown(content)}")
    texts = []
    for index, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise not_supported(f"{at}[{index}]", f"Only blocks of text are supported at {at}")
        texts.append(_string(f"{at}[{index}].text", block.get("text")))
    return "\n".join(texts)


def _string(at: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(at, f"Invalid value {shown(value)} for {at}: expected a text", "invalid_type")
    return value


def _tool(at: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        kind = shown(tool["type"])
        raise not_supported(f"{at}.type", f"Tools of type {kind} ({at}) are not supported")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> str | dict[str, Any]:
    kinds: dict[Any, Literal["auto", "required", "none"]] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
    }
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in kinds:
        message = f"tool_choice.type must be auto, any, tool or none, got {shown(kind)}"
        raise invalid("tool_choice.type", message)
    return kinds[kind]
