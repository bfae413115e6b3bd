"""Random numbers without state: a uniform number from (seed, index of the output, token id).

Owns the hash and nothing else; never keeps a generator, so that neither batching, chunking nor
preemption can shift what a request draws, and never looks at which tokens a filter kept: a token
has its number by its id. Called by the sampler, once a random row. Legend: V vocabulary.
"""

import numpy as np
from numpy.typing import NDArray

MASK_64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB

BITS_OF_ONE = 0x3FF0000000000000
"""Sign and exponent of the float64 numbers in [1, 2)."""
BELOW_ONE = 1.0 - 2.0**-53
"""Taken from a multiple of 2**-52 in [1, 2), it leaves an odd multiple of 2**-53 in (0, 1)."""


class TokenUniforms:
    """Uniform numbers for a vocabulary's tokens, in scratch memory that is allocated once."""

    def __init__(self, vocab_size: int) -> None:
        self._steps_V = np.arange(1, vocab_size + 1, dtype=np.uint64) * GOLDEN_GAMMA
        self._hash_V = np.empty(vocab_size, np.uint64)
        self._shifted_V = np.empty(vocab_size, np.uint64)

    def draw(
        self, seed: int, output_index: int, ids: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Numbers in (0, 1), odd multiples of 2**-53, for tokens `ids` (all of them if None).

        They are those of the request's output token `output_index`, from 0. The result is scratch
        memory: it may be overwritten, and holds until the next call.
        """
        steps = self._steps_V if ids is None else self._steps_V[ids]
        hashes = np.add(steps, row_start(seed, output_index), out=self._hash_V[: len(steps)])
        _mix_in_place(hashes, self._shifted_V[: len(steps)])
        hashes >>= 12
        hashes |= BITS_OF_ONE
        uniforms = hashes.view(np.float64)
        uniforms -= BELOW_ONE
        return uniforms


def row_start(seed: int, output_index: int) -> np.uint64:
    """Where the SplitMix64 sequence over the tokens of one row starts.

    Seed and index are mixed before they start a sequence, because the sequences of two starts that
    differ by a small multiple of the gamma are shifted copies of each other.
    """
    start = _mix(seed & MASK_64)
    return np.uint64(_mix((start + (output_index + 1) * GOLDEN_GAMMA) & MASK_64))


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers."""
    z = ((z ^ (z >> 30)) * MULTIPLIER_1) & MASK_64
    z = ((z ^ (z >> 27)) * MULTIPLIER_2) & MASK_64
    return z ^ (z >> 31)


def _mix_in_place(z: NDArray[np.uint64], shifted: NDArray[np.uint64]) -> None:
    """`_mix` of every element; `shifted` is scratch memory of the same size."""
    z ^= np.right_shift(z, 30, out=shifted)
    z *= MULTIPLIER_1
    z ^= np.right_shift(z, 27, out=shifted)
    z *= MULTIPLIER_2
    z ^= np.right_shift(z, 31, out=shifted)
