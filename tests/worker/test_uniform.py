"""The hash's random numbers: known values, range, uniformity, independence of seed, index, id."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_race import GAMMA, TWO_64, seed_of_hash, token_uniform

from cearx.worker import uniform as module
from cearx.worker.uniform import TokenUniforms

EXTREME_SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1, -1, -(2**63)]
VOCAB_SIZE = 1000
UNIFORMS = TokenUniforms(VOCAB_SIZE)


def one(seed: int, output_index: int, token_id: int) -> float:
    """The number of a single token."""
    return float(UNIFORMS.draw(seed, output_index, np.array([token_id]))[0])


def fits_uniform(numbers: np.ndarray) -> bool:
    """100 equal bins pass a chi-square test at p = 1e-4 (99 degrees of freedom)."""
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    expected = len(numbers) / 100
    return bool(((counts - expected) ** 2 / expected).sum() < 160)


def test_mix_is_the_published_splitmix64() -> None:
    """The generator's published outputs for seed 1234567 come out of both finalisers."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + (n + 1) * GAMMA) % TWO_64 for n in range(3)]
    assert [module._mix(z) for z in states] == published
    array = np.array(states, np.uint64)
    module._mix_in_place(array, np.empty_like(array))
    assert array.tolist() == published


def test_values_never_change() -> None:
    """A release that changed these would change every seeded answer."""
    assert [one(0, 0, 0), one(0, 0, 1), one(0, 1, 0), one(2**64 - 1, 7, 999)] == [
        0.6524484863740322,
        0.7012121095215252,
        0.27623358227789463,
        0.8780145412843211,
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5),
)
def test_numbers_equal_the_reference(seed: int, output_index: int, ids: list[int]) -> None:
    """Bit for bit those of plain integers, the same among all tokens and among a few."""
    expected = [token_uniform(seed, output_index, i) for i in ids]
    few = UNIFORMS.draw(seed, output_index, np.array(ids, np.int64)).tolist()
    every = UNIFORMS.draw(seed, output_index)
    assert few == expected
    assert len(every) == VOCAB_SIZE and every[ids].tolist() == expected


@pytest.mark.parametrize(("value", "number"), [(0, 2.0**-53), (2**64 - 1, 1 - 2.0**-53)])
def test_the_ends_stay_inside_the_open_interval(value: int, number: float) -> None:
    """The hash's smallest and largest value, which some seed has, give neither 0 nor 1."""
    for output_index, token_id in ((0, 0), (1_000_000, 999)):
        assert one(seed_of_hash(value, output_index, token_id), output_index, token_id) == number


@pytest.mark.parametrize("seed", EXTREME_SEEDS)
def test_uniformity(seed: int) -> None:
    """Over tokens of one row, rows of one token, and both, at any 64-bit seed."""
    rows = np.array([UNIFORMS.draw(seed, n).copy() for n in range(2000)])
    assert fits_uniform(rows[:10].ravel())
    assert fits_uniform(rows[:, :5].ravel())
    assert fits_uniform(rows[::7].ravel())
    # The lower bits too: what is left behind the first two decimals.
    assert fits_uniform(rows[:10].ravel() * 2.0**20 % 1)


def test_neighbouring_seeds_rows_and_tokens_are_unrelated() -> None:
    """Seeds that count up, as of n choices of one request, and the axes beside them."""
    block = np.array(
        [[UNIFORMS.draw(seed, n)[:50].copy() for n in range(20)] for seed in range(50)]
    )
    assert fits_uniform(block[:, 0, :2].ravel()) and fits_uniform(block.ravel())
    for axis in range(3):
        a, b = np.delete(block, -1, axis).ravel(), np.delete(block, 0, axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    assert len(np.unique(block)) == block.size


def test_starts_one_gamma_apart_do_not_share_a_sequence() -> None:
    """Unmixed, a seed one gamma further would give the same numbers one output or token later."""
    seed, other = 42, (42 + GAMMA) % TWO_64
    first = {x for n in range(20) for x in UNIFORMS.draw(seed, n).tolist()}
    assert len(first) == 20 * VOCAB_SIZE
    assert not first & {x for n in range(20) for x in UNIFORMS.draw(other, n).tolist()}


def test_minus_one_is_the_largest_seed() -> None:
    """A signed seed is taken modulo 2**64."""
    assert one(-1, 5, 3) == one(2**64 - 1, 5, 3)


def test_a_draw_leaves_nothing_behind() -> None:
    """Scratch memory of a longer row, overwritten as the sampler does, changes no later number."""
    expected = UNIFORMS.draw(3, 4).tolist()
    UNIFORMS.draw(5, 6)[:] = np.nan
    few = UNIFORMS.draw(3, 4, np.arange(10, 20)).tolist()
    assert few == expected[10:20]
    UNIFORMS.draw(5, 6, np.arange(5))[:] = np.inf
    assert UNIFORMS.draw(3, 4).tolist() == expected
