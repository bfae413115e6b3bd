"""The messages of a chat request, checked and brought to the form that templates take.

Content becomes one string: text parts are joined by line feeds. The arguments of earlier tool calls
become objects, as templates expect. What is known and not built (images, audio, files) is refused
by name. Called by `chat_route.py`.
"""

from typing import Any

import msgspec

from cearx.frontend.errors import ApiError, invalid, not_supported, shown

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""The roles of the API and those of the templates."""

UNBUILT_FIELDS = ("function_call", "audio")
UNBUILT_PARTS = ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal")
TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
"""Passed on to the template when they are there."""
KNOWN_FIELDS = frozenset(
    ("role", "content", "tool_calls", "refusal", "annotations", *TEXT_FIELDS, *UNBUILT_FIELDS)
)
MAX_TOOL_CALLS = 128


def unknown_fields(messages: list[dict[str, Any]]) -> set[str]:
    """Names of fields in messages that nobody knows; null says nothing and is left out."""
    return {
        f"messages[].{name}"
        for message in messages
        for name in message.keys() - KNOWN_FIELDS
        if message[name] is not None
    }


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises ApiError (400) that names the message."""
    return [_template_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _template_message(at: str, message: dict[str, Any]) -> dict[str, Any]:
    if "role" not in message:
        raise invalid(f"{at}.role", f"{at}.role is required", "missing_required_parameter")
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
        allowed = ", ".join(ROLES)
        raise invalid(
            f"{at}.role", f"Invalid value {shown(role)} for {at}.role: expected one of {allowed}"
        )
    for field in UNBUILT_FIELDS:
        if message.get(field) not in (None, []):
            raise not_supported(f"{at}.{field}", f"{at}.{field} is not supported by this server")
    content, calls = message.get("content"), message.get("tool_calls")
    rendered: dict[str, Any] = {"role": ROLES[role]}
    if calls and role == "assistant":
        content = "" if content is None else content
        rendered["tool_calls"] = _tool_calls(f"{at}.tool_calls", calls)
    elif calls:
        message_of = f"{at}.tool_calls is for messages of the assistant, this one is of {role}"
        raise invalid(f"{at}.tool_calls", message_of)
    rendered["content"] = _text(f"{at}.content", content)
    for field in TEXT_FIELDS:
        value = message.get(field)
        if value is not None:
            if not isinstance(value, str):
                raise _not_text(f"{at}.{field}", value)
            rendered[field] = value
    return rendered


def _tool_calls(at: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(at, f"Invalid value {shown(calls)} for {at}: expected a list", "invalid_type")
    if len(calls) > MAX_TOOL_CALLS:
        raise invalid(at, f"{at} may hold {MAX_TOOL_CALLS} calls, got {len(calls)}")
    return [_tool_call(f"{at}[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(at: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise invalid(at, f"Invalid value {shown(call)} for {at}: expected a function call")
    name, text = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str):
        raise _not_text(f"{at}.function.name", name)
    if not isinstance(text, str):
        raise _not_text(f"{at}.function.arguments", text)
    try:
        arguments = msgspec.json.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        arguments = text  # what a limit of tokens cut off is shown as it was
    rendered = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call.get("id"), str):
        rendered["id"] = call["id"]
    return rendered


def _text(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(at, f"{at} is required", "missing_required_parameter")
    if not isinstance(content, list):
        raise _not_text(at, content)
    return "\n".join(_part_text(f"{at}[{i}]", part) for i, part in enumerate(content))


def _part_text(at: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise _not_text(at, part)
    kind = part.get("type")
    if kind in UNBUILT_PARTS:
        raise not_supported(f"{at}.type", f"Parts of type {shown(kind)} ({at}) are not supported")
    if kind != "text":
        raise invalid(f"{at}.type", f'Invalid value {shown(kind)} for {at}.type: expected "text"')
    text = part.get("text")
    if not isinstance(text, str):
        raise _not_text(f"{at}.text", text)
    return text


def _not_text(at: str, value: Any) -> ApiError:
    return invalid(at, f"Invalid value {shown(value)} for {at}: expected a text", "invalid_type")
