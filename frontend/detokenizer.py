"""Turns a stream of token ids into text that can be sent as it comes.

Owns the bytes of a character that is not complete yet: it is held back, never shown as U+FFFD, and
whatever way the ids are cut into pushes, the pieces join to `Tokenizer.decode` of them all. One
object serves one choice of one request; it never sees the text that went before.
"""

import codecs
from collections.abc import Iterable, Sequence

from cearx.frontend.tokenizer import Tokenizer

MAX_PENDING_BYTES = 3
"""A UTF-8 sequence has at most 4 bytes, so at most 3 wait for the rest."""

_new_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """`push` ids as they come, `finish` once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        """`prompt_tail`: the prompt's ids or the last few of them; nothing of their text comes out.

        A character that begins in the prompt and is completed by the output comes out whole; one
        that the prompt left broken does not.
        """
        self._table = tokenizer.byte_table(skip_special_tokens=skip_special_tokens)
        self._decoder = _new_decoder("replace")
        self._strip_space = tokenizer.strips_leading_space and not prompt_tail
        self._prompt_bytes = self._open_bytes(prompt_tail)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        table = self._table
        data = b"".join([table[token_id] for token_id in token_ids])
        if self._prompt_bytes and data:
            if _continues(self._prompt_bytes, data[:1]):
                data = self._prompt_bytes + data
            self._prompt_bytes = b""
        text = self._decoder.decode(data)
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never got complete, else nothing."""
        return self._decoder.decode(b"", True)

    def _open_bytes(self, prompt_tail: Sequence[int]) -> bytes:
        """The bytes of an incomplete character at the end of the prompt."""
        tail: list[bytes] = []
        num_bytes = 0
        for token_id in reversed(prompt_tail):
            if num_bytes > MAX_PENDING_BYTES:
                break
            tail.append(self._table[token_id])
            num_bytes += len(tail[-1])
        decoder = _new_decoder("replace")
        decoder.decode(b"".join(reversed(tail)))
        return decoder.getstate()[0]


def _continues(begun: bytes, byte: bytes) -> bool:
    """Whether `byte` is a valid next byte of the UTF-8 sequence that `begun` begins."""
    if begun == b"\xed" and byte >= b"\xa0":
        return False  # half a surrogate, which Python's decoder refuses only with its third byte
    decoder = _new_decoder("strict")
    try:
        decoder.decode(begun + byte)
    except UnicodeDecodeError:
        return False
    return True
