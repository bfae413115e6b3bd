"""Random prompts for an endpoint: words for chats, token ids for completions.

Owns the choice between the two and the shared prefix of a run. Called by `matrix.py` and
`serve.py`.
"""

from pathlib import Path

from cearx.frontend.bench.endpoint import Endpoint
from cearx.frontend.bench.local_count import local_counter
from cearx.frontend.bench.random_prompts import TokenPrompts, WordPrompts, calibrate


class ChatSource:
    """Texts whose length holds the chat template."""

    def __init__(self, words: WordPrompts, prefix_len: int = 0) -> None:
        self._words = words
        self._shared = words.shared_words(prefix_len)

    def prompt(self, num_tokens: int) -> str | list[int]:
        """Raises BenchError when the template alone is longer."""
        return self._words.text(num_tokens, self._shared)


class TokenSource:
    """Token ids."""

    def __init__(self, tokens: TokenPrompts, prefix_len: int = 0) -> None:
        self._tokens = tokens
        self._shared = tokens.shared_ids(prefix_len)

    def prompt(self, num_tokens: int) -> str | list[int]:
        return self._tokens.token_ids(num_tokens, self._shared)


PromptSource = ChatSource | TokenSource


async def open_source(
    endpoint: Endpoint,
    *,
    seed: int,
    tokenizer: Path | None,
    token_ids: tuple[int, int],
    prefix_len: int = 0,
) -> PromptSource:
    """`prefix_len` tokens at the start of every prompt are the same; raises BenchError."""
    if endpoint.kind == "completions":
        return TokenSource(TokenPrompts(*token_ids, seed), prefix_len)
    if tokenizer is None:
        return ChatSource(await calibrate(endpoint.count_tokens, seed), prefix_len)
    local = local_counter(tokenizer, endpoint.kind)

    async def count(text: str) -> int:
        return local(text)

    return ChatSource(await calibrate(count, seed), prefix_len)
