"""What the output lengths of ended requests say about those that still run.

A histogram of integers with eight buckets an octave that forgets slowly; it is state. Fed when a
request ends by itself, asked by the forecast.
"""

import msgspec

LINEAR = 16
"""Lengths below this have a bucket each."""
NUM_BUCKETS = LINEAR + 8 * 28
MAX_COUNT = 2048
"""When so many are counted all counts are halved."""
QUANTILE = (2, 3)
"""As a fraction: of those that got as far, so many end at or before the expected length."""
PRIOR = tuple((length, 4) for length in (32, 64, 128, 256, 512, 1024))
"""Believed before anything was seen: (length, count)."""


def bucket_of(length: int) -> int:
    """The bucket of a length of at least one token."""
    if length < LINEAR:
        return length
    octave = length.bit_length() - 5
    return min(LINEAR + 8 * octave + (length >> (octave + 1)) - 8, NUM_BUCKETS - 1)


def upper_bound(bucket: int) -> int:
    """The longest length in a bucket."""
    if bucket < LINEAR:
        return bucket
    octave, part = divmod(bucket - LINEAR, 8)
    return ((part + 9) << (octave + 1)) - 1


def _prior() -> list[int]:
    counts = [0] * NUM_BUCKETS
    for length, count in PRIOR:
        counts[bucket_of(length)] += count
    return counts


class OutputLengths(msgspec.Struct, array_like=True, kw_only=True):
    counts: list[int] = msgspec.field(default_factory=_prior)

    def observe(self, length: int) -> None:
        self.counts[bucket_of(length)] += 1
        if sum(self.counts) > MAX_COUNT:
            self.counts = [count // 2 for count in self.counts]

    def expected(self) -> list[int]:
        """For each bucket: the length expected of a request whose output is in it by now.

        0 where nobody got as far.
        """
        found = [0] * NUM_BUCKETS
        tails = [0] * (NUM_BUCKETS + 1)
        """How many ended in this bucket or a later one."""
        for bucket in range(NUM_BUCKETS - 1, -1, -1):
            tails[bucket] = tails[bucket + 1] + self.counts[bucket]
        part, whole = QUANTILE
        end = 0
        for bucket in range(NUM_BUCKETS):
            if not tails[bucket]:
                break
            end = max(end, bucket)
            while (tails[bucket] - tails[end + 1]) * whole < tails[bucket] * part:
                end += 1
            found[bucket] = upper_bound(end)
        return found


def expected_length(expected: list[int], num_outputs: int, max_tokens: int) -> int:
    """Output tokens that a request is expected to have in the end: more than it has now."""
    guess = expected[bucket_of(num_outputs)] if num_outputs else expected[0]
    if guess <= num_outputs:  # nobody got as far
        guess = num_outputs + num_outputs // 4 + 1
    return min(guess, max_tokens)
