"""Byte-level BPE in plain Python, straight from its definition: the oracle of the tokenizer tests.

Pieces come from the reference regular expression of each family, run by the `regex` module; merging
looks for the best-ranked pair again and again.
"""

import itertools
import unicodedata
from functools import cache

import regex

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
SPLITS = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "qwen2": (QWEN2,),
    "llama-bpe": (LLAMA3,),
    "default": DEFAULT,
}
"""Each expression cuts the pieces that the one before left, in matches and what is between."""


@cache
def alphabet() -> dict[int, str]:
    """byte -> character, built as GPT-2's publication describes it."""
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) not in " \xa0\xad"]
    table = {b: chr(b) for b in shown}
    hidden = [b for b in range(256) if b not in table]
    return table | {b: chr(256 + index) for index, b in enumerate(hidden)}


def pieces(text: str, pre: str) -> list[str]:
    """The text cut as the family `pre` does it."""
    found = [text]
    for expression in SPLITS[pre]:
        cut: list[str] = []
        for piece in found:
            position = 0
            for match in regex.finditer(expression, piece):
                cut += [piece[position : match.start()], match[0]]
                position = match.end()
            cut.append(piece[position:])
        found = [piece for piece in cut if piece]
    return found


class SlowTokenizer:
    """What GGUF metadata says, without any library."""

    def __init__(self, tokens: list[str], merges: list[str], types: list[int], pre: str) -> None:
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = sorted(
            (token for token, kind in zip(tokens, types, strict=True) if kind in (3, 4)),
            key=len,
            reverse=True,
        )
        self.pre = pre

    def encode(self, text: str) -> list[int]:
        """Special tokens are found first, leftmost and longest; the rest is cut and merged."""
        if not self.special:
            return self._plain(text)
        ids: list[int] = []
        position = 0
        for match in regex.finditer("|".join(map(regex.escape, self.special)), text):
            ids += [*self._plain(text[position : match.start()]), self.ids[match[0]]]
            position = match.end()
        return ids + self._plain(text[position:])

    def _plain(self, text: str) -> list[int]:
        if self.pre == "qwen2":
            text = unicodedata.normalize("NFC", text)
        ids: list[int] = []
        for piece in pieces(text, self.pre):
            symbols = [alphabet()[byte] for byte in piece.encode()]
            # Vocabularies lack bytes that their training text never had: these are left out.
            symbols = [symbol for symbol in symbols if symbol in self.ids]
            if self.pre == "llama-bpe" and "".join(symbols) in self.ids:
                ids.append(self.ids["".join(symbols)])
            else:
                ids += [self.ids[symbol] for symbol in self._merge(symbols)]
        return ids

    def _merge(self, symbols: list[str]) -> list[str]:
        while len(symbols) > 1:
            pairs = itertools.pairwise(symbols)
            ranked = [(self.ranks.get(pair, 1 << 60), index) for index, pair in enumerate(pairs)]
            rank, index = min(ranked)
            if rank == 1 << 60:
                break
            symbols = [*symbols[:index], symbols[index] + symbols[index + 1], *symbols[index + 2 :]]
        return symbols
