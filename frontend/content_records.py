"""Which tokens of an answer its content is made of, for log-probabilities of the content alone.

Thoughts, calls, what a parser leaves out and the token that ends an answer are no part of it. Owns
the tokens whose text is held back and may still become either. Called by `choice.py`.
"""

from cearx.frontend.prompt_part import TokenRecord


class ContentRecords:
    """`take` each token, then say what became of the text up to it."""

    def __init__(self) -> None:
        self._held: list[TokenRecord] = []
        self._has_content = False

    def take(self, record: TokenRecord) -> None:
        self._held.append(record)

    def drop(self) -> None:
        """What is held belongs to a thought or a call."""
        self._held.clear()

    def told(self, num_chars: int, text_length: int) -> list[TokenRecord]:
        """The tokens behind `num_chars` more characters of content.

        `text_length`: of all that was decoded. Before the first content a parser may have left out
        white space, whose tokens are left out too.
        """
        held, self._held = self._held, []
        first = 0
        if not self._has_content:
            start = text_length - num_chars
            first = max(
                (i for i, record in enumerate(held) if record.text_offset <= start), default=0
            )
            while first > 0 and held[first - 1].text_offset == held[first].text_offset:
                first -= 1  # a part of a character: its text comes with the next token
        self._has_content = True
        return held[first:]
