"""Random prompts of an exact number of tokens, for chats and for plain completions.

Owns the words: common English ones, of which it keeps those that are one token each by the server's
own count, so that a prompt's length is known before it is sent and no prompt has to be sent twice
(a second time it would be in the prefix cache). Called by `matrix.py` and `serve.py`.
"""

import random
from collections.abc import Awaitable, Callable, Sequence

from cearx.frontend.bench.bench_error import BenchError

WORDS = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work government"
    " number night point home water room mother area money story fact month lot right study book"
    " eye job word business issue side kind head house service friend father power hour game line"
    " end member law car city community name president team minute idea kid body information back"
    " parent face others level office door health person art war history party result change"
    " morning reason research girl guy moment air teacher force education good new first last long"
    " great little own other old big high different small large next early young important few"
    " public bad same able be have do say get make go know take see come think look want give use"
    " find tell ask seem feel try leave call keep let begin show hear play run move live believe"
    " bring happen write provide sit stand lose pay meet include continue set learn lead"
    " understand watch follow stop create speak read allow add spend grow open walk win offer"
    " remember love consider appear buy wait serve die send expect build stay fall cut reach kill"
    " remain"
).split()
FIRST_WORD = "The"
"""Starts every text: a word without a space before it may be another number of tokens."""
GROUP_SIZE = 32
MIN_WORDS = 64
"""Fewer one-token words than this would make prompts alike."""

CountTokens = Callable[[str], Awaitable[int]]
"""The tokens of a prompt with this text, chat template included, by the server or a tokenizer."""


class WordPrompts:
    """Texts of exactly so many tokens as a prompt; made by `calibrate`."""

    def __init__(self, words: Sequence[str], base_tokens: int, seed: int) -> None:
        self._words = words
        self._base_tokens = base_tokens
        self._random = random.Random(seed)
        self._given: set[str] = set()

    @property
    def min_tokens(self) -> int:
        """The template and the first word."""
        return self._base_tokens

    def shared_words(self, num_tokens: int) -> list[str]:
        """Words that make the start of several prompts alike, up to `num_tokens` of each."""
        return self._draw(max(0, num_tokens - self._base_tokens))

    def text(self, num_tokens: int, shared: Sequence[str] = ()) -> str:
        """A new text; raises BenchError when the template alone is longer."""
        num_words = num_tokens - self._base_tokens - len(shared)
        if num_words < 0:
            raise BenchError(
                f"a prompt has at least {self._base_tokens + len(shared)} tokens (the chat"
                f" template, one word and the shared prefix), {num_tokens} were asked for"
            )
        for _ in range(100):
            text = " ".join([FIRST_WORD, *shared, *self._draw(num_words)])
            if text not in self._given:
                self._given.add(text)
                return text
        raise BenchError(
            f"prompts of {num_tokens} tokens leave {num_words} words beside the chat template: too"
            f" few for {len(self._given) + 1} different prompts"
        )

    def _draw(self, count: int) -> list[str]:
        return self._random.choices(self._words, k=count)


async def calibrate(count_tokens: CountTokens, seed: int) -> WordPrompts:
    """Finds the words that are one token each; raises BenchError when they are too few."""
    base = await count_tokens(FIRST_WORD)

    async def single_token_words(words: Sequence[str]) -> list[str]:
        excess = await count_tokens(" ".join([FIRST_WORD, *words])) - base - len(words)
        if excess == 0:  # each is at least one token, so each is exactly one
            return list(words)
        if len(words) == 1:
            return []
        half = len(words) // 2
        return await single_token_words(words[:half]) + await single_token_words(words[half:])

    words: list[str] = []
    for start in range(0, len(WORDS), GROUP_SIZE):
        words += await single_token_words(WORDS[start : start + GROUP_SIZE])
    if len(words) < MIN_WORDS:
        raise BenchError(
            f"only {len(words)} of {len(WORDS)} common words are one token each, {MIN_WORDS} are"
            " needed: this model's prompts cannot be made of words (try --endpoint completions)"
        )
    return WordPrompts(words, base, seed)


class TokenPrompts:
    """Prompts as token ids: exact by construction."""

    def __init__(self, first_id: int, end_id: int, seed: int) -> None:
        """Ids of first_id <= id < end_id are drawn."""
        self._ids = range(first_id, end_id)
        self._random = random.Random(seed)

    def shared_ids(self, num_tokens: int) -> list[int]:
        return self._random.choices(self._ids, k=num_tokens)

    def token_ids(self, num_tokens: int, shared: Sequence[int] = ()) -> list[int]:
        assert num_tokens >= len(shared), f"{len(shared)} shared tokens exceed {num_tokens}"
        return [*shared, *self._random.choices(self._ids, k=num_tokens - len(shared))]
