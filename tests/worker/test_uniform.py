"""The counter-based random numbers: known values, range, uniformity, independence of seeds."""

import numpy as np
import pytest

from cearx.worker import uniform as module
from cearx.worker.uniform import uniform

EXTREME_SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1, -1, -(2**63)]


def test_mix_is_the_published_splitmix64() -> None:
    """The generator's published outputs for seed 1234567 come out of the same finaliser."""
    gamma, mask = module.GOLDEN_GAMMA, module.MASK_64
    outputs = [module._mix((1234567 + (n + 1) * gamma) & mask) for n in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_values_never_change() -> None:
    """A release that changed these would change every seeded answer."""
    assert [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 0)] == [
        0.8833108082136426,
        0.43152799704850997,
        0.64635420864685,
    ]


@pytest.mark.parametrize("seed", EXTREME_SEEDS)
def test_range_and_uniformity(seed: int) -> None:
    """100 equal bins over 20,000 draws pass a chi-square test at any 64-bit seed."""
    draws = np.array([uniform(seed, n) for n in range(20_000)])
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.bincount((draws * 100).astype(int), minlength=100)
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert chi_square < 160  # 99 degrees of freedom: p = 1e-4


def test_first_tokens_of_neighbouring_seeds_are_uniform() -> None:
    """Seeds that count up, as of n choices of one request, give unrelated first tokens."""
    draws = np.array([uniform(seed, 0) for seed in range(20_000)])
    counts = np.bincount((draws * 100).astype(int), minlength=100)
    assert ((counts - 200) ** 2 / 200).sum() < 160
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_seeds_one_gamma_apart_do_not_share_a_sequence() -> None:
    """Without mixing the seed first, these would be the same numbers one token later."""
    seed, other = 42, (42 + module.GOLDEN_GAMMA) & module.MASK_64
    first = {uniform(seed, n) for n in range(1000)}
    assert not first & {uniform(other, n) for n in range(1000)}


def test_minus_one_is_the_largest_seed() -> None:
    """A signed seed is taken modulo 2**64."""
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
