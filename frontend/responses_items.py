"""The output items of one response, and the events that tell of them while they grow.

Owns the order of events of an item: added, its part, deltas, done. Streams and whole bodies are
made by the same steps. Never knows of the response around them (`responses_format.py` does).
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from cearx.frontend.logprobs import ChatTokenLogprob
from cearx.frontend.parsed_text import ParsedText, ToolDelta

_encode = msgspec.json.Encoder().encode

PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
"""Items that have a part, and its type."""
PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


class OutputItems:
    """`push` what was parsed, `finish` once."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._number = 0
        self._item: dict[str, Any] | None = None
        """The open one."""
        self._text: list[str] = []
        """Of the open item."""
        self._logprobs: list[ChatTokenLogprob] = []
        """Of its tokens."""
        self._call: int | None = None
        """Index of the call that is open."""

    def event(self, kind: str, **fields: Any) -> bytes:
        """With the next sequence number."""
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encode(body))

    def push(self, parsed: ParsedText, logprobs: Sequence[ChatTokenLogprob] = ()) -> bytes:
        """`logprobs`: of the content's tokens, if they are told."""
        events = []
        if parsed.reasoning:
            events += [self._open("reasoning"), self._add(parsed.reasoning)]
        if parsed.content:
            events += [self._open("message"), self._add(parsed.content, logprobs)]
        for tool in parsed.tools:
            if tool.index != self._call:
                events += [self._open("function_call", tool)]
            if tool.arguments:
                events.append(self._add(tool.arguments))
        return b"".join(events)

    def finish(self, *, is_complete: bool) -> bytes:
        """An answer without a word is an empty message."""
        opened = b"" if self.done or self._item else self._open("message")
        return opened + self.close("completed" if is_complete else "incomplete")

    def _open(self, kind: str, tool: ToolDelta | None = None) -> bytes:
        if self._item is not None and self._item["type"] == kind and tool is None:
            return b""
        closed = self.close("completed")
        self._call = None if tool is None else tool.index
        self._item = {"id": PREFIXES[kind] + secrets.token_hex(16), "type": kind}
        if tool is not None:
            self._item |= {"call_id": tool.id, "name": tool.name, "arguments": ""}
        elif kind == "message":
            self._item |= {"role": "assistant", "content": []}
        else:
            self._item |= {"summary": [], "content": []}
        self._item["status"] = "in_progress"
        place = {"output_index": len(self.done), "item": self._item}
        added = self.event("response.output_item.added", **place)
        if kind in PARTS:
            added += self._tell("content_part.added", part=_part(kind, "", ()))
        return closed + added

    def _add(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> bytes:
        self._text.append(text)
        self._logprobs += logprobs
        return self._tell_text("delta", logprobs, delta=text)

    def close(self, status: str) -> bytes:
        """Ends the open item, if there is one."""
        item = self._item
        if item is None:
            return b""
        text, kind = "".join(self._text), item["type"]
        if kind in PARTS:
            part = _part(kind, text, self._logprobs)
            events = self._tell_text("done", self._logprobs, text=text)
            events += self._tell("content_part.done", part=part)
            item["content"] = [part]
        else:
            item["arguments"] = text
            events = self._tell_text("done", (), arguments=text, name=item["name"])
        item["status"] = status
        place = {"output_index": len(self.done), "item": item}
        events += self.event("response.output_item.done", **place)
        self.done.append(item)
        self._item, self._text, self._logprobs, self._call = None, [], [], None
        return events

    def _tell(self, what: str, **fields: Any) -> bytes:
        assert self._item is not None, "no item is open"
        place: dict[str, Any] = {"item_id": self._item["id"], "output_index": len(self.done)}
        if self._item["type"] in PARTS:
            place["content_index"] = 0
        return self.event(f"response.{what}", **place, **fields)

    def _tell_text(self, what: str, logprobs: Sequence[ChatTokenLogprob], **fields: Any) -> bytes:
        assert self._item is not None, "no item is open"
        kind = self._item["type"]
        if kind == "message":
            fields["logprobs"] = logprobs
        return self._tell(f"{PARTS.get(kind, 'function_call_arguments')}.{what}", **fields)


def _part(kind: str, text: str, logprobs: Sequence[ChatTokenLogprob]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": PARTS[kind], "text": text}
    return {"type": PARTS[kind], "text": text, "annotations": [], "logprobs": logprobs}
