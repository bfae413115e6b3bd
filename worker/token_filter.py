"""top_k, top_p and min_p: which tokens may be drawn, and with which weights.

Owns the filters of one row. Never draws. Called by the sampler for rows with temperature, and by
`logprobs` for its list. No filter sorts the vocabulary: a bound narrows it to candidates first.
Weights are float64 and relative to the most likely token, whose weight is 1; their sum is free.
Legend: V vocabulary.
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Weights = NDArray[np.float64]

SPAN = 256
"""Tokens whose largest logit is taken at once to bound the k-th largest from below."""

ROUNDING_SLACK = 1e-6
"""Relative; more than the error of a float64 sum over any vocabulary."""


def top_k_ids(logits_V: NDArray[np.float32], top_k: int) -> Ids:
    """Ids of the k largest logits, ascending, 0 < k <= V; those equal to the k-th are all kept."""
    num_spans = len(logits_V) // SPAN
    if num_spans < top_k:
        return np.flatnonzero(logits_V >= _kth_largest(logits_V, top_k))
    # k spans have a logit that reaches the k-th largest of the spans' maxima; so the k-th largest
    # of all is at least that, and whatever is smaller can be left out.
    maxima = logits_V[: num_spans * SPAN].reshape(num_spans, SPAN).max(axis=1)
    candidates = np.flatnonzero(logits_V >= _kth_largest(maxima, top_k))
    logits = logits_V[candidates]
    return candidates[logits >= _kth_largest(logits, top_k)]


def _kth_largest(values: NDArray[np.float32], k: int) -> float:
    return float(np.partition(values, len(values) - k)[len(values) - k])


def keep_min_p(weights_V: Weights, min_p: float) -> Ids:
    """Indices whose probability is at least `min_p` times that of the most likely token."""
    return np.flatnonzero(weights_V >= min_p)


def keep_top_p(weights_V: Weights, top_p: float) -> Ids:
    """Indices, ascending, of the smallest set of most likely tokens with probability `top_p`.

    A token is kept while the tokens before it, most likely first and equal ones by id, hold less
    than `top_p`; hence at least one is.
    """
    total = float(weights_V.sum())
    # A token of weight w has at most V * w at and behind it. Where that is within the (1 - top_p)
    # to be cut off, the token cannot be kept, so only the others need sorting.
    bound = (1.0 - top_p) * total / len(weights_V)
    candidates = np.flatnonzero(weights_V > bound * (1.0 - ROUNDING_SLACK))
    weights = weights_V[candidates]
    ascending = np.sort(weights)
    # The n-th has the sum of n - 1 before it; the first has nothing before it.
    cumulated = np.cumsum(ascending[::-1])
    num_kept = 1 + int(np.searchsorted(cumulated, top_p * total, side="left"))
    num_kept = min(num_kept, len(ascending))
    least = ascending[-num_kept]
    num_larger = len(ascending) - int(np.searchsorted(ascending, least, side="right"))
    kept = weights > least
    kept[np.flatnonzero(weights == least)[: num_kept - num_larger]] = True
    kept_ids: Ids = candidates[kept]
    return kept_ids
