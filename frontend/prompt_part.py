"""What an answer tells of its prompt: the echoed text, its token ids, its log-probabilities.

Owns the gathering of log-probabilities, which come chunk by chunk, and where each token of an echo
begins in the text. It is told once, whole, before the choice's own first token, however the engine
cuts it. Built by `generation_route.py`, called by `choice.py`.
"""

from collections.abc import Sequence

import msgspec

from cearx.core.messages import Output, TokenLogprobs
from cearx.frontend.detokenizer import IncrementalDetokenizer
from cearx.frontend.prompts import Prompt
from cearx.frontend.tokenizer import Tokenizer


class TokenRecord(msgspec.Struct, kw_only=True):
    """One token with its log-probabilities and where its text begins in the choice's text."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt, which follows nothing."""
    text_offset: int


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as text, and where in it each token begins."""

    text: str
    offsets: Sequence[int]


def echo_of(prompt: Prompt, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Echo:
    """The client's own text where there is one, else what the tokens stand for.

    Of the client's text a begin-of-sequence token that the tokenizer added is no part. An
    incomplete character at the end of a prompt of tokens is left to the output to complete.
    """
    token_ids = prompt.ids()
    detokenizer = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=skip_special_tokens and prompt.text is None
    )
    bos = tokenizer.bos_token
    has_added_bos = (
        prompt.text is not None
        and bos is not None
        and token_ids[0] == tokenizer.bos_token_id
        and not prompt.text.startswith(bos)
    )
    offsets: list[int] = []
    pieces: list[str] = []
    length = 0
    for index, token_id in enumerate(token_ids):
        offsets.append(length)
        if not (has_added_bos and index == 0):
            pieces.append(detokenizer.push((token_id,)))
            length += len(pieces[-1])
    if prompt.text is None:
        return Echo(text="".join(pieces), offsets=offsets)
    # A tokenizer that normalises may have changed the length.
    last = len(prompt.text)
    return Echo(text=prompt.text, offsets=[min(offset, last) for offset in offsets])


class PromptPart:
    """One choice's; `take` the engine's outputs until it answers True, once."""

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        echo: Echo | None = None,
        num_echo_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        shows_token_ids: bool = False,
    ) -> None:
        """The numbers are of most likely tokens; None: no log-probabilities there."""
        self.echo_text = "" if echo is None else echo.text
        self.token_ids = token_ids
        self.shows_token_ids = shows_token_ids
        self._echo = echo
        self._num_echo_logprobs = num_echo_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        wanted = num_echo_logprobs is not None or num_prompt_logprobs is not None
        self._num_awaited = len(token_ids) - 1 if wanted else 0
        self._logprobs: list[TokenLogprobs] = []

    def take(self, output: Output) -> bool:
        """Whether the prompt is known completely now."""
        self._logprobs.extend(output.prompt_logprobs)
        assert len(self._logprobs) <= self._num_awaited, (
            f"{len(self._logprobs)} log-probabilities for a prompt of {len(self.token_ids)} tokens"
        )
        return len(self._logprobs) == self._num_awaited

    def records(self) -> list[TokenRecord]:
        """One for each token of the echo; empty when they are not asked for."""
        if self._echo is None or self._num_echo_logprobs is None:
            return []
        known = [None, *(_cut(found, self._num_echo_logprobs) for found in self._logprobs)]
        return [
            TokenRecord(token_id=token_id, logprobs=logprobs, text_offset=offset)
            for token_id, logprobs, offset in zip(
                self.token_ids, known, self._echo.offsets, strict=True
            )
        ]

    def prompt_records(self) -> list[TokenRecord] | None:
        """For the prompt's own field; None when they are not asked for."""
        limit = self._num_prompt_logprobs
        if limit is None:
            return None
        known = [None, *(_cut(found, limit) for found in self._logprobs)]
        return [
            TokenRecord(token_id=token_id, logprobs=logprobs, text_offset=0)
            for token_id, logprobs in zip(self.token_ids, known, strict=True)
        ]


def _cut(logprobs: TokenLogprobs, num_top: int) -> TokenLogprobs:
    if len(logprobs.top) <= num_top:
        return logprobs
    return msgspec.structs.replace(logprobs, top=logprobs.top[:num_top])
