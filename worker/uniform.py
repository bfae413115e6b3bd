"""Random numbers without state: a uniform number from (seed, index of the output token).

Owns the hash and nothing else; never keeps a generator, so that neither batching, chunking nor
preemption can shift what a request draws. Called by the sampler, once a random row.
"""

MASK_64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def uniform(seed: int, token_index: int) -> float:
    """A multiple of 2**-53 in [0, 1) for the request's output token `token_index`, from 0.

    The seed is mixed before it starts its SplitMix64 sequence, because the sequences of two seeds
    that differ by a multiple of the gamma would be shifted copies of each other otherwise.
    """
    start = _mix(seed & MASK_64)
    return (_mix((start + (token_index + 1) * GOLDEN_GAMMA) & MASK_64) >> 11) * 2.0**-53
