"""What one request's grammar allows next.

Owns the matcher's state, which follows the request's sampled tokens and nothing else: it survives
preemption and does not know of prompts or batches. Never changes logits. Built and used by
`sampling_rule.py`. Legend: V vocabulary.
"""

from dataclasses import dataclass

import llguidance
import numpy as np
from numpy.typing import NDArray

FEW = 64
"""A grammar allows few tokens when they stand in at most 1 / FEW of the vocabulary's places."""


class ConstraintError(Exception):
    """The grammar exceeded a limit; the message is for the log and holds no user data."""


@dataclass(frozen=True, eq=False)
class AllowedTokens:
    """Ids of few tokens, ascending, or a mask over the vocabulary: one of the two is there."""

    ids: NDArray[np.int64] | None
    mask_V: NDArray[np.bool_] | None

    def restrict(self, logits_V: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy in which everything else is -inf."""
        if self.ids is None:
            assert self.mask_V is not None
            return np.where(self.mask_V, logits_V, np.float32(-np.inf))
        restricted_V = np.full_like(logits_V, -np.inf)
        restricted_V[self.ids] = logits_V[self.ids]
        return restricted_V

    def are_among(self, token_ids: NDArray[np.int64]) -> bool:
        """Whether nothing but these is allowed."""
        if self.ids is None:
            return False
        return bool(np.isin(self.ids, token_ids).all())


class TokenConstraint:
    """One request's; tokens are taken by `add_output`, in order."""

    def __init__(
        self, matcher: llguidance.LLMatcher, ending_ids: NDArray[np.int64], vocab_size: int
    ) -> None:
        """`ending_ids`: the end-of-sequence tokens, those of the vocabulary, one at least."""
        self._matcher = matcher
        self._ending_ids = ending_ids
        self._vocab_size = vocab_size
        self._has_ended = False
        self._allowed: AllowedTokens | None = None
        """For the next token, once it is known."""

    def add_output(self, token_id: int) -> None:
        """Takes note of a sampled token."""
        self._allowed = None
        if token_id in self._ending_ids:
            self._has_ended = True
        elif not self._has_ended:
            self._matcher.consume_token(token_id)

    def prepare(self) -> None:
        """Computes what is allowed next, if nobody has; other threads may run meanwhile.

        A worker whose device is busy calls it before it needs the answer.
        """
        if self._allowed is None:
            self._allowed = self._next()

    def allowed(self) -> AllowedTokens:
        """What may come next; at the end of the grammar only ends. Raises ConstraintError."""
        self.prepare()
        assert self._allowed is not None
        if self._matcher.is_error():
            reason = self._matcher.stop_reason()
            raise ConstraintError(f"the grammar takes too much work ({reason})")
        return self._allowed

    def _next(self) -> AllowedTokens:
        if self._has_ended or self._matcher.is_stopped():
            return AllowedTokens(ids=self._ending_ids, mask_V=None)
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        where = np.flatnonzero(packed)
        if len(where) * FEW > len(packed):
            bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
            return AllowedTokens(ids=None, mask_V=bits.view(np.bool_))
        rows, bits_of_row = np.nonzero(
            np.unpackbits(packed[where][:, None], axis=1, bitorder="little")
        )
        ids = where[rows] * 8 + bits_of_row
        return AllowedTokens(ids=ids[ids < self._vocab_size], mask_V=None)
