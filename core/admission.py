"""Who may start now: the admission policies, by name.

A policy is a pure function of integers: may this candidate take its blocks, given who runs? It is
asked only when the blocks of the candidate's known tokens are free and somebody else runs, so it
can delay a request and never starve it. `--admission` chooses one; packages add theirs under the
entry point group `cearx.policies`.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import NamedTuple, TypeAlias

import msgspec

from cearx.core.forecast import Growth, first_overflow

ENTRY_POINTS = "cearx.policies"
WATERMARK_BLOCKS = 8
LONG_PROMPT_WATERMARK_BLOCKS = 64
"""For prompts longer than a block."""
PAYS_FROM = 4
"""A start pays if it brings at least 1/4 as many tokens as its preemption would compute again."""


class Runner(NamedTuple):
    """A request for a policy's eyes; lengths in tokens."""

    num_prompt_tokens: int
    num_tokens: int
    """Known now."""
    max_length: int
    """Of prompt and output, what it may reach at most."""
    expected_length: int
    """What it is expected to reach."""
    num_blocks: int
    """Held now (by a candidate: to be taken now), those from the cache left out."""
    num_shared: int
    """Blocks from the cache."""


class Situation(msgspec.Struct, kw_only=True):
    """Who runs and what the pool has, before the candidate."""

    num_blocks: int
    block_size: int
    num_free: int
    """After the candidate's hits are taken, before its new blocks are."""
    num_to_come: int
    """Blocks that those who run will take in addition if all reach their greatest lengths."""
    margin_blocks: int
    """What the forecast has to leave free."""
    find_runners: Callable[[], list[Runner]]
    found: list[Runner] | None = None

    @property
    def runners(self) -> list[Runner]:
        """Who runs, looked up when a policy asks."""
        if self.found is None:
            self.found = self.find_runners()
        return self.found

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


Policy: TypeAlias = Callable[[Situation, Runner], bool]


def greedy(situation: Situation, candidate: Runner) -> bool:
    """Whoever fits now may start; what happens later is preemption's business."""
    return True


def watermark(situation: Situation, candidate: Runner) -> bool:
    """Everyone's whole length is reserved, and a fixed number of blocks is kept free on top."""
    reserve = (
        LONG_PROMPT_WATERMARK_BLOCKS
        if candidate.num_prompt_tokens > situation.block_size
        else WATERMARK_BLOCKS
    )
    need = situation.blocks(candidate.max_length - 1) - candidate.num_shared
    return need + reserve + situation.num_to_come <= situation.num_free


def forecast(situation: Situation, candidate: Runner) -> bool:
    """Starts it unless the pool would overflow too soon for that to pay.

    What it computes until then is not lost: a preempted request keeps its tokens, and only their
    KV is computed again, many tokens a step. So the question is not whether it may be preempted
    but whether it gets far enough before that.
    """
    limit = situation.num_blocks - situation.margin_blocks
    num_used = situation.num_blocks - situation.num_free
    most = situation.blocks(candidate.max_length - 1) - candidate.num_shared
    if num_used + situation.num_to_come + most <= limit:
        return True  # even if all of them were at their ends at once
    num_held = num_used + candidate.num_blocks
    everyone = [*situation.runners, candidate]
    growths = [
        Growth(
            num_steps=r.expected_length - r.num_tokens,
            num_tokens=r.num_tokens,
            num_blocks=r.num_blocks,
            num_held=r.num_blocks + r.num_shared,
        )
        for r in everyone
    ]
    num_steps = first_overflow(growths, num_held, limit, situation.block_size)
    return num_steps is None or pays(num_steps, candidate.num_tokens)


def pays(num_new_tokens: int, num_tokens: int) -> bool:
    """Whether so many new tokens are worth computing them and `num_tokens` again."""
    return num_new_tokens * PAYS_FROM >= num_tokens + num_new_tokens


POLICIES: dict[str, Policy] = {"forecast": forecast, "watermark": watermark, "greedy": greedy}
_loaded: dict[str, Policy] = {}
"""From installed packages, once somebody asked for them."""


def find_policy(name: str) -> Policy:
    """One of the table or that `load_policy` has loaded; raises ValueError.

    Loads nothing by itself: the name may come from a file that somebody sent.
    """
    policy = POLICIES.get(name) or _loaded.get(name)
    if policy is None:
        names = ", ".join([*POLICIES, *_loaded])
        raise ValueError(f"admission must be one of {names}, got {name!r}")
    return policy


def load_policy(name: str) -> Policy:
    """As `find_policy`, but a person asked for this name: an installed package may bring it."""
    installed = entry_points(group=ENTRY_POINTS)
    for entry_point in installed:
        if entry_point.name == name and name not in POLICIES:
            _loaded[name] = entry_point.load()
    if name not in POLICIES and name not in _loaded:
        names = ", ".join([*POLICIES, *sorted(entry_point.name for entry_point in installed)])
        raise ValueError(f"admission must be one of {names}, got {name!r}")
    return find_policy(name)
