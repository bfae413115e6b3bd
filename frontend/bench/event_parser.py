"""Server-sent events of an OpenAI stream, read for their times and counts only.

Owns the cut of bytes into events and what counts as one: a chunk with choices, whatever its text.
Text is never decoded. Called by `http_stream.py` for each piece of a body.
"""

from typing import Any

import msgspec


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class EventParser:
    """The state of one stream."""

    def __init__(self) -> None:
        self.chunk_times: list[float] = []
        """One for each chunk with choices."""
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.error: str | None = None
        self.is_done = False
        """Whether [DONE] has come."""
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Reads the events that `data`, which came at `now`, completes."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {") and b"\n" not in event:
                self._payload(event[6:], now)
            else:
                self._lines(event, now)

    def _lines(self, event: bytes, now: float) -> None:
        """An event of any shape: comments, names, several data lines."""
        data = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        payload = b"\n".join(data)
        if payload == b"[DONE]":
            self.is_done = True
        elif payload:
            self._payload(payload, now)

    def _payload(self, payload: bytes, now: float) -> None:
        try:
            event = _decode(payload)
        except msgspec.DecodeError as error:
            self.error = self.error or f"an event is no chunk of an answer: {error}"
            return
        if event.choices:
            self.chunk_times.append(now)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens
        if event.error is not None:
            self.error = self.error or f"the stream holds an error: {error_text(event.error)}"


def error_text(error: Any) -> str:
    """The message of an OpenAI error object, or the object itself."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return str(error)
