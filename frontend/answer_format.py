"""The bytes of answers: chunks of a stream and whole bodies, for chat and for completions.

A stream's chunks are written from a template of which only the text is encoded each time. Owns the
shape of the JSON; never decides what is in a chunk (`respond.py` does).
"""

import secrets
from typing import ClassVar, Literal

import msgspec

from cearx.frontend.choice import ChoiceDelta
from cearx.frontend.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenBytesOf,
    chat_logprobs,
    completion_logprobs,
)
from cearx.frontend.openai_types import Usage

DONE_EVENT = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: None = None


class AnswerFormat:
    """One answer's chunks; the two subclasses say what a chunk's choice looks like."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, model: str, created: int, token_bytes: TokenBytesOf, *, announces_usage: bool
    ) -> None:
        """`announces_usage`: chunks say `"usage":null` because a chunk with usage will come."""
        self.id = self.id_prefix + secrets.token_hex(16)
        self.model = model
        self.created = created
        self.token_bytes = token_bytes
        self._head = (b'data: {"id":%s,"object":%s,"created":%d,"model":%s,"choices":[') % (
            _encode(self.id),
            _encode(self.chunk_object),
            created,
            _encode(model),
        )
        self._tail = b'],"usage":null}\n\n' if announces_usage else b"]}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null}' + self._tail

    def chunk(self, delta: ChoiceDelta, *, is_first: bool, usage: Usage | None) -> bytes:
        """One event; `is_first`: of its choice; `usage`: up to here, if every chunk carries it."""
        start = self._head + b'{"index":%d,' % delta.index + self.delta_json(delta, is_first)
        if not delta.records and delta.finish_reason is None and usage is None:
            return start + self._plain_tail
        logprobs = self.logprobs_json(delta) if delta.records else b"null"
        start += b',"logprobs":%s,"finish_reason":%s' % (logprobs, _encode(delta.finish_reason))
        if delta.finish_reason is not None:
            start += b',"stop_reason":%s' % _encode(delta.stop_reason)
        tail = self._tail if usage is None else b'],"usage":%s}\n\n' % _encode(usage)
        return start + b"}" + tail

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk without choices that ends a stream with include_usage."""
        return self._head + b'],"usage":%s}\n\n' % _encode(usage)

    def delta_json(self, delta: ChoiceDelta, is_first: bool) -> bytes:
        """The member that holds the text."""
        raise NotImplementedError

    def logprobs_json(self, delta: ChoiceDelta) -> bytes:
        raise NotImplementedError

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes:
        """The whole answer from whole choices."""
        raise NotImplementedError


class ChatFormat(AnswerFormat):
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def delta_json(self, delta: ChoiceDelta, is_first: bool) -> bytes:
        if is_first:
            return b'"delta":{"role":"assistant","content":%s}' % _encode(delta.text)
        if not delta.text and delta.finish_reason is not None:
            return b'"delta":{}'
        return b'"delta":{"content":%s}' % _encode(delta.text)

    def logprobs_json(self, delta: ChoiceDelta) -> bytes:
        return _encode(chat_logprobs(delta.records, self.token_bytes))

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes:
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            usage=usage,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=ChatMessage(content=choice.text),
                    logprobs=chat_logprobs(choice.records, self.token_bytes)
                    if choice.records
                    else None,
                    finish_reason=_ended(choice),
                    stop_reason=choice.stop_reason,
                )
                for choice in choices
            ],
        )
        return _encode(answer)


class CompletionFormat(AnswerFormat):
    id_prefix = "cmpl-"
    chunk_object = "text_completion"

    def delta_json(self, delta: ChoiceDelta, is_first: bool) -> bytes:
        return b'"text":' + _encode(delta.text)

    def logprobs_json(self, delta: ChoiceDelta) -> bytes:
        return _encode(completion_logprobs(delta.records, self.token_bytes))

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes:
        answer = Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            usage=usage,
            choices=[
                CompletionChoice(
                    index=choice.index,
                    text=choice.text,
                    logprobs=completion_logprobs(choice.records, self.token_bytes)
                    if choice.records
                    else None,
                    finish_reason=_ended(choice),
                    stop_reason=choice.stop_reason,
                )
                for choice in choices
            ],
        )
        return _encode(answer)


def _ended(choice: ChoiceDelta) -> str:
    assert choice.finish_reason is not None, f"choice {choice.index} has not ended"
    return choice.finish_reason
