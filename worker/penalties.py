"""Penalties for tokens that a request has used: repetition, presence and frequency.

Owns a request's token counts, which grow with every sampled token and survive preemption. Never
sees other requests. Built by `sampling_rule`, called by the sampler for rows that have a penalty.
Legend: V vocabulary.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

INITIAL_CAPACITY = 256


class TokenCounts:
    """The distinct tokens of prompt and output, and how often the output has each.

    ids     [ t0 t1 t2 ... | unused ]      counts  [ c0 c1 c2 ... | unused ]
             num_used ----^                c = 0: in the prompt only
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.empty(INITIAL_CAPACITY, np.int64)
        self._counts = np.zeros(INITIAL_CAPACITY, np.float32)
        for token_id in prompt:
            self._index_of(token_id)

    def add_output(self, token_id: int) -> None:
        """Counts a token that was sampled."""
        self._counts[self._index_of(token_id)] += 1

    def _index_of(self, token_id: int) -> int:
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = len(self._index)
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
        return index

    def penalise(
        self, logits_V: NDArray[np.float32], repetition: float, presence: float, frequency: float
    ) -> None:
        """Changes `logits_V` in place.

        Tokens of prompt or output: a positive logit is divided by `repetition`, another multiplied.
        Tokens of the output: then minus `frequency` times the count, then minus `presence`.
        """
        num_used = len(self._index)
        ids, counts = self._ids[:num_used], self._counts[:num_used]
        values = logits_V[ids]
        if repetition != 1.0:
            factor = np.float32(repetition)
            values = np.where(values > 0, values / factor, values * factor)
        values -= np.float32(frequency) * counts
        values -= np.float32(presence) * (counts > 0)
        logits_V[ids] = values
