"""The input of POST /v1/responses as messages of the chat API.

Owns how items join: a thought and the calls behind it belong to one message of the assistant. What
is known and not built, or stored nowhere, is refused by name. Called by `responses_types.py`.
"""

from typing import Any

from cearx.frontend.errors import invalid, not_supported, shown

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")


def chat_messages(given: str | list[Item]) -> list[dict[str, Any]]:
    """Raises ApiError (400) that names the item."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thought = ""
    for index, item in enumerate(given):
        at = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _thought(at, item)
            continue
        if kind == "function_call":
            own = _assistant(messages, thought)
            own.setdefault("tool_calls", []).append(_call(at, item))
        elif kind == "function_call_output":
            messages.append(_output(at, item))
        elif kind == "message":
            messages.append(_message(at, item))
        else:
            message = f"Items of type {shown(kind)} ({at}) are not supported"
            raise not_supported(f"{at}.type", message)
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    if not messages:
        raise invalid("input", "input must have a message, got thoughts alone")
    return messages


def _assistant(messages: list[dict[str, Any]], thought: str) -> dict[str, Any]:
    """The message that a call belongs to: a new thought begins a new one."""
    if not messages or messages[-1]["role"] != "assistant" or thought:
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _message(at: str, item: Item) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        allowed = ", ".join(ROLES)
        raise invalid(f"{at}.role", f"{at}.role must be one of {allowed}, got {shown(role)}")
    return {"role": role, "content": _text(f"{at}.content", item.get("content"))}


def _call(at: str, item: Item) -> dict[str, Any]:
    function = {name: _string(f"{at}.{name}", item.get(name)) for name in ("name", "arguments")}
    call_id = _string(f"{at}.call_id", item.get("call_id"))
    return {"id": call_id, "type": "function", "function": function}


def _output(at: str, item: Item) -> dict[str, Any]:
    call_id = _string(f"{at}.call_id", item.get("call_id"))
    content = _text(f"{at}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _thought(at: str, item: Item) -> str:
    """In the clear if it is there, else its summary; what another server encrypted is lost."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise invalid(f"{at}.{name}", f"{at}.{name} must be a list, got {shown(parts)}")
        if parts:
            return "\n".join(_part(f"{at}.{name}[{i}]", part) for i, part in enumerate(parts))
    return ""


def _text(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(at, f"{at} must be a text or a list of parts, got {shown(content)}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            name = f"{at}[{index}].type"
            raise not_supported(name, f"Parts of type {shown(kind)} ({name}) are not supported")
    return "\n".join(_part(f"{at}[{i}]", part) for i, part in enumerate(content))


def _part(at: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise invalid(at, f"{at} must be an object, got {shown(part)}", "invalid_type")
    return _string(f"{at}.text", part.get("text"))


def _string(at: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(at, f"Invalid value {shown(value)} for {at}: expected a text", "invalid_type")
    return value
