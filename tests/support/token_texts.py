"""Texts that tokenizers get wrong: the material of the tokenizer and detokenizer tests."""

import random

FRAGMENTS = [
    "the", "The", " quick", "brown ", "don't", "DON'T", "I'LL", "we've'", "'s", "''d", " 's",
    "0", "1", "42", "1234567", "3.14159", "1,000,000", "٣٤٥", "५६", "²³", "½", "Ⅷ", "1a2b3c",
    " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n\n", " \n ", "\u00a0", "\u2003", "\u3000", "\u200b",
    "中文", "日本語テキスト", "한국어", "ไทย", "العربية", "עברית", "हिन्दी", "Ελληνικά", "русский",
    "é", "e\u0301", "ñ", "n\u0303", "Å", "A\u030a", "\u1100\u1161", "ﬁ", "İ", "ß", "ǆ",
    "😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "🏴\U000e0067\U000e0062", "\U0001f9d1\u200d\U0001f4bb",
    "def f(x):\n    return x**2  # ok", "if (a != b) {\r\n\tc += 1;\r\n}", "<html>&amp;</html>",
    "!?", "...", "—", "«»", "$", "+=", "~", "|", "^", "`", "\\n", "//", "a_b", "x-y",
    "snake_case", " unmerged", "Wholeword",
    "\x00", "\x7f", "\ufeff", "\ufffd", "\U0010ffff", "Ġ", "Ċ", "▁", "<0x41>", "<|", "|>",
    "http://a.b/c?d=e&f=%20", "user@example.com", "C:\\Temp", "aaaaaaaaaaaaaaaaaaaaaaaa",
]  # fmt: skip


def texts(count: int, seed: int, extra: list[str] | None = None) -> list[str]:
    """`count` texts of 0 to 12 fragments; `extra` (special tokens) is mixed in."""
    rng = random.Random(seed)
    fragments = FRAGMENTS + (extra or []) * 4
    made = ["".join(rng.choices(fragments, k=rng.randrange(13))) for _ in range(count)]
    characters = [chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))))
                  for _ in range(count)]  # fmt: skip
    return made + ["a" + character + " 1" + character for character in characters] + FRAGMENTS
