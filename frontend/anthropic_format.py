"""The bytes of answers to POST /v1/messages: events with names, blocks that open and close.

Owns the order of blocks: a thought, a text and each call of a tool is one. Never decides what is in
a delta (`respond.py` does). Made by `anthropic_route.py`, one for an answer with one choice.
"""

from typing import Any

import msgspec

from cearx.frontend.answer_format import AnswerFormat
from cearx.frontend.anthropic_errors import anthropic_error
from cearx.frontend.choice import ChoiceDelta
from cearx.frontend.errors import ApiError
from cearx.frontend.openai_types import Usage
from cearx.frontend.parsed_text import ParsedText, ToolDelta

_encode = msgspec.json.Encoder().encode

UNTOLD_USAGE = (
    "cache_creation",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "inference_geo",
    "server_tool_use",
    "service_tier",
)
"""Of Anthropic's own service; null here, as clients with a schema want them to be there."""


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode({"type": name, **fields}))


class AnthropicFormat(AnswerFormat):
    id_prefix = "msg_"
    chunk_object = "message"
    prompt_is_in_choice = False
    num_prompt_tokens = 0
    """Set before the first chunk."""
    _block = -1
    _kind: object = None
    """Of the open block: thinking, text, or the index of a call."""
    _has_calls = False
    _end: ChoiceDelta | None = None

    def chunk(self, delta: ChoiceDelta, *, is_first: bool, usage: Usage | None) -> bytes:
        events = [_event("message_start", message=self._start())] if is_first else []
        parsed = delta.parsed or ParsedText(content=delta.text)
        if parsed.reasoning:
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
            piece = {"type": "thinking_delta", "thinking": parsed.reasoning}
            events += self._piece("thinking", block, piece)
        if parsed.content:
            piece = {"type": "text_delta", "text": parsed.content}
            events += self._piece("text", {"type": "text", "text": "", "citations": None}, piece)
        self._has_calls = self._has_calls or bool(parsed.tools)
        for tool in parsed.tools:
            block = _tool_use(tool, {})
            piece = {"type": "input_json_delta", "partial_json": tool.arguments}
            events += self._piece(tool.index, block, piece)
        if delta.finish_reason is not None:
            self._end = delta
            events += self._close()
        return b"".join(events)

    def _piece(self, kind: object, block: dict[str, Any], piece: dict[str, Any]) -> list[bytes]:
        events = []
        if kind != self._kind:
            events += self._close()
            self._kind = kind
            self._block += 1
            events.append(_event("content_block_start", index=self._block, content_block=block))
        return [*events, _event("content_block_delta", index=self._block, delta=piece)]

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        self._kind = None
        return [_event("content_block_stop", index=self._block)]

    def usage_chunk(self, usage: Usage) -> bytes:
        assert self._end is not None, "the choice has not ended"
        delta = _reasons(self._end, self._has_calls)
        told = _counts(usage)
        return _event("message_delta", delta=delta, usage=told) + _event("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %s\n\n" % anthropic_error(error)

    def end(self) -> bytes:
        return b""

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes:
        [choice] = choices
        parsed = choice.parsed or ParsedText(content=choice.text)
        content: list[dict[str, Any]] = []
        if parsed.reasoning:
            content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.content:
            content.append({"type": "text", "text": parsed.content, "citations": None})
        for tool in parsed.tools:
            content.append(_tool_use(tool, _arguments(tool.arguments)))
        message = self._start() | {"content": content} | _reasons(choice, bool(parsed.tools))
        message["usage"] |= _counts(usage)
        return _encode(message)

    def _start(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": {
                "input_tokens": self.num_prompt_tokens,
                "output_tokens": 0,
                "output_tokens_details": None,
                **dict.fromkeys(UNTOLD_USAGE),
            },
        }


def _reasons(choice: ChoiceDelta, has_calls: bool) -> dict[str, Any]:
    stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    reason = "end_turn" if stop is None else "stop_sequence"
    if choice.finish_reason == "length":
        reason = "max_tokens"
    elif has_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stop}


def _counts(usage: Usage) -> dict[str, Any]:
    counts: dict[str, Any] = {"output_tokens": usage.completion_tokens}
    if usage.completion_tokens_details is not None:
        num_thinking = usage.completion_tokens_details.reasoning_tokens
        counts["output_tokens_details"] = {"thinking_tokens": num_thinking}
    return counts


def _tool_use(tool: ToolDelta, arguments: Any) -> dict[str, Any]:
    named = {"type": "tool_use", "id": tool.id, "name": tool.name, "input": arguments}
    return {**named, "caller": {"type": "direct"}}


def _arguments(text: str) -> Any:
    """An object in any case: what a limit of tokens cut off is no JSON."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
