"""Log-probabilities in the two shapes that OpenAI's API has: per token for chat, columns else.

A token that is not valid UTF-8 by itself is written as U+FFFD with its true bytes beside it in
chat, and as `bytes:\\xe2\\x98` in completions, where its text must serve as a key. Called by the
renderers.
"""

from collections.abc import Callable

import msgspec

from cearx.frontend.choice import TokenRecord

TokenBytesOf = Callable[[int], bytes]


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(records: list[TokenRecord], token_bytes: TokenBytesOf) -> ChatLogprobs:
    content = []
    for record in records:
        data = token_bytes(record.token_id)
        top = [
            TopLogprob(token=_text(raw := token_bytes(t)), logprob=logprob, bytes=list(raw))
            for t, logprob in record.logprobs.top
        ]
        content.append(
            ChatTokenLogprob(
                token=_text(data),
                logprob=record.logprobs.logprob,
                bytes=list(data),
                top_logprobs=top,
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    records: list[TokenRecord], token_bytes: TokenBytesOf
) -> CompletionLogprobs:
    """The sampled token is always among its `top_logprobs`, so there may be one more than asked."""
    columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for record in records:
        token = _key(token_bytes(record.token_id))
        columns.tokens.append(token)
        columns.token_logprobs.append(record.logprobs.logprob)
        top = {_key(token_bytes(t)): logprob for t, logprob in record.logprobs.top}
        top.setdefault(token, record.logprobs.logprob)
        columns.top_logprobs.append(top)
        columns.text_offset.append(record.text_offset)
    return columns


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _key(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
