"""Log-probabilities in the two shapes that OpenAI's API has: per token for chat, columns else.

A token that is not valid UTF-8 by itself is written as U+FFFD with its true bytes beside it in
chat, and as `bytes:\\xe2\\x98` in completions, where its text must serve as a key. Called by the
renderers.
"""

from collections.abc import Callable

import msgspec
from msgspec import UNSET, UnsetType

from cearx.frontend.prompt_part import TokenRecord

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
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One candidate for a place in the prompt, under its token id."""

    logprob: float
    rank: int
    decoded_token: str


class TokenNames(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are written in log-probabilities."""

    token_bytes: TokenBytesOf
    as_token_ids: bool = False
    """`token_id:7` instead of a text, which two tokens may share."""

    def text(self, token_id: int) -> str:
        if self.as_token_ids:
            return f"token_id:{token_id}"
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """A text that serves as a key."""
        if self.as_token_ids:
            return f"token_id:{token_id}"
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(records: list[TokenRecord], names: TokenNames) -> ChatLogprobs:
    content = []
    for record in records:
        assert record.logprobs is not None, "only a prompt's first token has none"
        top = [
            TopLogprob(token=names.text(t), logprob=logprob, bytes=list(names.token_bytes(t)))
            for t, logprob in record.logprobs.top
        ]
        content.append(
            ChatTokenLogprob(
                token=names.text(record.token_id),
                logprob=record.logprobs.logprob,
                bytes=list(names.token_bytes(record.token_id)),
                top_logprobs=top,
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(records: list[TokenRecord], names: TokenNames) -> CompletionLogprobs:
    """The token itself is always among its `top_logprobs`, so there may be one more than asked."""
    columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for record in records:
        token = names.key(record.token_id)
        columns.tokens.append(token)
        columns.text_offset.append(record.text_offset)
        if record.logprobs is None:
            columns.token_logprobs.append(None)
            columns.top_logprobs.append(None)
            continue
        columns.token_logprobs.append(record.logprobs.logprob)
        top = {names.key(t): logprob for t, logprob in record.logprobs.top}
        top.setdefault(token, record.logprobs.logprob)
        columns.top_logprobs.append(top)
    return columns


def prompt_logprobs(
    records: list[TokenRecord] | None, names: TokenNames
) -> list[dict[str, PromptLogprob] | None] | UnsetType:
    """vLLM's form: for each token of the prompt its candidates by token id, None for the first."""
    if records is None:
        return UNSET
    found: list[dict[str, PromptLogprob] | None] = []
    for record in records:
        own = record.logprobs
        if own is None:
            found.append(None)
            continue
        candidates = {
            token_id: PromptLogprob(logprob=logprob, rank=rank, decoded_token=names.text(token_id))
            for rank, (token_id, logprob) in enumerate(own.top, start=1)
        }
        candidates.setdefault(
            record.token_id,
            PromptLogprob(
                logprob=own.logprob, rank=own.rank, decoded_token=names.text(record.token_id)
            ),
        )
        found.append({str(token_id): candidate for token_id, candidate in candidates.items()})
    return found
