"""How one request's logits become a token, prepared once: `SamplingParams` as arrays and counts.

Owns the checks that keep a row from reading or writing outside the vocabulary, and the changes to
the logits before the choice. Never chooses. Built when a request arrives, used by the sampler.
Legend: V vocabulary.
"""

from collections.abc import Iterable, Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

from cearx.core.messages import SamplingParams
from cearx.worker.banned_words import BannedWords
from cearx.worker.penalties import TokenCounts
from cearx.worker.token_constraint import TokenConstraint


class SamplingRule:
    """A request's sampling parameters and the counts that its penalties need.

    Raises ValueError for a token id that is not in the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Iterable[int],
        vocab_size: int,
        matcher: llguidance.LLMatcher | None = None,
    ) -> None:
        """`matcher`: at the beginning of the grammar that the output must follow."""
        self.params = params
        self.is_greedy = params.temperature == 0
        bias = dict(params.logit_bias)
        check_token_ids("logit_bias", tuple(bias), vocab_size)
        if params.num_logprobs is not None and params.num_logprobs < 0:
            raise ValueError(f"num_logprobs must be at least 0, got {params.num_logprobs}")
        self._bias_ids = np.array(tuple(bias), np.int64)
        self._bias = np.array(tuple(bias.values()), np.float32)
        # Models name end-of-sequence ids beyond their output layer; those cannot be sampled anyway.
        ending = sorted({*params.eos_token_ids, *params.stop_token_ids})
        self._ending_ids = np.array([i for i in ending if 0 <= i < vocab_size], np.int64)
        has_penalty = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        self._counts = TokenCounts(prompt) if has_penalty else None
        self._words = BannedWords(params.bad_words) if params.bad_words else None
        for word in params.bad_words:
            check_token_ids("bad_words", word, vocab_size)
        self._refused_ids: NDArray[np.int64] | None = None
        """The complement of allowed_token_ids."""
        if params.allowed_token_ids is not None:
            check_token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
            refused = np.ones(vocab_size, np.bool_)
            refused[list(params.allowed_token_ids)] = False
            self._refused_ids = np.flatnonzero(refused)
        self.constraint: TokenConstraint | None = None
        if matcher is not None:
            ends = np.array([i for i in params.eos_token_ids if 0 <= i < vocab_size], np.int64)
            self.constraint = TokenConstraint(matcher, ends, vocab_size)
        has_limits = any((self._words, self._refused_ids is not None, self.constraint))
        self._is_plain = not bias and not has_penalty and not has_limits

    @property
    def is_argmax(self) -> bool:
        """Whether the token is the largest raw logit and nothing else is wanted, at every step."""
        return self.is_greedy and not self.may_need_logits

    @property
    def last_resort(self) -> int | None:
        """The token for a row in which nothing may follow: an end, where the request has one."""
        return int(self._ending_ids[0]) if len(self._ending_ids) else None

    @property
    def may_need_logits(self) -> bool:
        """Whether `needs_logits` can ever be true."""
        return self.needs_logits(0)

    def needs_logits(self, num_outputs: int) -> bool:
        """Whether the token after `num_outputs` needs more than temperature, filters and seed."""
        forbids_end = num_outputs < self.params.min_tokens and len(self._ending_ids) > 0
        return not self._is_plain or forbids_end or self.params.num_logprobs is not None

    @property
    def is_filtered(self) -> bool:
        """Whether a token must pass top_k, top_p or min_p before it can be drawn."""
        params = self.params
        return not self.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)

    def add_output(self, token_id: int) -> None:
        """Takes note of a sampled token."""
        if self._counts is not None:
            self._counts.add_output(token_id)
        if self._words is not None:
            self._words.add_output(token_id)
        if self.constraint is not None:
            self.constraint.add_output(token_id)

    def process(self, logits_V: NDArray[np.float32], num_outputs: int) -> NDArray[np.float32]:
        """The logits to choose from after `num_outputs` tokens; `logits_V` itself stays as it is.

        In this order: logit_bias, what may not follow (by grammar, min_tokens, bad_words and
        allowed_token_ids), repetition, frequency and presence penalty. Raises ConstraintError.
        """
        forbids_end = num_outputs < self.params.min_tokens and len(self._ending_ids) > 0
        if self._is_plain and not forbids_end:
            return logits_V
        if self.constraint is None:
            processed_V = logits_V.copy()
        else:
            allowed = self.constraint.allowed()
            processed_V = allowed.restrict(logits_V)
            # At the end of its grammar a request cannot go on, whatever min_tokens says.
            forbids_end = forbids_end and not allowed.are_among(self._ending_ids)
        processed_V[self._bias_ids] += self._bias
        if forbids_end:
            processed_V[self._ending_ids] = -np.inf
        if self._words is not None:
            processed_V[self._words.banned()] = -np.inf
        if self._refused_ids is not None:
            processed_V[self._refused_ids] = -np.inf
        if self._counts is not None:
            self._counts.penalise(
                processed_V,
                self.params.repetition_penalty,
                self.params.presence_penalty,
                self.params.frequency_penalty,
            )
        return processed_V


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError unless every id is in 0 <= id < vocab_size."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} must be token ids in 0..{vocab_size - 1}, got {token_id}")
