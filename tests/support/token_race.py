"""The exponential race of one row, written a second time: plain integers and a loop.

Nothing here comes from the product, so that neither the hash nor the race can change unseen. The
race is run on the logarithm of the arrival times (Gumbel noise), which the product never computes.
"""

import math
from collections.abc import Sequence

TWO_64 = 2**64
GAMMA = 11400714819323198485  # 2**64 over the golden ratio, made odd
MULTIPLIERS = ((30, 13787848793156543929), (27, 10723151780598845931))


def finalise(z: int) -> int:
    """SplitMix64's finaliser."""
    for shift, multiplier in MULTIPLIERS:
        z = (z ^ z >> shift) * multiplier % TWO_64
    return z ^ z >> 31


def unfinalise(z: int) -> int:
    """The number whose `finalise` is z."""
    z = _unshift(z, 31)
    for shift, multiplier in reversed(MULTIPLIERS):
        z = _unshift(z * pow(multiplier, -1, TWO_64) % TWO_64, shift)
    return z


def _unshift(z: int, shift: int) -> int:
    return z ^ z >> shift ^ z >> 2 * shift ^ z >> 3 * shift


def token_hash(seed: int, output_index: int, token_id: int) -> int:
    """64 bits from the three numbers."""
    row = finalise((finalise(seed % TWO_64) + (output_index + 1) * GAMMA) % TWO_64)
    return finalise((row + (token_id + 1) * GAMMA) % TWO_64)


def seed_of_hash(value: int, output_index: int, token_id: int) -> int:
    """The seed for which `token_hash` of this output and token is `value`."""
    row = (unfinalise(value) - (token_id + 1) * GAMMA) % TWO_64
    return unfinalise((unfinalise(row) - (output_index + 1) * GAMMA) % TWO_64)


def token_uniform(seed: int, output_index: int, token_id: int) -> float:
    """The middle of one of 2**52 equal parts of [0, 1], chosen by the hash's upper bits."""
    return (2 * (token_hash(seed, output_index, token_id) // 2**12) + 1) / 2**53


def race(
    scaled_logits: Sequence[float], kept: Sequence[int], seed: int, output_index: int
) -> tuple[int, float]:
    """The winner among the tokens `kept`, ascending, and how far the next one is behind.

    Logits are those divided by the temperature; the distance is theirs too.
    """
    best, best_score, second_score = -1, -math.inf, -math.inf
    for token_id in kept:
        score = scaled_logits[token_id] - math.log(
            -math.log(token_uniform(seed, output_index, token_id))
        )
        if score > best_score:
            best, best_score, second_score = token_id, score, best_score
        elif score > second_score:
            second_score = score
    return best, best_score - second_score
