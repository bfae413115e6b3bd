"""How many tokens a text has at least, found in milliseconds and without tokenising.

Owns one inequality: no token of a byte-level vocabulary stands for more bytes than its longest. A
text of some MiB that cannot fit any model takes seconds to tokenise; with this it is refused at
once. Used by `tokenizer.py`; a bound, never an estimate.
"""

import unicodedata
from collections.abc import Mapping

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend

from cearx.frontend.token_bytes import byte_alphabet


class LengthBound:
    """The bound for one tokenizer; 0 for every text where nothing can be said."""

    def __init__(
        self, backend: Backend, vocab: Mapping[str, int], added: Mapping[int, AddedToken]
    ) -> None:
        is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._normalizes_nfc = isinstance(backend.normalizer, normalizers.NFC)
        is_known_normalizer = backend.normalizer is None or self._normalizes_nfc
        # A token that swallows the spaces around it stands for any number of bytes.
        strips = any(token.lstrip or token.rstrip for token in added.values())
        self._applies = is_byte_level and is_known_normalizer and not strips
        self._longest = max((len(token.encode()) for token in vocab), default=1)
        """Bytes; in byte-level tokens a character is one byte, so this is more than enough."""
        self._missing = bytes(byte for char, byte in byte_alphabet().items() if char not in vocab)
        """Bytes that the vocabulary lacks: they are left out and make no token."""

    def min_num_tokens(self, text: str) -> int:
        if not self._applies:
            return 0
        if self._normalizes_nfc:
            text = unicodedata.normalize("NFC", text)
        num_bytes = len(text.encode("utf-8", "replace").translate(None, self._missing))
        return -(-num_bytes // self._longest)
