"""The noise of one token of a row, a pure function of (seed, number of the output, token id).

Owns the hash, SplitMix64's finaliser (Steele, Lea, Flood 2014), and what a token's arrival time is
made of, in the same 64-bit integers as the worker's sampler on the CPU; never keeps state. Used by
the kernels of `sampling`. A token of weight w arrives after -log(u) / w, and the first is drawn.
"""

import triton
import triton.language as tl

GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
MAX_SCALE = tl.constexpr(1e30)
"""Largest 1 / temperature; it separates any two logits, and leaves a difference of zero zero."""


@triton.jit
def mix(z: tl.tensor):
    """A bijection of uint64 numbers."""
    z = (z ^ (z >> 30)) * MULTIPLIER_1
    z = (z ^ (z >> 27)) * MULTIPLIER_2
    return z ^ (z >> 31)


@triton.jit
def row_start(seed: tl.tensor, output_index: tl.tensor):
    """Where the sequence over the tokens of one row starts; int64 and int32 scalars."""
    start = mix(seed.to(tl.uint64))
    return mix(start + (output_index + 1).to(tl.uint64) * GOLDEN_GAMMA)


@triton.jit
def token_noise(start: tl.tensor, ids: tl.tensor):
    """-log(u) in float32 for each id, u an odd multiple of 2**-53 in (0, 1).

    Both ends of the unit interval need all their digits: u near 0 as it is, u near 1 by its
    distance v to 1, for which log(1 - v) is made of log of the rounded 1 - v (Kahan's log1p).
    """
    hashes = mix(start + (ids + 1).to(tl.uint64) * GOLDEN_GAMMA) >> 12
    odd = (hashes.to(tl.int64) << 1) + 1
    is_low = odd < (1 << 52)
    v = tl.where(is_low, odd, (1 << 53) - odd).to(tl.float32) * (2.0**-53)
    rounded = tl.where(is_low, v, 1.0 - v)
    minus_log = -tl.log(rounded)
    gap = 1.0 - rounded
    is_tiny = gap == 0.0
    near_one = tl.where(is_tiny, v, minus_log * (v / tl.where(is_tiny, 1.0, gap)))
    return tl.where(is_low, minus_log, near_one)


@triton.jit
def scale_of(temperature: tl.tensor):
    """What logits are multiplied with; the largest for greedy rows."""
    return 1.0 / tl.maximum(temperature, 1.0 / MAX_SCALE)


@triton.jit
def weights_of(logits: tl.tensor, peak: tl.tensor, scale: tl.tensor):
    """exp((logit - peak) / temperature); clamped, so that no product or difference overflows."""
    return tl.exp(tl.minimum(tl.maximum(logits - peak, -1e8), 0.0) * scale)
