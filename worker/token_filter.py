"""top_k, top_p and min_p: which tokens may be drawn, and with which weights.

Owns the filters of one row. Never draws. Called by the sampler for rows with temperature. No filter
sorts the vocabulary: a bound narrows it to a few candidates first. Weights are float64 and relative
to the most likely token, whose weight is 1; they need no normalising. Legend: V vocabulary, K kept.
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Weights = NDArray[np.float64]

ROUNDING_SLACK = 1e-6
"""Relative; more than the error of a float64 sum over any vocabulary."""


def top_k_ids(logits_V: NDArray[np.float32], top_k: int) -> Ids:
    """Ids of the k largest logits, ascending; those equal to the k-th are all kept."""
    kth = len(logits_V) - top_k
    return np.flatnonzero(logits_V >= np.partition(logits_V, kth)[kth])


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
    order = np.argsort(-weights, kind="stable")
    # The n-th has the sum of n - 1 before it; the first has nothing before it.
    num_kept = 1 + int(np.searchsorted(np.cumsum(weights[order]), top_p * total, side="left"))
    return np.sort(candidates[order[:num_kept]])
