"""What each token id adds to a text, as bytes.

Owns the translation of a tokenizer's decoder into a table of bytes: byte-level BPE (every character
stands for a byte) and the SentencePiece-like decoders (a mark for the space, `<0xE4>` for a byte).
With it, decoding is a join, whole or token by token. Used by `tokenizer.py` and `detokenizer.py`;
knows nothing of requests.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from cearx.core.child import StartupError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SUPPORTED = "ByteLevel, or Replace/Metaspace with ByteFallback, Fuse and a leading Strip"


class TokenizerError(StartupError):
    """The model's tokenizer cannot be used; the message is one line that says why."""


class TokenDecoder(msgspec.Struct, frozen=True, kw_only=True):
    """How one tokenizer turns a vocabulary entry into bytes."""

    to_bytes: Callable[[str], bytes]
    strips_leading_space: bool
    """The first space of a whole text is the tokenizer's own and is dropped."""


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for (256 entries).

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and following.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an entry that was never byte-encoded stands for itself
        return token.encode()


def token_decoder(backend: Backend) -> TokenDecoder:
    """Reads a tokenizer's decoder; raises TokenizerError for one that is not in `SUPPORTED`."""
    decoder = backend.decoder
    steps = [] if decoder is None else [json.loads(decoder.__getstate__())]
    if steps and steps[0]["type"] == "Sequence":
        steps = steps[0]["decoders"]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TokenDecoder(to_bytes=_from_byte_level, strips_leading_space=False)
    return _sentencepiece_decoder(steps)


def _sentencepiece_decoder(steps: list[dict[str, Any]]) -> TokenDecoder:
    spaces: list[tuple[str, str]] = []
    byte_fallback = strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": mark}, "content": content}:
                spaces.append((mark, content))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                spaces.append((mark, " "))
                strips = strips or scheme != "never"
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise _unsupported(steps)
    if not spaces:
        raise _unsupported(steps)

    def to_bytes(token: str) -> bytes:
        if byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for mark, content in spaces:
            token = token.replace(mark, content)
        return token.encode()

    return TokenDecoder(to_bytes=to_bytes, strips_leading_space=strips)


def _unsupported(steps: list[dict[str, Any]]) -> TokenizerError:
    kinds = [step["type"] for step in steps]
    return TokenizerError(
        f"the tokenizer's decoder {kinds} is not supported; supported: {SUPPORTED}"
    )


class TokenBytes(dict[int, bytes]):
    """token id -> bytes, filled on first use; an id outside the vocabulary adds nothing."""

    def __init__(
        self,
        backend: Backend,
        to_bytes: Callable[[str], bytes],
        added: Mapping[int, str],
        hidden: frozenset[int],
    ) -> None:
        """`added` tokens are plain text, `hidden` ids add nothing."""
        super().__init__({token_id: text.encode() for token_id, text in added.items()})
        self.update(dict.fromkeys(hidden, b""))
        self._backend = backend
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < 1 << 32:
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        found = self[token_id] = self._to_bytes(token)
        return found
