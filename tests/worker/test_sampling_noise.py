"""How much of a seed's text rounding errors in the logits may change: as good as nothing.

A batch of another shape adds its numbers in another order, so its logits differ in their last bits.
A token changes only where the two best arrivals are closer than that: with noise of standard
deviation s on every logit, one draw in 1.8 / s at most (leads have a density of at most 1 there).
"""

import numpy as np
import pytest
import torch

from cearx.core.identifiers import RequestId
from cearx.core.messages import SamplingParams
from cearx.worker.request_states import RequestState
from cearx.worker.sampler import Sampler
from cearx.worker.sampling_rule import SamplingRule

VOCAB_SIZE = 49_152
NUM_ROWS, NUM_SEEDS = 64, 16


def realistic_logits(num_rows: int) -> np.ndarray:
    """Rows whose probabilities fall as a power of the rank, with 20 as the largest logit."""
    rng = np.random.default_rng(17)
    rows = np.empty((num_rows, VOCAB_SIZE), np.float32)
    log_rank = np.log(np.arange(1, VOCAB_SIZE + 1))
    for row in rows:
        row[:] = rng.permutation(20 - rng.uniform(1, 2) * log_rank)
    return rows


def drawn_tokens(logits: np.ndarray) -> np.ndarray:
    """NUM_SEEDS tokens of every row at temperature 1, without filters."""
    sampler, tokens = Sampler(VOCAB_SIZE), []
    for n in range(NUM_SEEDS):
        requests = [
            RequestState(RequestId(i), [0], SamplingRule(SamplingParams(seed=n), [0], VOCAB_SIZE))
            for i in range(len(logits))
        ]
        tokens += [row.token_id for row in sampler.sample(torch.from_numpy(logits), requests)]
    return np.array(tokens)


def inverse_tokens(logits: np.ndarray) -> np.ndarray:
    """As many draws by the inverse of the distribution function in order of id, in float64."""
    points, tokens = np.random.default_rng(19).random(NUM_SEEDS), []
    for row in logits.astype(np.float64):
        cumulated = np.cumsum(np.exp(row - row.max()))
        tokens.append(np.searchsorted(cumulated, points * cumulated[-1], side="right"))
    return np.array(tokens)


@pytest.mark.parametrize(("relative", "absolute", "most_flips"), [(1e-6, 0.0, 0), (0.0, 4e-4, 3)])
def test_rounding_errors_change_no_token(relative: float, absolute: float, most_flips: int) -> None:
    """1,024 draws twice: float32 noise flips none (0.01 expected at most: 1e-6 of 20 is 2e-5), and
    4e-4, ten times what two batch shapes differ by, three at most (0.23 expected at most).

    The inverse of the distribution function shows that the noise is one that can flip tokens.
    """
    logits = realistic_logits(NUM_ROWS)
    noise = np.random.default_rng(18).standard_normal(logits.shape)
    noisy = (logits + noise * (relative * np.abs(logits) + absolute)).astype(np.float32)
    tokens = drawn_tokens(logits)
    assert len(np.unique(tokens)) > 300  # real choices, not the likeliest token again and again
    assert np.count_nonzero(tokens != drawn_tokens(noisy)) <= most_flips
    assert np.count_nonzero(inverse_tokens(logits) != inverse_tokens(noisy)) > 5
