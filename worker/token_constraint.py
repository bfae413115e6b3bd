"""What one request's grammar allows next, as a mask over the vocabulary.

Owns the matcher's state, which follows the request's sampled tokens and nothing else: it survives
preemption and does not know of prompts or batches. Never changes logits. Built by
`grammar_table.py`, used by `sampling_rule.py`.
"""

import llguidance
import numpy as np
from numpy.typing import NDArray


class ConstraintError(Exception):
    """The grammar exceeded a limit; the message is for the log and holds no user data."""


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
        self._allowed_V: NDArray[np.bool_] | None = None
        """The mask for the next token, once it is known."""

    def add_output(self, token_id: int) -> None:
        """Takes note of a sampled token."""
        self._allowed_V = None
        if token_id in self._ending_ids:
            self._has_ended = True
        elif not self._has_ended:
            self._matcher.consume_token(token_id)

    def prepare(self) -> None:
        """Computes the next mask, if nobody has; other threads may run meanwhile.

        A worker whose device is busy calls it before it needs the mask.
        """
        if self._allowed_V is None:
            self._allowed_V = self._next_mask()

    def allowed(self) -> NDArray[np.bool_]:
        """For each token [V] whether it may come next; at the end of the grammar only ends may.

        Raises ConstraintError.
        """
        self.prepare()
        assert self._allowed_V is not None
        if self._matcher.is_error():
            reason = self._matcher.stop_reason()
            raise ConstraintError(f"the grammar takes too much work ({reason})")
        return self._allowed_V

    def _next_mask(self) -> NDArray[np.bool_]:
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        allowed_V = bits.view(np.bool_)
        if self._has_ended or self._matcher.is_stopped():
            allowed_V[:] = False
            allowed_V[self._ending_ids] = True
        return allowed_V
