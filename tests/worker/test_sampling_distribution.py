"""Random sampling draws from the distribution that the parameters describe."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cearx.core.identifiers import RequestId
from cearx.core.messages import SamplingParams
from cearx.worker.request_states import RequestState
from cearx.worker.sampler import Sampler
from cearx.worker.sampling_rule import SamplingRule

VOCAB_SIZE = 301
NUM_DRAWS = 12_000


def draws(logits: np.ndarray, make_params: Callable[[int], SamplingParams]) -> np.ndarray:
    """One token a row for rows that differ in their seed only."""
    requests = []
    for i in range(NUM_DRAWS):
        rule = SamplingRule(make_params(i), [0], VOCAB_SIZE)
        requests.append(RequestState(RequestId(i), [0], rule))
    rows = torch.tensor(logits, dtype=torch.float32).expand(NUM_DRAWS, -1)
    sampled = Sampler(VOCAB_SIZE).sample(rows, requests)
    return np.array([row.token_id for row in sampled])


def chi_square_fits(tokens: np.ndarray, expected: np.ndarray) -> bool:
    """No token outside the support, and p > 1e-4 by the normal limit (Wilson and Hilferty)."""
    counts = np.bincount(tokens, minlength=len(expected))
    if counts[expected == 0].any():
        return False
    # Rare tokens are taken together, as the test needs several expected draws in each class.
    rare = expected * NUM_DRAWS < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * NUM_DRAWS
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    return bool(z < 3.72)


LOGITS = np.random.default_rng(11).normal(0, 2, VOCAB_SIZE).astype(np.float32).astype(np.float64)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities; -inf gives zero."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def expected_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """By definition, on sorted probabilities; LOGITS has no ties."""
    p = softmax(LOGITS / temperature)
    p = np.where(p >= min_p * p.max(), p, 0)
    if top_k:
        p = np.where(p >= np.sort(p)[-top_k], p, 0)
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return np.asarray(p / p.sum())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.0, 10, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.5, 0, 1.0, 0.2),
        (0.8, 40, 0.9, 0.05),
    ],
)
def test_drawn_tokens_fit_the_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Chi-square over fixed seeds, and the test has the power to tell a slightly different one."""
    tokens = draws(
        LOGITS,
        lambda i: SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=i * 7919
        ),
    )
    assert chi_square_fits(tokens, expected_distribution(temperature, top_k, top_p, min_p))
    warmer = expected_distribution(temperature * 1.15, top_k, top_p, min_p)
    assert not chi_square_fits(tokens, warmer)


def test_tokens_of_one_seed_fit_the_distribution_too() -> None:
    """The draws of one request, token after token, are as good as those of many requests."""
    rule = SamplingRule(SamplingParams(seed=2**64 - 1), [0], VOCAB_SIZE)
    request = RequestState(RequestId(0), [0], rule)
    sampler, row = Sampler(VOCAB_SIZE), torch.tensor(LOGITS, dtype=torch.float32)[None]
    tokens = []
    for _ in range(NUM_DRAWS):
        token_id = sampler.sample(row, [request])[0].token_id
        assert token_id is not None
        request.add_output(token_id)
        tokens.append(token_id)
    assert chi_square_fits(np.array(tokens), expected_distribution(1.0, 0, 1.0, 0.0))


def test_equal_seeds_give_equal_tokens() -> None:
    """Rows of one seed all draw the same token, whatever their place in the batch."""
    assert len(set(draws(LOGITS, lambda _: SamplingParams(seed=0)).tolist())) == 1
