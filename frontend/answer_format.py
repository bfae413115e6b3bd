"""The bytes of answers: chunks of a stream and whole bodies, for chat and for completions.

A stream's chunks are written from a template of which only the text is encoded each time. Owns the
shape of the JSON; never decides what is in a chunk (`respond.py` does).
"""

import secrets
from typing import ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cearx.frontend.choice import ChoiceDelta
from cearx.frontend.errors import ApiError
from cearx.frontend.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from cearx.frontend.openai_types import Usage
from cearx.frontend.parsed_text import ParsedText, ToolDelta

DONE_EVENT = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode

PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """Of a message; in a chunk it has an index, and the first one of a call id, type and name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[None] = []
    """OpenAI's, of what it found on the web."""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnswerFormat:
    """One answer's chunks; the two subclasses say what a chunk's choice looks like."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_is_in_choice: ClassVar[bool]
    """Whether what is told of a prompt stands in its choices, or else beside them."""

    def __init__(
        self,
        model: str,
        created: int,
        names: TokenNames,
        *,
        announces_usage: bool,
        shows_token_ids: bool = False,
        label: str | None = None,
    ) -> None:
        """`announces_usage`: chunks say `"usage":null` because a chunk with usage will come.

        `label`: the client's own id of the request.
        """
        self.id = self.id_prefix + (label or secrets.token_hex(16))
        self.model = model
        self.created = created
        self.names = names
        self.shows_token_ids = shows_token_ids
        self._members = b'data: {"id":%s,"object":%s,"created":%d,"model":%s,' % (
            _encode(self.id),
            _encode(self.chunk_object),
            created,
            _encode(model),
        )
        self._head = self._members + b'"choices":['
        self._tail = b'],"usage":null}\n\n' if announces_usage else b"]}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null}' + self._tail

    def chunk(self, delta: ChoiceDelta, *, is_first: bool, usage: Usage | None) -> bytes:
        """One event; `is_first`: of its choice; `usage`: up to here, if every chunk carries it."""
        start = b'{"index":%d,' % delta.index + self.delta_json(delta, is_first)
        has_extras = delta.records or delta.finish_reason is not None or self.shows_token_ids
        if not has_extras and usage is None:
            return self._head + start + self._plain_tail
        head = self._head
        logprobs = self.logprobs_json(delta) if delta.records else b"null"
        start += b',"logprobs":%s,"finish_reason":%s' % (logprobs, _encode(delta.finish_reason))
        if delta.finish_reason is not None:
            start += b',"stop_reason":%s' % _encode(delta.stop_reason)
        if self.shows_token_ids:
            start += b',"token_ids":%s' % _encode(delta.token_ids)
        if delta.prompt_token_ids is not None:
            of_prompt = b'"prompt_token_ids":%s' % _encode(list(delta.prompt_token_ids))
            if self.prompt_is_in_choice:
                start += b"," + of_prompt
            else:
                head = self._members + of_prompt + b',"choices":['
        tail = self._tail if usage is None else b'],"usage":%s}\n\n' % _encode(usage)
        return head + start + b"}" + tail

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk without choices that ends a stream with include_usage."""
        return self._head + b'],"usage":%s}\n\n' % _encode(usage)

    def error_event(self, error: ApiError) -> bytes:
        """What a stream says that cannot go on."""
        return b"data: %s\n\n" % error.body()

    def end(self) -> bytes:
        """The last bytes of a stream, whatever ended it."""
        return DONE_EVENT

    def token_ids(self, choice: ChoiceDelta) -> list[int] | UnsetType:
        return choice.token_ids if self.shows_token_ids else UNSET

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
    prompt_is_in_choice = False

    def delta_json(self, delta: ChoiceDelta, is_first: bool) -> bytes:
        if delta.parsed is not None:
            return b'"delta":' + _encode(_parsed_delta(delta.parsed, is_first))
        if is_first:
            return b'"delta":{"role":"assistant","content":%s}' % _encode(delta.text)
        if not delta.text and delta.finish_reason is not None:
            return b'"delta":{}'
        return b'"delta":{"content":%s}' % _encode(delta.text)

    def logprobs_json(self, delta: ChoiceDelta) -> bytes:
        return _encode(chat_logprobs(delta.records, self.names))

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes:
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            usage=usage,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=_message(choice),
                    logprobs=chat_logprobs(choice.records, self.names) if choice.records else None,
                    finish_reason=_ended(choice),
                    stop_reason=choice.stop_reason,
                    token_ids=self.token_ids(choice),
                )
                for choice in choices
            ],
            prompt_logprobs=prompt_logprobs(choices[0].prompt_records, self.names),
            prompt_token_ids=_prompt_ids(choices[0]),
        )
        return _encode(answer)


class ParsedDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


def _parsed_delta(parsed: ParsedText, is_first: bool) -> ParsedDelta:
    """Only what there is; the first one has a content in any case, as without a parser."""
    return ParsedDelta(
        role="assistant" if is_first else UNSET,
        content=parsed.content if parsed.content or is_first else UNSET,
        reasoning_content=parsed.reasoning or UNSET,
        tool_calls=_tool_calls(parsed.tools, is_chunk=True) or UNSET,
    )


def _message(choice: ChoiceDelta) -> ChatMessage:
    parsed = choice.parsed
    if parsed is None:
        return ChatMessage(content=choice.text)
    return ChatMessage(
        content=parsed.content if parsed.content or not parsed.tools else None,
        reasoning_content=parsed.reasoning or UNSET,
        tool_calls=_tool_calls(parsed.tools, is_chunk=False) or UNSET,
    )


def _tool_calls(tools: list[ToolDelta], *, is_chunk: bool) -> list[ToolCall]:
    return [
        ToolCall(
            index=tool.index if is_chunk else UNSET,
            id=tool.id or UNSET,
            type="function" if tool.id else UNSET,
            function=CalledFunction(name=tool.name or UNSET, arguments=tool.arguments),
        )
        for tool in tools
    ]


class CompletionFormat(AnswerFormat):
    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    prompt_is_in_choice = True

    def delta_json(self, delta: ChoiceDelta, is_first: bool) -> bytes:
        return b'"text":' + _encode(delta.text)

    def logprobs_json(self, delta: ChoiceDelta) -> bytes:
        return _encode(completion_logprobs(delta.records, self.names))

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
                    logprobs=completion_logprobs(choice.records, self.names)
                    if choice.records
                    else None,
                    finish_reason=_ended(choice),
                    stop_reason=choice.stop_reason,
                    token_ids=self.token_ids(choice),
                    prompt_logprobs=prompt_logprobs(choice.prompt_records, self.names),
                    prompt_token_ids=_prompt_ids(choice),
                )
                for choice in choices
            ],
        )
        return _encode(answer)


def _prompt_ids(choice: ChoiceDelta) -> list[int] | UnsetType:
    return UNSET if choice.prompt_token_ids is None else list(choice.prompt_token_ids)


def _ended(choice: ChoiceDelta) -> str:
    assert choice.finish_reason is not None, f"choice {choice.index} has not ended"
    return choice.finish_reason
