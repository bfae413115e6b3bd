"""Log-probabilities of a row under the raw model distribution, before any processing.

Owns their order: larger logits first, equal ones by id, so that rank r is place r of the list.
Never looks at sampling parameters. Called by the sampler for rows that ask. Legend: V vocabulary.
"""

import numpy as np
from numpy.typing import NDArray

from cearx.core.messages import TokenLogprobs
from cearx.worker.token_filter import top_k_ids

LOGPROB_OF_ZERO = -9999.0
"""Stands for -inf, which JSON cannot write."""


def token_logprobs(
    logits_V: NDArray[np.float32], log_sum: float, token_id: int, num_top: int
) -> TokenLogprobs:
    """The sampled token's log-probability and rank, and the `num_top` most likely tokens.

    `logits_V` holds no NaN and no +inf; `log_sum` is the logarithm of the sum of exp(logit).
    """
    own = logits_V[token_id]
    num_larger = int(np.count_nonzero(logits_V > own))
    num_equal_before = int(np.count_nonzero(logits_V[:token_id] == own))
    return TokenLogprobs(
        logprob=_logprob(own, log_sum),
        rank=1 + num_larger + num_equal_before,
        top=tuple((i, _logprob(logits_V[i], log_sum)) for i in _most_likely(logits_V, num_top)),
    )


def _logprob(logit: np.float32, log_sum: float) -> float:
    return LOGPROB_OF_ZERO if np.isneginf(logit) else float(logit) - log_sum


def _most_likely(logits_V: NDArray[np.float32], num_top: int) -> list[int]:
    num_top = min(num_top, len(logits_V))
    if num_top == 0:
        return []
    candidates = top_k_ids(logits_V, num_top)
    order = np.argsort(-logits_V[candidates], kind="stable")
    ids: list[int] = candidates[order[:num_top]].tolist()
    return ids
