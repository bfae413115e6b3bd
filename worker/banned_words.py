"""Words that a request forbids, as sequences of tokens, against the end of its output.

Owns the recent output of one request and which tokens would complete a forbidden sequence. Never
looks at logits. Built by `sampling_rule` for requests with bad_words.
"""

from collections import deque
from collections.abc import Sequence


class BannedWords:
    """Sequences of at least one token each; `add_output` keeps what their beginnings need."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        assert all(sequences), "an empty sequence has no last token"
        self._always = sorted({s[0] for s in sequences if len(s) == 1})
        self._after = [(tuple(s[:-1]), s[-1]) for s in sequences if len(s) > 1]
        longest = max((len(begin) for begin, _ in self._after), default=0)
        self._recent: deque[int] = deque(maxlen=longest)

    def add_output(self, token_id: int) -> None:
        """Takes note of a sampled token."""
        self._recent.append(token_id)

    def banned(self) -> list[int]:
        """Tokens that would complete a word now."""
        recent = tuple(self._recent)
        return self._always + [
            last
            for begin, last in self._after
            if len(begin) <= len(recent) and recent[len(recent) - len(begin) :] == begin
        ]
