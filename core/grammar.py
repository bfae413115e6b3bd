"""Grammars that outputs must follow: the vocabulary they work on, and compiling within limits.

Owns what the frontend's checker and the worker have to do alike, so that a grammar which passed the
one compiles in the other. Never sees a request. llguidance does the work; its limits count states
and steps, not seconds, so they mean the same on every machine. Imported by these two only.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import llguidance

from cearx.core.messages import Vocabulary, pack_tokens, unpack_tokens

MAX_GRAMMAR_BYTES = 256 * 1024
"""As a text in llguidance's form; long schemas of real APIs have some 50 KiB."""
COMPILE_STACK_BYTES = 64 * 1024 * 1024
"""Of the worker's thread that compiles; the checker has a quarter and finds what is too deep."""

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,  # some 10 ms
    step_lexer_fuel=100_000,  # some 7 ms for one token
    step_max_items=20_000,  # some 1 ms for one token
    max_lexer_states=50_000,  # some 100 MB
    max_grammar_size=200_000,
    verbose_errors=False,  # they would show the grammar
)


class GrammarError(ValueError):
    """The grammar is invalid or exceeds a limit; the message is one line for the client."""


def pack_vocabulary(
    tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_ids: Sequence[int]
) -> Vocabulary:
    """`tokens[i]` are the bytes of token i; special ones are no part of any text."""
    return Vocabulary(
        token_bytes=b"".join(tokens),
        token_lengths=pack_tokens([len(token) for token in tokens]),
        special_token_ids=tuple(special_token_ids),
        eos_token_ids=tuple(eos_token_ids),
    )


class _Tokens:
    """What llguidance's wrapper asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ends = [0, *accumulate(unpack_tokens(vocabulary.token_lengths))]
        data = vocabulary.token_bytes
        self.tokens = [data[start:end] for start, end in pairwise(ends)]
        self.special_token_ids = list(vocabulary.special_token_ids)
        self.bos_token_id = None
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self._by_bytes = {token: index for index, token in enumerate(self.tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        """Byte by byte: only forced texts are tokenised so, which nobody asks for."""
        data = text.encode() if isinstance(text, str) else text
        return [self._by_bytes.get(bytes([byte]), 0) for byte in data]


class GrammarCompiler:
    """Compiles for one vocabulary; `compile` may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """`vocab_size`: rows of the model's output layer, which may be more than its tokens."""
        tokens = _Tokens(vocabulary)
        tokens.tokens = tokens.tokens[:vocab_size]
        ends = [i for i in vocabulary.eos_token_ids if i < len(tokens.tokens)]
        assert ends, f"no end-of-sequence token among {vocab_size}"
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(tokens), n_vocab=vocab_size, eos_token=ends
        )

    def compile(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the beginning; raises GrammarError. Lets other threads run meanwhile."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(error_line(matcher.get_error()))
        return matcher


def error_line(message: str) -> str:
    """llguidance's message as one line that prints."""
    line = next((line for line in message.splitlines() if line.strip()), "unknown error")
    shown = "".join(c if c.isprintable() else " " for c in line).strip()
    return shown if len(shown) <= 200 else shown[:200] + "..."
