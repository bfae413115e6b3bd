"""When, on present knowledge, the pool will be full: block use is followed from end to end.

Everyone who runs grows by one token a step until its own end, which frees its blocks; so block use
peaks just before somebody ends, and those moments are all that has to be looked at. The idea is
LightLLM's past-future scheduler (arXiv 2507.10150). A pure function, called by `admission.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Growth(NamedTuple):
    """One request's future."""

    num_steps: int
    """Until its end: tokens that it will still sample."""
    num_tokens: int
    """Known tokens."""
    num_blocks: int
    """Blocks held now that its end frees."""
    num_held: int
    """Blocks held now, those that others hold as well included."""


def first_overflow(
    growths: Sequence[Growth], num_held: int, limit: int, block_size: int
) -> int | None:
    """Steps until more than `limit` blocks are in use, None when that never happens.

    `num_held` blocks are in use now. Linear in the requests, after a sort by their ends.
    """
    residues = [0] * block_size
    whole_blocks = held = num_growing = 0
    freed = sum(growth.num_blocks for growth in growths)
    overflow: tuple[int, int, int] | None = None
    last_ends = sorted(growths, reverse=True)
    for index, growth in enumerate(last_ends):
        # All that end at this moment or later are still there just before it.
        whole, residue = divmod(growth.num_tokens - 1, block_size)
        residues[residue] += 1
        whole_blocks += whole
        held += growth.num_held
        freed -= growth.num_blocks
        num_growing += 1
        if index + 1 < len(last_ends) and last_ends[index + 1].num_steps == growth.num_steps:
            continue
        # ceil((tokens - 1 + steps) / block_size), summed over everyone by residue.
        turns, rest = divmod(growth.num_steps, block_size)
        blocks = whole_blocks + num_growing * (turns + 1) + sum(residues[block_size - rest + 1 :])
        if not rest:
            blocks -= residues[0]
        used = num_held - freed + max(blocks - held, 0)
        if used > limit:
            overflow = growth.num_steps, used - limit, num_growing
    if overflow is None:
        return None
    at, excess, count = overflow
    earlier = max((g.num_steps for g in growths if g.num_steps < at), default=0)
    return max(earlier, at - (excess * block_size + count - 1) // count, 0)
